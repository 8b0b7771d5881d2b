"""The planner: which rank sends which region of which tensor to whom, with its proof; no torch.

`plan` is a pure function of the two sides' manifests, so that every rank computes the same plan
without talking to another. DDMA executes it on the wire and converters execute it between files.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add, le, sub

from megatron_bridge.box import Box
from megatron_bridge.errors import PlanError
from megatron_bridge.operations import Operation, numel_of, order_of, schedule
from megatron_bridge.spec import LocalParam, RankManifest, Shard

# A message to one more peer costs about as much as this many elements (some microseconds of a
# 400 Gb/s link), so small tensors ride with large ones instead of opening connections.
_NEW_PEER_NUMEL = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What a plan costs. ``imbalance`` is the busiest sender over an even share of all senders."""

    operations: int
    total_bytes: int
    sent_bytes: dict[int, int]
    received_bytes: dict[int, int]
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """A proven set of operations in one global order.

    ``digest`` covers the operations and both sides' manifests, ``manifests_digest`` the latter only.
    """

    operations: tuple[Operation, ...]
    digest: str
    manifests_digest: str
    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]

    def of_source(self, rank: int) -> tuple[Operation, ...]:
        """Return what ``rank`` sends."""
        return tuple(item for item in self.operations if item.source_rank == rank)

    def of_target(self, rank: int) -> tuple[Operation, ...]:
        """Return what ``rank`` receives."""
        return tuple(item for item in self.operations if item.target_rank == rank)

    def rounds(
        self, max_operations: int = 256, max_numel: int = 1 << 24, rank: int | None = None
    ) -> tuple[tuple[Operation, ...], ...]:
        """Return the operations in rounds; see `schedule`."""
        return schedule(self.operations, max_operations, max_numel, rank)

    def report(self, itemsize: int) -> PlanReport:
        """Return the load of each rank for elements of ``itemsize`` bytes."""
        sent = dict.fromkeys(self.source_ranks, 0)
        received = dict.fromkeys(self.target_ranks, 0)
        for item in self.operations:
            size = numel_of(item.box) * itemsize
            sent[item.source_rank] += size
            received[item.target_rank] += size
        total = sum(sent.values())
        return PlanReport(
            operations=len(self.operations),
            total_bytes=total,
            sent_bytes=sent,
            received_bytes=received,
            imbalance=max(sent.values()) * len(sent) / total if total else 1.0,
        )


# --- Planning ---------------------------------------------------------------------------------

Holder = tuple[int, Shard]  # a rank and where it keeps the region


def _regions(manifests: Sequence[RankManifest]) -> dict[str, dict[Box, list[Holder]]]:
    """Return tensor -> distinct region -> the ranks that hold exactly that region, ascending."""
    replicas: dict[int, tuple[tuple[LocalParam, ...], list[int]]] = {}
    for manifest in manifests:
        replicas.setdefault(id(manifest.params), (manifest.params, []))[1].append(manifest.rank)
    regions: dict[str, dict[Box, list[Holder]]] = defaultdict(lambda: defaultdict(list))
    for params, ranks in replicas.values():
        for param in params:
            for shard in param.shards:
                regions[shard.tensor][shard.box] += [(rank, shard) for rank in ranks]
    for holders in (holders for boxes in regions.values() for holders in boxes.values()):
        holders.sort(key=lambda holder: (holder[0], holder[1].param, holder[1].local.start))
    return regions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overlap:
    """A region of which some source ranks hold one shard each, and which target ranks want."""

    tensor: str
    region: Box
    numel: int
    holders: list[Holder]
    takers: list[Holder]


def _overlaps(source: Sequence[RankManifest], target: Sequence[RankManifest]) -> list[_Overlap]:
    """Return all overlaps, the largest first."""
    held = _regions(source)
    overlaps = [
        _Overlap(
            tensor=tensor, region=region, numel=numel_of(region), holders=holders, takers=takers
        )
        for tensor, wanted_regions in _regions(target).items()
        for wanted, takers in wanted_regions.items()
        for box, holders in held.get(tensor, {}).items()
        if (region := box.intersect(wanted)) is not None
    ]
    overlaps.sort(key=lambda o: (-o.numel, o.tensor, o.region.start, o.region.stop))
    return overlaps


def _assign(overlaps: Sequence[_Overlap]) -> list[Operation]:
    """Choose a holder for each taker: the one with the least to send, the lowest rank of equals."""
    load: dict[int, int] = defaultdict(int)
    pairs: set[tuple[int, int]] = set()
    operations: list[Operation] = []
    for overlap in overlaps:
        local: dict[int, Box] = {}  # replicas share their shards, hence also these boxes
        for _, shard in (*overlap.holders, *overlap.takers):
            if id(shard) not in local:
                local[id(shard)] = _moved(overlap.region, shard.box, shard.local)
        for target_rank, wanted in overlap.takers:
            best = overlap.holders[0]
            least = -1
            for holder in overlap.holders:
                cost = load[holder[0]]
                if (holder[0], target_rank) not in pairs:
                    cost += _NEW_PEER_NUMEL
                if least < 0 or cost < least:
                    best, least = holder, cost
            source_rank, held = best
            load[source_rank] += overlap.numel
            pairs.add((source_rank, target_rank))
            operations.append(
                Operation(
                    source_rank=source_rank,
                    target_rank=target_rank,
                    tensor=overlap.tensor,
                    box=overlap.region,
                    source_param=held.param,
                    source_box=local[id(held)],
                    target_param=wanted.param,
                    target_box=local[id(wanted)],
                )
            )
    operations.sort(key=order_of)
    return operations


