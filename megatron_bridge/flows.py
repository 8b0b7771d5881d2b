"""Who sends which bytes of a route's line to whom: division over replicas, and forwarding.

Called by the planner and its proof. A stripe is a part of a line that one source gives one target;
where generators forward, each stripe then goes from target to target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from megatron_bridge.routes import Route


class Forwarding(StrEnum):
    """How generators pass on what they received, so that trainers send each byte once."""

    NONE = "none"  # trainers send to every replica
    RING = "ring"  # each replica gets a part and passes parts on to the next replica
    SPREAD = "spread"  # each replica gets a part and sends it to all other replicas


Stripe = tuple[int, int, int, int]  # index of the source, of the target, bytes low to high


Seat = tuple[int, int]  # a rank's host, and which of its NICs (rail) is the rank's


_Share = tuple[int, int, int]  # the other end's index, units low to high of the line


@dataclass(frozen=True, slots=True)
class Division:
    """Which source gives which target which units of a line that has one unit a source.

    A target gets them all; sources give alike, unless they are targets too.
    """

    by_target: tuple[list[_Share], ...]
    by_source: tuple[list[_Share], ...]

    @classmethod
    def of(cls, given: Sequence[Sequence[tuple[int, int]]], num_sources: int) -> Division:
        """Lay end to end what each target gets: (source, units)."""
        by_target: tuple[list[_Share], ...] = tuple([] for _ in given)
        by_source: tuple[list[_Share], ...] = tuple([] for _ in range(num_sources))
        for target, parts in enumerate(given):
            at = 0
            for source, units in parts:
                by_target[target].append((source, at, at + units))
                by_source[source].append((target, at, at + units))
                at += units
        return cls(by_target, by_source)


def divide(route: Route, seats: Sequence[Seat]) -> Division:
    """Divide the line's copies for all targets evenly over the sources.

    Where ``seats`` says those of all ranks, sources give to targets on their own host first, then
    to those on their rail; the rest in plain order. A target that is a source gives itself all.
    """
    whole = _divide(route, seats)
    if set(route.sources).isdisjoint(route.targets):
        return whole
    number = {rank: index for index, rank in enumerate(route.sources)}
    given = [
        [(number[rank], len(number))]
        if rank in number
        else [(source, high - low) for source, low, high in shares]
        for rank, shares in zip(route.targets, whole.by_target, strict=True)
    ]
    return Division.of(given, len(number))


def _divide(route: Route, seats: Sequence[Seat]) -> Division:
    if not seats:
        return _in_order(len(route.sources), len(route.targets))
    sources, targets = ([seats[rank] for rank in ranks] for ranks in (route.sources, route.targets))
    # Of hosts it matters only which ranks they have in common: stages divide alike.
    shared = {host for host, _ in sources} & {host for host, _ in targets}
    number = {host: index for index, host in enumerate(sorted(shared))}
    places = [
        tuple((number.get(host, other), rail) for host, rail in side)
        for side, other in ((sources, -1), (targets, -2))
    ]
    return _matched(*places)


@lru_cache(maxsize=256)
def _in_order(sources: int, targets: int) -> Division:
    given: list[list[tuple[int, int]]] = []
    for target in range(targets):
        low, high = target * sources, (target + 1) * sources
        span = range(low // targets, -(-high // targets))
        given.append([(s, min(high, (s + 1) * targets) - max(low, s * targets)) for s in span])
    return Division.of(given, sources)


@lru_cache(maxsize=256)
def _matched(sources: tuple[Seat, ...], targets: tuple[Seat, ...]) -> Division:
    left, needs = [len(targets)] * len(sources), [len(sources)] * len(targets)
    given: list[list[tuple[int, int]]] = [[] for _ in targets]

    def give(candidates: Sequence[int], target: int) -> None:
        for source in candidates:
            units = min(left[source], needs[target])
            if units:
                left[source] -= units
                needs[target] -= units
                given[target].append((source, units))

    for same in range(2):
        near: dict[int, list[int]] = defaultdict(list)
        for source, seat in enumerate(sources):
            near[seat[same]].append(source)
        for target, seat in enumerate(targets):
            give(near.get(seat[same], ()), target)
    source = 0
    for target in range(len(targets)):
        while needs[target]:
            give((source,), target)
            source += left[source] == 0
    return Division.of(given, len(sources))


def unicast_stripes(route: Route, seats: Sequence[Seat]) -> list[Stripe]:
    """Return all that sources give: to every target the whole line."""
    size, count = route.nbytes, len(route.sources)
    found = (
        (source, target, low * size // count, high * size // count)
        for target, shares in enumerate(divide(route, seats).by_target)
        for source, low, high in shares
    )
    return [stripe for stripe in found if stripe[2] < stripe[3]]


def single_stripes(route: Route) -> list[Stripe]:
    """Divide one copy of the line evenly over the targets, each part evenly over the sources."""
    sources, targets = len(route.sources), len(route.targets)
    cuts = sorted({i * targets for i in range(sources)} | {i * sources for i in range(targets)})
    stripes: list[Stripe] = []
    for first, stop in zip(cuts, [*cuts[1:], sources * targets], strict=True):
        whole = sources * targets
        low, high = first * route.nbytes // whole, stop * route.nbytes // whole
        if low < high:
            stripes.append((first // targets, first // sources, low, high))
    return stripes


def forwards(forwarding: Forwarding, head: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (from, to, hop) among ``count`` targets, for a stripe that arrives at ``head``."""
    for distance in range(1, count):
        other = (head + distance) % count
        if forwarding is Forwarding.SPREAD:
            yield head, other, 1
        else:
            yield (other - 1) % count, other, distance


