"""Whether chunks are a checkpoint: each parameter whole, each byte of a file once, nothing outside.

Called by `convert` and `verify` before they read or write the first byte.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from megatron_bridge.box import Box
from megatron_bridge.errors import ConversionError, PlanError
from megatron_bridge.io.repeats import check_repeats
from megatron_bridge.io.store import Chunk, Place, Stored, Target, TargetFile
from megatron_bridge.operations import BLOCK
from megatron_bridge.side import Side


def check_stored(stored: Stored) -> None:
    """Check that a checkpoint's files have all the bytes that its parameters are said to lie in.

    Raises:
        ConversionError: a file that is missing or too short, a parameter with a gap, scales that
            do not fit their weight, a repeated tensor that differs.
    """
    ends: dict[str, tuple[int, str]] = {}  # by file: where its last tensor ends, and its name
    for (_, name), chunks in stored.chunks.items():
        for chunk in chunks:
            file = str(chunk.file)
            ends[file] = max(ends.get(file, (0, "")), (chunk.offset + chunk.nbytes, name))
    for file, (end, name) in ends.items():
        path = stored.folder / file
        if not path.is_file():
            raise ConversionError(f"{path} is missing: it should hold {name}")
        if path.stat().st_size < end:
            raise ConversionError(
                f"{path} is truncated: it has {path.stat().st_size} bytes, expected at least {end} "
                f"for {name}"
            )
    fault = _uncovered(stored.side, stored.chunks)
    if fault:
        raise ConversionError(f"{stored.folder}: {fault}")
    check_repeats(stored.folder, stored.repeats)


def prove_files(target: Target) -> None:
    """Check that filling a new checkpoint's chunks writes all of it, and no byte twice.

    Raises:
        PlanError: names the file or the parameter.
    """
    chunks: dict[Place, tuple[Chunk, ...]] = defaultdict(tuple)
    for file in target.files:
        _prove_bytes(file)
        for name, parts in file.chunks.items():
            chunks[0, name] += parts
    fault = _uncovered(target.side, chunks)
    if fault:
        raise PlanError(f"new {target.format} checkpoint: {fault}")
    names = Counter([*(file.name for file in target.files), *target.closing])
    name, times = names.most_common(1)[0]
    if times > 1:
        raise PlanError(f"new {target.format} checkpoint: {name} would be written {times} times")


def _prove_bytes(file: TargetFile) -> None:
    if not file.chunks:
        raise PlanError(f"{file.name} would hold no parameter")
    spans = [(at, at + len(content), "fixed bytes") for at, content in file.fixed]
    for name, chunks in file.chunks.items():
        spans += [(chunk.offset, chunk.offset + chunk.nbytes, name) for chunk in chunks]
    at, before = 0, "the beginning"
    for start, stop, name in sorted(spans):
        if start < at:
            raise PlanError(f"{file.name}: {name} at byte {start} overlaps {before}, up to {at}")
        at, before = stop, name
    if at > file.size:
        raise PlanError(f"{file.name}: {before} ends at byte {at} of {file.size}")


def _uncovered(side: Side, chunks: Mapping[Place, Sequence[Chunk]]) -> str:
    """Return what is wrong with the first parameter that its chunks do not cover once, or ""."""
    for rank in side.ranks:
        params = side.manifest(rank).params
        shapes = {param.name: param.shape for param in params}
        for param in params:
            held = chunks.get((rank, param.name), ())
            fault = _fault(param.shape, held)
            if fault:
                return f"{param.name} {list(param.shape)} {fault}"
            if param.quantization == "block":
                grid = tuple(-(-size // BLOCK) for size in param.shape)
                if shapes.get(param.scales) != grid:
                    return (
                        f"{param.scales} has shape {shapes.get(param.scales)}, expected {grid}: one "
                        f"scale for each {BLOCK} x {BLOCK} block of {param.name} {param.shape}"
                    )
    return ""


def _fault(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> str:
    whole = Box.of_shape(shape)
    if len({chunk.dtype for chunk in chunks}) > 1:
        return f"is stored in several dtypes: {sorted({chunk.dtype for chunk in chunks})}"
    if len(chunks) == 1 and chunks[0].box == whole:
        return ""
    outside = [chunk.box for chunk in chunks if not whole.contains(chunk.box)]
    if outside:
        return f"has a region {outside[0]}, which lies outside"
    for index, chunk in enumerate(chunks):
        for other in chunks[:index]:
            if chunk.box.intersect(other.box) is not None:
                return f"has two regions that overlap: {other.box} and {chunk.box}"
    stored = sum(chunk.box.numel for chunk in chunks)
    return "" if stored == whole.numel else f"has {stored} stored elements, expected {whole.numel}"
