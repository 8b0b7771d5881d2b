"""Reading the parameters of one checkpoint out of another's files, as a plan says.

Called by `convert`, window by window, and by `verify`, whose target is the canonical space. Files
are mapped for the byte range of a window and no longer, so that what is read does not stay in
memory, whatever the size of a file.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bridge.box import Box
from megatron_bridge.errors import ConversionError
from megatron_bridge.io.store import Chunk, Place, Stored
from megatron_bridge.operations import BLOCK, ITEMSIZE, is_block_aligned
from megatron_bridge.plan import TransferPlan
from megatron_bridge.quantize import dequantize_blockwise, quantize_blockwise
from megatron_bridge.routes import Part, Region, moved
from megatron_bridge.spec import LocalParam


class Piece(NamedTuple):
    """A region of a target's parameter, and where its elements are."""

    target_box: Box
    source: Place
    source_box: Box


class Gather:
    """Finds what a target's parameters consist of; threads share it."""

    def __init__(self, source: Stored, plan: TransferPlan):
        """``plan`` fills a side of one rank from that of ``source``."""
        self._source = source
        self._parts: dict[str, list[tuple[Part, int, list[Region]]]] = defaultdict(list)
        known: dict[int, dict[str, list[Region]]] = {}  # equal layers share their regions
        for route in plan.routes:
            for part in route.parts:
                if id(part.regions) not in known:
                    known[id(part.regions)] = _by_target(part.regions)
                for name, regions in known[id(part.regions)].items():
                    entry = (part, route.sources[0], regions)
                    self._parts[part.target_prefix + name].append(entry)
        self._quantized = {
            (rank, param.name): param
            for rank in source.side.ranks
            for param in source.side.manifest(rank).params
            if param.quantization
        }

    def _pieces(self, name: str) -> list[Piece]:
        found = [
            Piece(
                region.target_box,
                (rank, part.source_prefix + region.source_param),
                region.source_box,
            )
            for part, rank, regions in self._parts[name]
            for region in regions
        ]
        return sorted(found, key=lambda piece: piece.target_box)

    def reader(self, name: str) -> Reader:
        """Return what reads one parameter of the target."""
        return Reader(self._source, self._quantized, name, self._pieces(name))


def _by_target(regions: tuple[Region, ...]) -> dict[str, list[Region]]:
    found: dict[str, list[Region]] = defaultdict(list)
    for region in regions:
        found[region.target_param].append(region)
    return found


