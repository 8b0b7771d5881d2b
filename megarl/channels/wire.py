"""A message as two flat tensors: a header of fixed length and one payload of bytes.

Called by the collective channels on both ends. Nothing is pickled: the receiver knows the message
type from its channel, and the header is checked against it.
"""

from __future__ import annotations

from dataclasses import fields
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from megarl.errors import ChannelError
from megarl.types import Message, field_tensors

HEADER_LENGTH = 64
_DTYPES = (torch.int64, torch.float32, torch.float64, torch.uint8)
_MAX_DIMS = 2
_MAGIC = 0x6D656761

M = TypeVar("M", bound=Message)


def pack(message: Message) -> tuple[Tensor, Tensor]:
    """Return (header [64] int64, payload [..] uint8) of ``message``.

    Header: magic, payload bytes, number of fields, then for each field its dtype's index, its
    number of dimensions and two sizes.
    """
    tensors = field_tensors(message)
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    header = torch.zeros(HEADER_LENGTH, dtype=torch.int64)
    header[:3] = torch.tensor([_MAGIC, payload.numel(), len(tensors)])
    for index, tensor in enumerate(tensors):
        sizes = [*tensor.shape, *([0] * _MAX_DIMS)][:_MAX_DIMS]
        entry = [_DTYPES.index(tensor.dtype), tensor.dim(), *sizes]
        header[3 + index * 4 : 7 + index * 4] = torch.tensor(entry)
    return header, payload


def payload_length(header: Tensor, where: str) -> int:
    """Return the payload's length in bytes.

    Raises:
        ChannelError: the header is not one of ours.
    """
    if int(header[0]) != _MAGIC:
        raise ChannelError(f"{where}: received something that is not a message header")
    return int(header[1])


def unpack(message_type: type[M], header: Tensor, payload: Tensor, where: str) -> M:
    """Rebuild the message.

    Raises:
        ChannelError: the sender's message has other fields than ``message_type``.
    """
    names = [field.name for field in fields(message_type)]
    if int(header[2]) != len(names):
        raise ChannelError(
            f"{where}: expected {message_type.__name__} with {len(names)} fields, "
            f"got a message with {int(header[2])}"
        )
    values: dict[str, Tensor] = {}
    offset = 0
    for index, name in enumerate(names):
        code, dims, *sizes = header[3 + index * 4 : 7 + index * 4].tolist()
        dtype, shape = _DTYPES[code], tuple(sizes[:dims])
        end = offset + prod(shape) * dtype.itemsize
        # A copy, since a slice of the payload need not be aligned for its dtype.
        values[name] = payload[offset:end].clone().view(dtype).view(shape)
        offset = end
    return message_type(**values)
