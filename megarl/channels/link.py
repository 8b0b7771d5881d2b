"""One message over one group: point to point, or from a group's first rank to all of it.

Called by the collective channels and by the requests of replicas, on both ends.
"""

from __future__ import annotations

import torch
from torch.distributed import BroadcastOptions

from megarl.channels.wire import HEADER_LENGTH, M, pack, payload_length, unpack
from megarl.types import Message
from megarl.world import Group, Wait


def send(group: Group, wait: Wait, message: Message, target: int, tag: int, label: str) -> None:
    """Send header and payload under ``tag`` and the one after it."""
    for offset, tensor in enumerate(pack(message)):
        if tensor.numel():
            wait(group.send([tensor], target, tag + offset), label)


def receive(group: Group, wait: Wait, kind: type[M], source: int, tag: int, label: str) -> M:
    """Receive what `send` sent.

    Raises:
        ChannelError: it is no message of ``kind``.
    """
    header = torch.empty(HEADER_LENGTH, dtype=torch.int64)
    wait(group.recv([header], source, tag), label)
    payload = torch.empty(payload_length(header, label), dtype=torch.uint8)
    if payload.numel():
        wait(group.recv([payload], source, tag + 1), label)
    return unpack(kind, header, payload, label)


def from_first_rank() -> BroadcastOptions:
    """Return the options of a broadcast whose root is the group's first rank."""
    options = BroadcastOptions()
    options.rootRank = 0
    return options


def fan_out(group: Group, wait: Wait, kind: type[M], message: M | None, label: str) -> M:
    """Bring the first rank's message to all ranks of the group, who all enter; the others give None."""
    options = from_first_rank()
    header, payload = (
        pack(message)
        if message is not None
        else (torch.empty(HEADER_LENGTH, dtype=torch.int64), None)
    )
    wait(group.broadcast([header], options), label)
    if payload is None:
        payload = torch.empty(payload_length(header, label), dtype=torch.uint8)
    if payload.numel():
        wait(group.broadcast([payload], options), label)
    return message if message is not None else unpack(kind, header, payload, label)
