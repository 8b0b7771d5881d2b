"""Files of ``torch.save`` without their data: where each tensor's bytes lie, and blank ones to fill.

Readers of torch checkpoints call `read_archive`: it runs no code of the pickle (unknown classes
become `Inert`) and reads no tensor. `blank_archive` gives the bytes around a tensor's data, which
its caller writes itself. Such a file is a zip archive whose records are stored, not compressed.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_bridge.errors import ConversionError

_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of name and extra field at the end of 30 bytes
_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "",  # the tensor says its own
}
_PLAIN = {"set": set, "frozenset": frozenset, "list": list, "dict": dict, "tuple": tuple}


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # byte of the file
    contiguous: bool  # row-major, without gaps


class Inert:
    """Stands for an object of a class that is not loaded; keeps its arguments and its state."""

    def __init__(self, *arguments: object, **_: object) -> None:
        self.arguments = arguments
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, item: object) -> None: ...

    def extend(self, items: object) -> None: ...


class _Window(io.RawIOBase):
    """Part of an open file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        )
        if self._at < 0:
            raise OSError(f"seek to {self._at}")
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        found = self._file.read(count)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str  # "": untyped
    offset: int
    nbytes: int


def _rebuild(storage: _Storage, offset: int, size: Any, stride: Any, *rest: Any) -> Located:
    """Stand for torch's `_rebuild_tensor_v2` and `_v3`, whose seventh argument is the dtype."""
    dtype = storage.dtype or rest[2]
    shape, itemsize = tuple(size), getattr(torch, dtype).itemsize
    dense = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    pairs = zip(shape, stride, dense, strict=True)
    contiguous = all(size == 1 or got == wanted for size, got, wanted in pairs)
    if contiguous and (offset + prod(shape)) * itemsize > storage.nbytes:
        raise ConversionError(
            f"a {dtype} tensor of shape {shape} exceeds its {storage.nbytes} bytes"
        )
    return Located(
        dtype=dtype, shape=shape, offset=storage.offset + offset * itemsize, contiguous=contiguous
    )


def _first(tensor: Located, *_: object) -> Located:
    """Stand for torch's `_rebuild_parameter`."""
    return tensor


_REBUILDERS = {
    "_rebuild_tensor_v2": _rebuild,
    "_rebuild_tensor_v3": _rebuild,
    "_rebuild_parameter": _first,
    "_rebuild_parameter_with_state": _first,
}


class InertUnpickler(pickle.Unpickler):
    """Loads plain containers and dtypes (as their names); runs no code that a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch", "Size"):
            return tuple
        if module in ("builtins", "__builtin__") and name in _PLAIN:
            return _PLAIN[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        return type(name, (Inert,), {"__module__": module})


class _Unpickler(InertUnpickler):
    def __init__(self, file: Any, archive: zipfile.ZipFile, start: int, prefix: str):
        super().__init__(file)
        self._archive, self._start, self._prefix = archive, start, prefix

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _REBUILDERS:
            return _REBUILDERS[name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> _Storage:
        dtype, key = pid[1], pid[2]
        record = self._archive.getinfo(f"{self._prefix}data/{key}")
        if record.compress_type != zipfile.ZIP_STORED:
            raise ConversionError(f"record {record.filename} is compressed")
        window: Any = self._archive.fp
        window.seek(record.header_offset)
        name, extra = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
        at = record.header_offset + _LOCAL_HEADER.size + name + extra
        return _Storage(dtype, self._start + at, record.file_size)


def read_archive(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Return what ``torch.save`` wrote into a file, or part of one, with `Located` for its tensors.

    Raises:
        ConversionError: the file is missing, truncated or no such archive; names it.
    """
    if not path.is_file():
        raise ConversionError(f"{path} is missing")
    size = path.stat().st_size
    length = size - start if length is None else length
    if start + length > size:
        raise ConversionError(
            f"{path} is truncated: it has {size} bytes, expected {start + length} or more"
        )
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(io.BufferedReader(_Window(file, start, length), 1024)) as archive:
                names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                pickled = io.BytesIO(archive.read(names[0]))
                prefix = names[0].removesuffix("data.pkl")
                return _Unpickler(pickled, archive, start, prefix).load()
        except (
            zipfile.BadZipFile,
            pickle.UnpicklingError,
            IndexError,
            KeyError,
            EOFError,
        ) as error:
            raise ConversionError(
                f"{path} is not an archive of torch.save at bytes {start} to {start + length}: "
                f"{error!r}"
            ) from error
        except ConversionError as error:
            raise ConversionError(f"{path}: {error}") from error


# --- Writing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    """What ``torch.save`` writes around one tensor's data."""

    size: int  # of all
    data: int  # where the data begin
    fixed: tuple[tuple[int, bytes], ...]  # (offset, bytes)


class _Sink:
    """A file that keeps what is written and where, not what is skipped."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.at = 0

    def write(self, content: bytes) -> int:
        piece = bytes(content)
        if self.pieces and sum(map(len, self.pieces[-1][1:]), self.pieces[-1][0]) == self.at:
            first, before = self.pieces.pop()
            self.pieces.append((first, before + piece))
        else:
            self.pieces.append((self.at, piece))
        self.at += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset if whence == io.SEEK_SET else self.at + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def flush(self) -> None: ...


@lru_cache(maxsize=4096)
def blank_archive(shape: tuple[int, ...], dtype: str) -> Blank:
    """Return the bytes of a file of one tensor, all but its data; its memory is never touched."""
    tensor, sink = torch.empty(shape, dtype=getattr(torch, dtype)), _Sink()
    with torch.serialization.skip_data():
        torch.save(tensor, sink)  # pyright: ignore - a binary file as far as it is used
    if len(sink.pieces) != 2:
        raise ConversionError(f"torch.save left {len(sink.pieces) - 1} gaps, expected 1")
    first, header = sink.pieces[0]
    return Blank(size=sink.at, data=first + len(header), fixed=tuple(sink.pieces))
