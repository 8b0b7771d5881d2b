"""The proof of a plan: every wanted element is written once, from where it says, and all are read.

Called by the planner before a plan is handed out. Blocks and regions are proven once for each kind,
since equal layers share them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import le

from megatron_bridge.box import Box
from megatron_bridge.errors import PlanError
from megatron_bridge.flows import (
    Division,
    Seat,
    Stripe,
    divide,
    single_stripes,
    unicast_stripes,
)
from megatron_bridge.routes import Region, Route, moved
from megatron_bridge.side import Side, Variant
from megatron_bridge.spec import LocalParam, Shard

_Where = tuple[tuple[int, ...], str]  # ranks that hold alike, prefix of a block's tensors
_Arrival = tuple[_Where, tuple[Region, ...]]


def _index(side: Side) -> dict[_Where, tuple[Variant, ...]]:
    """Return what each group of replicas holds of each block."""
    found: dict[_Where, tuple[Variant, ...]] = defaultdict(tuple)
    for block in side.blocks:
        for variant, ranks in zip(block.variants, block.ranks, strict=True):
            found[ranks, block.canonical] += (variant,)
    return found


def prove_coverage(
    source: Side, target: Side, routes: Sequence[Route], unread: Sequence[str]
) -> None:
    """Check the regions of all routes against the two sides.

    Raises:
        PlanError: a region that lies outside a shard or copies another region than it says, an
            element written twice or never, or never read though no prefix in ``unread`` says so.
    """
    held, wanted = _index(source), _index(target)
    arriving: dict[_Where, list[_Arrival]] = defaultdict(list)
    for route in routes:
        for part in route.parts:
            arrival = ((route.sources, part.canonical), part.regions)
            arriving[route.targets, part.canonical].append(arrival)
    proven: set[tuple[int, ...]] = set()
    for where in arriving.keys() | wanted.keys():
        arrivals, variants = arriving[where], wanted.get(where, ())
        origins = [held[origin] for origin, _ in arrivals]
        case = (
            *map(id, variants),
            *(id(regions) for _, regions in arrivals),
            *(id(variant) for origin in origins for variant in origin),
        )
        if case not in proven:
            _prove_block(where, variants, arrivals, origins)
            proven.add(case)
    _prove_all_read(source, arriving, unread)


def _prove_block(
    where: _Where,
    variants: Sequence[Variant],
    arrivals: Sequence[_Arrival],
    origins: Sequence[tuple[Variant, ...]],
) -> None:
    """Check what arrives at one group of replicas for one block."""
    who = f"target rank {where[0][0]}"
    params = {param.name: param for variant in variants for param in variant}
    regions: dict[str, list[Region]] = defaultdict(list)
    for (origin, group), held in zip(arrivals, origins, strict=True):
        sources = {param.name: param for variant in held for param in variant}
        for region in group:
            at = f"source rank {origin[0][0]}"
            _find(sources.get(region.source_param), region, region.source_box, at)
            _find(params.get(region.target_param), region, region.target_box, who)
            regions[region.target_param].append(region)
    for param in params.values():
        _prove_param(f"{where[1]}{param.name} of {who}", param, regions[param.name])


def _find(param: LocalParam | None, region: Region, local: Box, where: str) -> None:
    """Check that a shard of ``param`` holds the region at ``local``."""
    if param is not None and any(_holds(shard, region, local) for shard in param.shards):
        return
    raise PlanError(
        f"region {region.box} of {region.tensor} lies at {local} of {where}, which no shard there has"
    )


def _holds(shard: Shard, region: Region, local: Box) -> bool:
    return (
        shard.tensor == region.tensor
        and all(map(le, shard.box.start, region.box.start))
        and all(map(le, region.box.stop, shard.box.stop))
        and moved(region.box, shard.box, shard.local) == local
    )


def _prove_param(where: str, param: LocalParam, regions: list[Region]) -> None:
    """Check that ``regions``, which lie inside the parameter's shards, cover them exactly once."""
    regions = sorted(regions, key=lambda region: region.target_box)
    for index, region in enumerate(regions):
        stop = region.target_box.stop[0]
        for other in regions[index + 1 :]:
            if other.target_box.start[0] >= stop:
                break
            if region.target_box.intersect(other.target_box) is not None:
                raise PlanError(f"{where}: {region.target_box} and {other.target_box} overlap")
    # Disjoint regions inside the shards cover them exactly when they have as many elements.
    covered: dict[str, int] = defaultdict(int)
    for region in regions:
        covered[region.tensor] += region.box.numel
    needed: dict[str, int] = defaultdict(int)
    for shard in param.shards:
        needed[shard.tensor] += shard.box.numel
    for tensor, numel in needed.items():
        if covered[tensor] != numel:
            raise PlanError(
                f"{where}: {covered[tensor]} elements of {tensor} have a source, expected {numel}"
            )


