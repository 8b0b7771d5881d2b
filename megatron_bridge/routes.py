"""Routes: all that one group of replicas sends another, laid end to end as one line of bytes.

Called by the planner only. A group of source ranks that hold the same shards, and a group of target
ranks that want the same, meet in one `Route`, whatever the number of layers they share; how its line
is divided among the ranks (`flows`) and cut into messages (`Route.pieces`) is arithmetic.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import add, sub

from megatron_bridge.box import Box
from megatron_bridge.operations import BLOCK, is_block_aligned, wire_bytes
from megatron_bridge.side import Block, Side, Variant
from megatron_bridge.spec import LocalParam, Shard


@dataclass(frozen=True, kw_only=True)
class Region:
    """What a source variant and a target variant have in common of one tensor; names as in blocks."""

    tensor: str
    box: Box
    source_param: str
    source_box: Box
    target_param: str
    target_box: Box
    dtype: str
    quantization: str
    scales: str

    @cached_property
    def granule(self) -> int:
        """Rows that must stay together."""
        return BLOCK if self.quantization == "block" else 1

    @cached_property
    def units(self) -> int:
        return -(-self.box.shape[0] // self.granule)

    @cached_property
    def unit_bytes(self) -> int:
        shape = self.box.shape
        columns = self.box.numel // shape[0]
        return wire_bytes(min(self.granule, shape[0]), columns, self.dtype, self.quantization)

    @cached_property
    def nbytes(self) -> int:
        return self.units * self.unit_bytes

    @cached_property
    def _cuts(self) -> dict[tuple[int, int], tuple[Box, Box, Box]]:
        return {}

    def rows(self, low: int, high: int) -> tuple[Box, Box, Box]:
        """Return rows ``low`` to ``high``: of the tensor, at the source and at the target.

        Equal layers are cut alike, so that most cuts are known.
        """
        key = (low, high)
        if key not in self._cuts:
            whole = (self.box, self.source_box, self.target_box)
            first, second, third = (_rows(box, low, high) for box in whole)
            self._cuts[key] = (first, second, third)
        return self._cuts[key]


def _rows(box: Box, low: int, high: int) -> Box:
    first = box.start[0]
    if low == 0 and high == box.stop[0] - first:
        return box
    return Box((first + low, *box.start[1:]), (first + high, *box.stop[1:]))


def moved(box: Box, frm: Box, to: Box) -> Box:
    """Return ``box``, which lies in ``frm``, where it lies in ``to``."""
    offset = tuple(map(sub, to.start, frm.start))
    if not any(offset):
        return box
    return Box(tuple(map(add, box.start, offset)), tuple(map(add, box.stop, offset)))


@dataclass(slots=True, kw_only=True)  # not frozen: a plan makes thousands, in a third of the time
class Part:
    """One block's regions in a route's line, from ``start`` on."""

    canonical: str
    source_prefix: str
    target_prefix: str
    regions: tuple[Region, ...]
    start: int


Piece = tuple[tuple[Part, Region, int, int], ...]  # regions' rows low to high, in one message


@dataclass(slots=True, kw_only=True)
class Route:
    """A line of ``nbytes`` that every one of ``targets`` gets from any of ``sources``."""

    index: int  # follows from the two groups of ranks, whatever other routes there are
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)
    nbytes: int = 0
    _pieces: dict[tuple[int, ...], tuple[Piece, ...]] = field(default_factory=dict)

    def extend(self, source: Block, target: Block, regions: tuple[Region, ...], size: int) -> None:
        """Append two blocks' regions, of ``size`` bytes together, to the line."""
        part = Part(
            canonical=source.canonical,
            source_prefix=source.local,
            target_prefix=target.local,
            regions=regions,
            start=self.nbytes,
        )
        self.parts.append(part)
        self.nbytes += size

    def pieces(self, low: int, high: int, sizes: tuple[int, int]) -> tuple[Piece, ...]:
        """Cut bytes ``low`` to ``high`` of the line into messages, at rows.

        Args:
            sizes: a region of at least the first number travels alone, in pieces of at most the
                second; smaller ones travel together, also across blocks.
        """
        key = (low, high, *sizes)
        if key not in self._pieces:
            self._pieces[key] = tuple(self._cut(low, high, *sizes))
        return self._pieces[key]

    def _cut(self, low: int, high: int, alone: int, largest: int) -> Iterator[Piece]:
        bundle: list[tuple[Part, Region, int, int]] = []
        bundled = 0
        for part, region, first, stop in self._between(low, high):
            size, granule, rows = region.unit_bytes, region.granule, region.box.shape[0]
            if (stop - first) * size < alone:
                if bundle and bundled + (stop - first) * size > largest:
                    yield tuple(bundle)
                    bundle, bundled = [], 0
                bundle.append((part, region, first * granule, min(stop * granule, rows)))
                bundled += (stop - first) * size
                continue
            step = max(1, largest // size)
            for unit in range(first, stop, step):
                end = min(unit + step, stop) * granule
                yield ((part, region, unit * granule, min(end, rows)),)
        if bundle:
            yield tuple(bundle)

    def _between(self, low: int, high: int) -> Iterator[tuple[Part, Region, int, int]]:
        """Yield regions with the units that start in [low, high)."""
        first_part = bisect_right(self.parts, low, key=lambda part: part.start) - 1
        for part in islice(self.parts, max(0, first_part), None):
            start = part.start
            if start >= high:
                return
            for region in part.regions:
                stop_at = start + region.nbytes
                if stop_at > low and start < high:
                    size = region.unit_bytes
                    first = max(0, -((start - low) // size))
                    stop = min(region.units, -((start - high) // size))
                    if first < stop:
                        yield part, region, first, stop
                start = stop_at


# --- Intersection -----------------------------------------------------------------------------


def _encoding(param: LocalParam, boxes: Sequence[Box], dtypes: tuple[str, str]) -> tuple[str, str]:
    """Return the wire dtype and who quantises: the source where no block is cut, else the target.

    Both quantise what the source holds; ``dtypes`` are those of source and target.
    """
    if not param.quantization:
        return param.dtype or dtypes[1], ""
    aligned = all(
        is_block_aligned(*span)
        for box in boxes
        for span in zip(box.start, box.stop, param.shape, strict=True)
    )
    if param.quantization == "block" and aligned:
        return "float8_e4m3fn", "block"
    return dtypes[0], f"after_{param.quantization}"


def _shards_by_tensor(variants: Sequence[Variant]) -> dict[str, list[tuple[int, Shard]]]:
    found: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
    for index, variant in enumerate(variants):
        for param in variant:
            for shard in param.shards:
                found[shard.tensor].append((index, shard))
    return found


def _common(
    sources: Sequence[dict[str, list[tuple[int, Shard]]]], target: Variant, dtypes: tuple[str, str]
) -> dict[tuple[int, int], list[Region]]:
    """Return (source block, source variant) -> its regions in a target variant.

    Of variants that hold the same region, such as a replicated key head, the first gives it.
    """
    regions: dict[tuple[int, int], list[Region]] = defaultdict(list)
    for param in target:
        found: list[tuple[tuple[int, int], Shard, Shard, Box]] = []
        for wanted in param.shards:
            holders: dict[Box, tuple[tuple[int, int], Shard]] = {}
            for block, by_tensor in enumerate(sources):
                for variant, held in by_tensor.get(wanted.tensor, ()):
                    holders.setdefault(held.box, ((block, variant), held))
            for held_box, (origin, held) in holders.items():
                box = held_box.intersect(wanted.box)
                if box is not None:
                    found.append((origin, held, wanted, box))
        at = [moved(box, wanted.box, wanted.local) for _, _, wanted, box in found]
        wire, quantization = _encoding(param, at, dtypes)
        for (origin, held, wanted, box), target_box in zip(found, at, strict=True):
            regions[origin].append(
                Region(
                    tensor=wanted.tensor,
                    box=box,
                    source_param=held.param,
                    source_box=moved(box, held.box, held.local),
                    target_param=param.name,
                    target_box=target_box,
                    dtype=wire,
                    quantization=quantization,
                    scales=param.scales,
                )
            )
    return regions


_Common = tuple[int, int, tuple[Region, ...], int]  # source block, its variant, regions, bytes
_Meeting = list[tuple[Route, int, tuple[Region, ...], int]]  # the same, with the variants' route


class _Meetings:
    """Finds what blocks have in common, once for each kind of block and each group of ranks."""

    def __init__(self, dtypes: tuple[str, str], rank: int | None):
        self._dtypes, self._rank = dtypes, rank
        self.routes: dict[tuple[tuple[int, ...], tuple[int, ...]], Route] = {}
        self._shards: dict[int, dict[str, list[tuple[int, Shard]]]] = {}
        self._regions: dict[tuple[int, ...], list[_Common]] = {}
        self._meetings: dict[tuple[int, ...], _Meeting] = {}

    def of(self, held: Sequence[Block], wanted: Block) -> _Meeting:
        """Return what each route gets of ``wanted``, and from which of the source's blocks."""
        both = (wanted, *held)
        key = (*(id(b.variants) for b in both), *(id(b.ranks) for b in both))
        if key not in self._meetings:
            self._meetings[key] = list(self._meet(held, wanted))
        return self._meetings[key]

    def _meet(
        self, held: Sequence[Block], wanted: Block
    ) -> Iterator[tuple[Route, int, tuple[Region, ...], int]]:
        sends = any(self._is_mine(ranks) for block in held for ranks in block.ranks)
        for variant, targets in zip(wanted.variants, wanted.ranks, strict=True):
            receives = self._is_mine(targets)
            if not sends and not receives:
                continue
            for index, place, regions, size in self._common(held, variant):
                ends = (held[index].ranks[place], targets)
                if not receives and not self._is_mine(ends[0]):
                    continue
                if ends not in self.routes:
                    number = zlib.crc32(repr(ends).encode())
                    self.routes[ends] = Route(index=number, sources=ends[0], targets=ends[1])
                yield self.routes[ends], index, regions, size

    def _is_mine(self, ranks: tuple[int, ...]) -> bool:
        return self._rank is None or self._rank in ranks

    def _common(self, held: Sequence[Block], variant: Variant) -> list[_Common]:
        key = (id(variant), *(id(block.variants) for block in held))
        if key not in self._regions:
            for block in held:
                if id(block.variants) not in self._shards:
                    self._shards[id(block.variants)] = _shards_by_tensor(block.variants)
            by_block = [self._shards[id(block.variants)] for block in held]
            found = _common(by_block, variant, self._dtypes)
            self._regions[key] = [
                (*origin, tuple(regions), sum(region.nbytes for region in regions))
                for origin, regions in sorted(found.items(), key=lambda item: item[0])
            ]
        return self._regions[key]


def build_routes(source: Side, target: Side, rank: int | None = None) -> list[Route]:
    """Return all routes, or those of ``rank``, in an order that depends on the two sides only."""
    blocks: dict[str, list[Block]] = defaultdict(list)
    for block in source.blocks:
        if not block.is_copy:
            blocks[block.canonical].append(block)
    meetings = _Meetings((source.dtype, target.dtype), rank)
    for wanted in target.blocks:
        held = blocks.get(wanted.canonical, [])
        for route, index, regions, size in meetings.of(held, wanted):
            route.extend(held[index], wanted, regions, size)
    return list(meetings.routes.values())
