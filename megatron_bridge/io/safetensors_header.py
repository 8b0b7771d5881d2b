"""The header of a safetensors file: where each tensor's bytes lie. Read and written by `hf_store`.

Eight bytes of length, little-endian; a JSON object of that length; the data without gaps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.torch_archive import Located

_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 100 << 20  # the safetensors library's own limit
_ALIGNMENT = 8
_NAMES = {
    "F32": ("float32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_DTYPES = {dtype: name for name, (dtype, _) in _NAMES.items()}


def read_header(path: Path) -> dict[str, Located]:
    """Return where each tensor of a file lies.

    Raises:
        ConversionError: the file is missing, truncated or no safetensors file; names it.
    """
    if not path.is_file():
        raise ConversionError(f"{path} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else -1
        if not 0 < length <= min(_LARGEST_HEADER, size - _LENGTH.size):
            raise ConversionError(
                f"{path} is truncated or not a safetensors file: a header of {length} bytes in a "
                f"file of {size}"
            )
        text = file.read(length)
    first = _LENGTH.size + length
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        spans = {name: _located(entry, first) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path} is not a safetensors file: {error!r}") from error
    _check_spans(path, [span for _, span in spans.values()], (first, size))
    return {name: tensor for name, (tensor, _) in spans.items()}


def _located(entry: dict[str, Any], first: int) -> tuple[Located, tuple[int, int]]:
    """Return a tensor of a header, and the bytes of the file that are its own."""
    dtype, itemsize = _NAMES[entry["dtype"]]
    shape = tuple(map(int, entry["shape"]))
    start, stop = map(int, entry["data_offsets"])
    if stop - start != prod(shape) * itemsize:
        raise ValueError(f"{stop - start} bytes for {dtype} {shape}")
    tensor = Located(dtype=dtype, shape=shape, offset=first + start, contiguous=True)
    return tensor, (first + start, first + stop)


def _check_spans(path: Path, spans: list[tuple[int, int]], whole: tuple[int, int]) -> None:
    """Check that tensors' bytes follow one another from the header to the end of the file."""
    first, size = whole
    stop = max((stop for _, stop in spans), default=first)
    if stop > size:
        raise ConversionError(f"{path} is truncated: it has {size} bytes, its header says {stop}")
    ordered = [(first, first), *sorted(spans), (size, size)]
    for (_, before), (after, _) in pairwise(ordered):
        if before != after:
            raise ConversionError(
                f"{path} is corrupt: bytes {min(before, after)} to {max(before, after)} belong to "
                "two tensors or to none"
            )


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """Return the start of a file that holds tensors (dtype, shape, bytes), in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text