def _offset(frm: Box, to: Box) -> tuple[int, ...]:
    return tuple(map(sub, to.start, frm.start))


def _moved(box: Box, frm: Box, to: Box) -> Box:
    """Return ``box``, which lies in ``frm``, where it lies in ``to``."""
    offset = _offset(frm, to)
    if not any(offset):
        return box
    return Box(tuple(map(add, box.start, offset)), tuple(map(add, box.stop, offset)))


def plan(source: Sequence[RankManifest], target: Sequence[RankManifest]) -> TransferPlan:
    """Return the operations that fill every region of ``target`` from ``source``, and prove them.

    Regions that several source ranks hold are spread over them: the largest first, each to the
    holder with the least to send.

    Raises:
        PlanError: see `prove`; or a rank appears twice on one side.
    """
    _check_ranks(source, "source")
    _check_ranks(target, "target")
    operations = _assign(_overlaps(source, target))
    manifests = manifest_digest(source) + manifest_digest(target)
    result = TransferPlan(
        operations=tuple(operations),
        digest=_digest([manifests, *(" ".join(map(str, order_of(item))) for item in operations)]),
        manifests_digest=_digest([manifests]),
        source_ranks=tuple(sorted(manifest.rank for manifest in source)),
        target_ranks=tuple(sorted(manifest.rank for manifest in target)),
    )
    prove(result, source, target)
    return result


def _check_ranks(manifests: Sequence[RankManifest], side: str) -> None:
    ranks = sorted(manifest.rank for manifest in manifests)
    if not ranks or len(set(ranks)) != len(ranks):
        raise PlanError(
            f"{side} manifests are of ranks {ranks}, expected one or more distinct ranks"
        )


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def manifest_digest(manifests: Sequence[RankManifest]) -> str:
    """Return a SHA-256 that differs where any name, shape, region or rank differs."""
    known: dict[int, str] = {}  # replicas share their parameters, and a manifest keeps them alive
    lines: list[str] = []
    for manifest in manifests:
        key = id(manifest.params)
        if key not in known:
            known[key] = _digest(map(repr, manifest.params))
        lines.append(f"{manifest.rank} {known[key]}")
    return _digest(lines)


# --- Proof ------------------------------------------------------------------------------------


def prove(
    plan: TransferPlan, source: Sequence[RankManifest], target: Sequence[RankManifest]
) -> None:
    """Check that ``plan`` writes every covered element of ``target`` exactly once, and nothing else.

    Raises:
        PlanError: an operation that lies outside a shard or copies another region than it says,
            an element written twice or never, a tensor that no source rank holds.
    """
    sources = {manifest.rank: _shards_of(manifest) for manifest in source}
    targets = {manifest.rank: _shards_of(manifest) for manifest in target}
    written: dict[tuple[int, str], list[Operation]] = defaultdict(list)
    # Replicas share their shards and the plan's boxes: what is proven for one holds for all.
    found: set[tuple[int, str, int, int]] = set()
    for item in plan.operations:
        held = sources.get(item.source_rank, {}).get(item.source_param, ())
        wanted = targets.get(item.target_rank, {}).get(item.target_param, ())
        for side, shards, local in (
            (f"source rank {item.source_rank}", held, item.source_box),
            (f"target rank {item.target_rank}", wanted, item.target_box),
        ):
            key = (id(shards), item.tensor, id(item.box), id(local))
            if key not in found:
                _find(shards, item, local, side)
                found.add(key)
        written[item.target_rank, item.target_param].append(item)
    proven: set[tuple[int, int, frozenset[int]]] = set()
    for manifest in target:
        for param in manifest.params:
            items = written[manifest.rank, param.name]
            boxes = frozenset(id(item.target_box) for item in items)
            case = (id(param), len(items), boxes)
            if case not in proven:
                _prove_param(manifest.rank, param, items)
                proven.add(case)


def _shards_of(manifest: RankManifest) -> dict[str, tuple[Shard, ...]]:
    return {param.name: param.shards for param in manifest.params}


def _find(shards: Sequence[Shard], item: Operation, local: Box, where: str) -> None:
    """Check that one of ``shards`` holds the operation's region at ``local``."""
    for shard in shards:
        if (
            shard.tensor == item.tensor
            and all(map(le, shard.box.start, item.box.start))
            and all(map(le, item.box.stop, shard.box.stop))
            and _moved(item.box, shard.box, shard.local) == local
        ):
            return
    raise PlanError(
        f"operation on {item.tensor} {item.box} lies at {local} of {where}, which no shard there has"
    )


def _prove_param(rank: int, param: LocalParam, items: list[Operation]) -> None:
    """Check that ``items``, which lie inside the parameter's shards, cover them exactly once."""
    where = f"{param.name} of target rank {rank}"
    items = sorted(items, key=lambda item: item.target_box)
    for index, item in enumerate(items):
        stop = item.target_box.stop[0]
        for other in items[index + 1 :]:
            if other.target_box.start[0] >= stop:
                break
            if item.target_box.intersect(other.target_box) is not None:
                raise PlanError(f"{where}: {item.target_box} and {other.target_box} overlap")
    # Disjoint operations inside the shards cover them exactly when they have as many elements.
    covered: dict[str, int] = defaultdict(int)
    for item in items:
        covered[item.tensor] += numel_of(item.box)
    needed: dict[str, int] = defaultdict(int)
    for shard in param.shards:
        needed[shard.tensor] += numel_of(shard.box)
    for tensor, numel in needed.items():
        if covered[tensor] != numel:
            raise PlanError(
                f"{where}: {covered[tensor]} elements of {tensor} have a source, expected {numel}"
            )