def _prove_all_read(
    source: Side, arriving: dict[_Where, list[_Arrival]], unread: Sequence[str]
) -> None:
    """Check that some target reads every element that the source holds."""
    read: dict[str, dict[int, tuple[Region, ...]]] = defaultdict(dict)
    for (_, canonical), arrivals in arriving.items():
        for _, regions in arrivals:
            read[canonical][id(regions)] = regions
    held: dict[str, list[tuple[Variant, ...]]] = defaultdict(list)
    for block in source.blocks:
        if not block.is_copy and not block.canonical.startswith(tuple(unread)):
            held[block.canonical].append(block.variants)
    proven: set[tuple[int, ...]] = set()
    for canonical, groups in held.items():
        case = (*map(id, groups), *sorted(read[canonical]))
        if case not in proven:
            _prove_block_read(canonical, groups, read[canonical].values())
            proven.add(case)


def _prove_block_read(
    canonical: str, groups: Sequence[tuple[Variant, ...]], read: Iterable[tuple[Region, ...]]
) -> None:
    boxes: dict[str, set[Box]] = defaultdict(set)
    for regions in read:
        for region in regions:
            boxes[region.tensor].add(region.box)
    held: dict[str, set[Box]] = defaultdict(set)
    for variants in groups:
        for shard in (s for variant in variants for param in variant for s in param.shards):
            held[shard.tensor].add(shard.box)
    for tensor, parts in held.items():
        unread = list(parts)
        for box in boxes[tensor]:  # those of replicas of several layouts overlap
            unread = [piece for part in unread for piece in part.without(box)]
        expected = sum(box.numel for box in parts)
        found = expected - sum(box.numel for box in unread)
        if unread:
            raise PlanError(
                f"{canonical}{tensor}: {found} elements are read by a target, expected {expected}"
            )


# --- Division ---------------------------------------------------------------------------------


def prove_stripes(routes: Sequence[Route], seats: Sequence[Seat]) -> None:
    """Check that stripes give every target of a route the whole line once, sent once or to all.

    Raises:
        PlanError: bytes of a line that a target gets twice or never.
    """
    proven: dict[tuple[int, int], Division] = {}  # keeps them alive: no two have one id
    for route in routes:
        division = divide(route, seats)
        case = (id(division), route.nbytes)
        if case in proven:
            continue
        proven[case] = division
        by_target: dict[int, list[Stripe]] = defaultdict(list)
        for stripe in unicast_stripes(route, seats):
            by_target[stripe[1]].append(stripe)
        for target in range(len(route.targets)):
            prove_tiling(route, by_target[target])
        prove_tiling(route, single_stripes(route))


def prove_tiling(route: Route, stripes: Sequence[Stripe]) -> None:
    """Check that ``stripes`` are the whole line of a route once, without gaps."""
    at = 0
    for _, _, low, high in sorted(stripes, key=lambda stripe: stripe[2]):
        if low != at:
            raise PlanError(f"bytes {at} to {low} of route {route.index} are sent twice or never")
        at = high
    if at != route.nbytes:
        raise PlanError(f"bytes {at} to {route.nbytes} of route {route.index} are never sent")
