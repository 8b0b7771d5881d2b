"""Whether what a checkpoint holds twice is twice the same; what is left out would be lost else.

Called by `coverage` before a conversion, and by readers that cannot tell otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.store import Chunk, Repeat

_COMPARED_BYTES = 1 << 20


def check_repeats(folder: Path, repeats: tuple[Repeat, ...]) -> None:
    """Compare all that ``folder`` holds twice.

    Raises:
        ConversionError: two of them differ; names both.
    """
    for repeat in repeats:
        if not is_same(folder, repeat.read, repeat.other):
            raise ConversionError(
                f"{repeat.name} of {folder / repeat.other.file} differs from what it repeats, at "
                f"byte {repeat.read.offset} of {folder / repeat.read.file}"
            )


def is_same(folder: Path, first: Chunk, other: Chunk) -> bool:
    """Compare the bytes of two chunks."""
    if (first.dtype, first.box.shape) != (other.dtype, other.box.shape):
        return False
    pairs = zip(_bytes(folder, first), _bytes(folder, other), strict=True)
    return all(a == b for a, b in pairs)


def _bytes(folder: Path, chunk: Chunk) -> Iterator[bytes]:
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.offset)
        for at in range(0, chunk.nbytes, _COMPARED_BYTES):
            yield file.read(min(_COMPARED_BYTES, chunk.nbytes - at))
