"""The planner: which rank sends which region of which tensor to whom, with its proof; no torch.

`plan` is a pure function of the two sides' manifests, so that every rank computes the same plan
without talking to another. DDMA executes it on the wire and converters execute it between files.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, le, sub

from megatron_bridge.box import Box
from megatron_bridge.errors import PlanError
from megatron_bridge.spec import LocalParam, RankManifest, Shard

# A message to one more peer costs about as much as this many elements (some microseconds of a
# 400 Gb/s link), so small tensors ride with large ones instead of opening connections.
_NEW_PEER_NUMEL = 16_384


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Operation:
    """Copy one region of a canonical tensor from a source rank into a target rank.

    The three boxes have one shape: the region itself, and where it lies on each side.
    """

    source_rank: int
    target_rank: int
    tensor: str
    box: Box
    source_param: str
    source_box: Box
    target_param: str
    target_box: Box

    def rows(self, low: int, high: int) -> Operation:
        """Return the part of the operation that copies its rows ``low`` to ``high``."""
        return Operation(
            source_rank=self.source_rank,
            target_rank=self.target_rank,
            tensor=self.tensor,
            box=_rows(self.box, low, high),
            source_param=self.source_param,
            source_box=_rows(self.source_box, low, high),
            target_param=self.target_param,
            target_box=_rows(self.target_box, low, high),
        )


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
        self, max_operations: int = 256, max_numel: int = 1 << 24
    ) -> tuple[tuple[Operation, ...], ...]:
        """Return the operations in rounds; see `schedule`."""
        return schedule(self.operations, max_operations, max_numel)

    def report(self, itemsize: int) -> PlanReport:
        """Return the load of each rank for elements of ``itemsize`` bytes."""
        sent = dict.fromkeys(self.source_ranks, 0)
        received = dict.fromkeys(self.target_ranks, 0)
        for item in self.operations:
            size = _numel(item.box) * itemsize
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


def _numel(box: Box) -> int:
    """`Box.numel` for the loops over all operations, where its generators take half the time."""
    return prod(map(sub, box.stop, box.start))


def _rows(box: Box, low: int, high: int) -> Box:
    first = box.start[0]
    return Box((first + low, *box.start[1:]), (first + high, *box.stop[1:]))


def schedule(
    operations: Iterable[Operation], max_operations: int, max_numel: int
) -> tuple[tuple[Operation, ...], ...]:
    """Divide operations into rounds that all ranks go through in the same order.

    In a round no rank has more than ``max_operations`` operations or ``max_numel`` elements, on
    either end; larger operations are split by rows (a single row is never split). A rank that posts
    its whole round before it waits cannot deadlock, since its peers' halves are in the same round.
    """
    pairs: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for item in sorted(operations):
        pairs[item.source_rank, item.target_rank] += _split(item, max_numel)
    # Interleave the pairs: lexicographic order would make every target wait for the first source.
    size = 1 + max((max(pair) for pair in pairs), default=0)
    order = sorted(
        (index, (target - source) % size, source, item)
        for (source, target), items in pairs.items()
        for index, item in enumerate(items)
    )
    at: dict[tuple[str, int], tuple[int, int, int]] = {}  # end -> round, operations, elements
    rounds: dict[int, list[Operation]] = defaultdict(list)
    for *_, item in order:
        ends = (("source", item.source_rank), ("target", item.target_rank))
        current = [at.get(end, (0, 0, 0)) for end in ends]
        number = max(place[0] for place in current)
        numel = _numel(item.box)
        if any(
            place[0] == number
            and (place[1] >= max_operations or (place[2] and place[2] + numel > max_numel))
            for place in current
        ):
            number += 1
        for end, (last, count, load) in zip(ends, current, strict=True):
            at[end] = (number, count + 1, load + numel) if last == number else (number, 1, numel)
        rounds[number].append(item)
    return tuple(tuple(rounds[number]) for number in sorted(rounds))


def _split(item: Operation, max_numel: int) -> list[Operation]:
    numel = _numel(item.box)
    if numel <= max_numel:
        return [item]
    count = item.box.shape[0]
    step = max(1, max_numel * count // numel)
    return [item.rows(low, min(low + step, count)) for low in range(0, count, step)]


# --- Planning ---------------------------------------------------------------------------------

Holder = tuple[int, Shard]  # a rank and where it keeps the region


def _regions(manifests: Sequence[RankManifest]) -> dict[str, dict[Box, list[Holder]]]:
    """Return tensor -> distinct region -> the ranks that hold exactly that region."""
    regions: dict[str, dict[Box, list[Holder]]] = defaultdict(lambda: defaultdict(list))
    for manifest in manifests:
        for param in manifest.params:
            for shard in param.shards:
                regions[shard.tensor][shard.box].append((manifest.rank, shard))
    return regions


def _offset(frm: Box, to: Box) -> tuple[int, ...]:
    return tuple(map(sub, to.start, frm.start))


def _moved(box: Box, frm: Box, to: Box) -> Box:
    """Return ``box``, which lies in ``frm``, where it lies in ``to``."""
    offset = _offset(frm, to)
    if not any(offset):
        return box
    return Box(tuple(map(add, box.start, offset)), tuple(map(add, box.stop, offset)))


def _operation(source: Holder, target: Holder, region: Box) -> Operation:
    (source_rank, held), (target_rank, wanted) = source, target
    return Operation(
        source_rank=source_rank,
        target_rank=target_rank,
        tensor=held.tensor,
        box=region,
        source_param=held.param,
        source_box=_moved(region, held.box, held.local),
        target_param=wanted.param,
        target_box=_moved(region, wanted.box, wanted.local),
    )


def plan(source: Sequence[RankManifest], target: Sequence[RankManifest]) -> TransferPlan:
    """Return the operations that fill every region of ``target`` from ``source``, and prove them.

    Regions that several source ranks hold are spread over them: the largest first, each to the
    holder with the least to send.

    Raises:
        PlanError: see `prove`; or a rank appears twice on one side.
    """
    _check_ranks(source, "source")
    _check_ranks(target, "target")
    held = _regions(source)
    pieces: list[tuple[int, str, Box, int, Box, Holder, list[Holder]]] = []
    for tensor, wanted_regions in _regions(target).items():
        for wanted, takers in wanted_regions.items():
            for box, holders in held.get(tensor, {}).items():
                region = box.intersect(wanted)
                if region is not None:
                    size = -region.numel
                    pieces += [
                        (size, tensor, region, taker[0], taker[1].local, taker, holders)
                        for taker in takers
                    ]
    pieces.sort(key=lambda piece: piece[:5])
    load: dict[int, int] = defaultdict(int)
    pairs: set[tuple[int, int]] = set()
    operations: list[Operation] = []
    for size, _, region, taker_rank, _, taker, holders in pieces:

        def cost(holder: Holder, taker_rank: int = taker_rank) -> tuple[int, int]:
            known = (holder[0], taker_rank) in pairs
            return load[holder[0]] + (0 if known else _NEW_PEER_NUMEL), holder[0]

        chosen = min(holders, key=cost)
        load[chosen[0]] -= size
        pairs.add((chosen[0], taker_rank))
        operations.append(_operation(chosen, taker, region))
    operations.sort()
    manifests = manifest_digest(source) + manifest_digest(target)
    result = TransferPlan(
        operations=tuple(operations),
        digest=_digest([manifests, *map(repr, operations)]),
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
    for item in plan.operations:
        held = sources.get(item.source_rank, {}).get(item.source_param, ())
        _find(held, item, item.source_box, f"source rank {item.source_rank}")
        wanted = targets.get(item.target_rank, {}).get(item.target_param, ())
        _find(wanted, item, item.target_box, f"target rank {item.target_rank}")
        written[item.target_rank, item.target_param].append(item)
    for manifest in target:
        for param in manifest.params:
            _prove_param(manifest.rank, param, written[manifest.rank, param.name])


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
        covered[item.tensor] += _numel(item.box)
    needed: dict[str, int] = defaultdict(int)
    for shard in param.shards:
        needed[shard.tensor] += _numel(shard.box)
    for tensor, numel in needed.items():
        if covered[tensor] != numel:
            raise PlanError(
                f"{where}: {covered[tensor]} elements of {tensor} have a source, expected {numel}"
            )