class Reader:
    """Reads one parameter of a target in one thread; source files are open inside ``with``."""

    def __init__(
        self, source: Stored, quantized: dict[Place, LocalParam], name: str, pieces: list[Piece]
    ):
        self._source, self._quantized = source, quantized
        self._name, self._pieces = name, pieces
        self._starts = [piece.target_box.start[0] for piece in pieces]
        self._tallest = max((piece.target_box.shape[0] for piece in pieces), default=0)
        self._files: dict[Path, int] = {}
        self._buffers: dict[str, Tensor] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    @property
    def dtype(self) -> str:
        """Return in which dtype the source holds the parameter's elements."""
        return self._source.chunks[self._pieces[0].source][0].dtype

    def windows(self, box: Box, rows: int, *, at_pieces: bool = True) -> Iterator[Box]:
        """Cut a region into windows of at most so many rows.

        One ends where another piece begins, unless it were small: what is a part of one piece is
        written from where it is mapped. Not so without ``at_pieces``, where rows stay together.
        """
        row = box.start[0]
        while row < box.stop[0]:
            stop = min(row + rows, box.stop[0])
            place = bisect_right(self._starts, row + rows // 16)
            if at_pieces and place < len(self._starts):
                stop = min(stop, self._starts[place])
            yield Box((row, *box.start[1:]), (stop, *box.stop[1:]))
            row = stop

    def window(self, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a region of the target's parameter, row-major; what no piece covers is zero.

        It may be a view of the source's file, not to be written to, and lasts until the next call.

        Raises:
            ConversionError: ``dtype`` cannot hold a value.
        """
        found = list(self.within(box))
        if len(found) == 1 and found[0].target_box == box:
            values = self._values(found[0], dtype)
            if values.dtype is dtype and values.is_contiguous():
                return values
            return self._checked(values, self._buffer("window", box, dtype).copy_(values))
        window = self._buffer("window", box, dtype)
        if sum(piece.target_box.numel for piece in found) < box.numel:
            window.zero_()
        for piece in found:
            values = self._values(piece, dtype)
            self._checked(values, window[_inside(piece.target_box, box)].copy_(values))
        return window

    def _buffer(self, what: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return memory for a region; new memory for each window would cost as much as the copy."""
        size = box.numel * dtype.itemsize
        if what not in self._buffers or len(self._buffers[what]) < size:
            self._buffers[what] = torch.empty(size, dtype=torch.uint8)
        return self._buffers[what][:size].view(dtype).view(box.shape)

    def quantized_window(self, box: Box) -> tuple[Tensor, Tensor]:
        """Return the FP8 elements of a region of whole blocks, and its blocks' scales.

        What the source has in FP8 keeps its bits; anything else is quantised as it is stored.

        Raises:
            ConversionError: the blocks of the source are others than those of the target.
            QuantizationError: a value is not finite.
        """
        found = list(self.within(box))
        grid = _grid(box)
        elements = self._buffer("elements", box, torch.float8_e4m3fn)
        scales = self._buffer("scales", grid, torch.float32)
        if not all(piece.source in self._quantized for piece in found):
            quantize_blockwise(self.window(box, getattr(torch, self.dtype)), elements, scales)
            return elements, scales
        for piece in found:
            (rank, _), param = piece.source, self._quantized[piece.source]
            for where, shape in ((piece.source_box, param.shape), (piece.target_box, box.stop)):
                if not all(map(is_block_aligned, where.start, where.stop, shape)):
                    raise ConversionError(
                        f"{self._name}: {where} of {param.name} cuts a block of {BLOCK} x {BLOCK} "
                        "that has one scale; expected whole blocks"
                    )
            stored = self._read(piece.source, piece.source_box)
            elements[_inside(piece.target_box, box)].copy_(stored)
            factors = self._read((rank, param.scales), _grid(piece.source_box))
            scales[_inside(_grid(piece.target_box), grid)].copy_(factors)
        return elements, scales

    def within(self, box: Box) -> Iterator[Piece]:
        """Yield what of the pieces lies in ``box``, in the order of first rows."""
        first = bisect_left(self._starts, box.start[0] - self._tallest + 1)
        last = bisect_left(self._starts, box.stop[0])
        for target_box, source, source_box in self._pieces[first:last]:
            common = target_box.intersect(box)
            if common is not None:
                yield Piece(common, source, moved(common, target_box, source_box))

    def _values(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Return a piece as it is stored, or, where that is FP8, times its scales."""
        param = self._quantized.get(piece.source)
        if param is None:
            return self._read(piece.source, piece.source_box)
        rank, box = piece.source[0], piece.source_box
        grid = _grid(box)
        whole = Box(
            tuple(low * BLOCK for low in grid.start),
            tuple(
                min(high * BLOCK, size) for high, size in zip(grid.stop, param.shape, strict=True)
            ),
        )
        wide = torch.float32 if dtype is torch.float16 else dtype
        values = self._buffer("dequantized", whole, wide)
        scales = self._read((rank, param.scales), grid).float()
        dequantize_blockwise(self._read(piece.source, whole), scales, values)
        return values[_inside(box, whole)]

    def _checked(self, values: Tensor, cast: Tensor) -> Tensor:
        """Return ``cast``; refuse values that float16 alone of all dtypes is too small for."""
        if cast.dtype is torch.float16 and values.dtype is not torch.float16:
            lost = values.isfinite() & ~cast.isfinite()
            if lost.any():
                raise ConversionError(
                    f"{self._name} holds {values[lost][0].item():g}, which float16 cannot hold, "
                    f"expected magnitudes up to {torch.finfo(torch.float16).max:g}"
                )
        return cast

    def _read(self, place: Place, box: Box) -> Tensor:
        """Return a region of a stored parameter: a view of its file where one chunk holds it."""
        chunks = self._source.chunks[place]
        found = [(chunk, chunk.box.intersect(box)) for chunk in chunks]
        common = [(chunk, part) for chunk, part in found if part is not None]
        if len(common) == 1:
            return self._view(*common[0])
        whole = torch.empty(box.shape, dtype=getattr(torch, chunks[0].dtype))
        for chunk, part in common:
            whole[_inside(part, box)].copy_(self._view(chunk, part))
        return whole

    def _view(self, chunk: Chunk, box: Box) -> Tensor:
        """Map the bytes of a chunk from the region's first element to its last."""
        strides = [1]
        for size in reversed(chunk.box.shape[1:]):
            strides.insert(0, strides[0] * size)
        offsets = [low - origin for low, origin in zip(box.start, chunk.box.start, strict=True)]
        first = sum(map(int.__mul__, offsets, strides))
        count = 1 + sum(
            (size - 1) * stride for size, stride in zip(box.shape, strides, strict=True)
        )
        itemsize = ITEMSIZE[chunk.dtype]
        begin = chunk.offset + first * itemsize
        page = begin - begin % mmap.ALLOCATIONGRANULARITY
        # A private mapping: torch wants memory that it may write to, the file stays as it is.
        mapped = mmap.mmap(
            self._descriptor(chunk.file),
            begin - page + count * itemsize,
            access=mmap.ACCESS_COPY,
            offset=page,
        )
        dtype = getattr(torch, chunk.dtype)
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin - page)
        return flat.as_strided(box.shape, strides)

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(self._source.folder / file, os.O_RDONLY)
        return self._files[file]


def _grid(box: Box) -> Box:
    """Return which scales belong to a region's elements."""
    return Box(
        tuple(low // BLOCK for low in box.start), tuple(-(-high // BLOCK) for high in box.stop)
    )


def _inside(part: Box, box: Box) -> tuple[slice, ...]:
    """Index a tensor that is ``box`` with a part of it."""
    return part.shift(tuple(-low for low in box.start)).slices