def forwards_of(
    forwarding: Forwarding, head: int, count: int, mine: int
) -> Iterator[tuple[int, int, int]]:
    """Yield those of `forwards` that target ``mine`` takes part in, without the others."""
    if forwarding is Forwarding.SPREAD:
        if mine == head:
            yield from forwards(forwarding, head, count)
        else:
            yield head, mine, 1
        return
    arrives = (mine - head) % count
    for hop in (arrives, arrives + 1):
        if 1 <= hop < count:
            yield (head + hop - 1) % count, (head + hop) % count, hop


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes ``low`` to ``high`` of a route's line from one rank to another."""

    route: Route
    stripe: int  # alike on every hop of the same bytes
    source_rank: int
    target_rank: int
    low: int
    high: int
    hop: int  # 0 from a source; of a forwarded stripe 1 or more


def _flow(route: Route, stripe: Stripe, pair: tuple[int, int], hop: int) -> Flow:
    source, target, low, high = stripe
    return Flow(
        route=route,
        stripe=source * len(route.targets) + target,
        source_rank=pair[0],
        target_rank=pair[1],
        low=low,
        high=high,
        hop=hop,
    )


def unicast_flows(route: Route, seats: Sequence[Seat], rank: int) -> Iterator[Flow]:
    """Yield the flows, of those of a line that sources send to every target, of ``rank``."""
    division, size, count = divide(route, seats), route.nbytes, len(route.sources)
    shares: list[tuple[int, int, int, int]] = []
    if rank in route.targets:
        mine = route.targets.index(rank)
        shares += [(other, mine, low, high) for other, low, high in division.by_target[mine]]
    if rank in route.sources:
        mine = route.sources.index(rank)
        shares += [
            (mine, other, low, high)
            for other, low, high in division.by_source[mine]
            if route.targets[other] != rank  # what it gives itself is among the above
        ]
    for source, target, low, high in shares:
        stripe = (source, target, low * size // count, high * size // count)
        if stripe[2] < stripe[3]:
            yield _flow(route, stripe, (route.sources[source], route.targets[target]), 0)


def forwarded_flows(route: Route, forwarding: Forwarding, rank: int) -> Iterator[Flow]:
    """Yield the flows of a forwarded line that ``rank`` takes part in."""
    targets, count = route.targets, len(route.targets)
    mine = targets.index(rank) if rank in targets else None
    for source, head, low, high in single_stripes(route):
        pairs = [(route.sources[source], targets[head], 0)]
        if mine is not None:
            found = forwards_of(forwarding, head, count, mine)
            pairs += [(targets[frm], targets[to], hop) for frm, to, hop in found]
        for frm, to, hop in pairs:
            if rank in (frm, to):
                yield _flow(route, (source, head, low, high), (frm, to), hop)
