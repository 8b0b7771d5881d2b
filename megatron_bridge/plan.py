"""The planner: which rank sends which region of which tensor to whom; no torch.

`plan` is a pure function of the two sides, so that every rank computes the same plan without talking
to another, and its own messages without those of others. DDMA executes it on the wire and
converters execute it between files.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_bridge.box import Box
from megatron_bridge.errors import PlanError
from megatron_bridge.flows import (
    Flow,
    Forwarding,
    Seat,
    forwarded_flows,
    forwards,
    single_stripes,
    unicast_flows,
    unicast_stripes,
)
from megatron_bridge.operations import AFTER, Message, Operation
from megatron_bridge.proof import prove_coverage, prove_stripes
from megatron_bridge.routes import Part, Piece, Region, Route, build_routes
from megatron_bridge.side import Side, Variant

_LAG = 2  # steps from a hop to the next: one message arrives while the one before goes on
_FORWARDED_PIECES = 64  # of a line, at least, so that few bytes are in flight between hops


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPolicy:
    """What both ends must choose alike."""

    forwarding: Forwarding = Forwarding.NONE
    forward_bytes: int = 1 << 16  # a line is forwarded where each target's part has this size
    alone_bytes: int = 1 << 18  # smaller regions travel together
    message_bytes: int = 32 << 20  # largest message, unless a single row is larger
    seats: tuple[Seat, ...] = ()  # of each global rank; empty: unknown
    unread: tuple[str, ...] = ()  # prefixes of tensors that the target leaves out on purpose


@dataclass(frozen=True)
class TransferPlan:
    """A proven way to fill one side from the other.

    ``digest`` covers everything that messages follow from; ``sides_digest`` the two sides alone.
    """

    source: Side
    target: Side
    policy: PlanPolicy
    routes: tuple[Route, ...] = field(repr=False)

    @cached_property
    def sides_digest(self) -> str:
        return _digest([*_side_lines(self.source), *_side_lines(self.target)])

    @cached_property
    def digest(self) -> str:
        return _digest([self.sides_digest, repr(self.policy)])

    @cached_property
    def unforwardable(self) -> str:
        """The first parameter that generators cannot pass on; empty where there is none."""
        regions = (r for route in self.routes for part in route.parts for r in part.regions)
        for region in regions:
            if region.quantization in AFTER:
                return region.target_param
        return ""

    def with_forwarding(self, forwarding: Forwarding) -> TransferPlan:
        """Return the same routes with another forwarding; the proof holds for each.

        Raises:
            PlanError: the two sides do not allow it.
        """
        other = replace(self, policy=replace(self.policy, forwarding=forwarding))
        _check_forwarding(other)
        return other

    def is_forwarded(self, route: Route) -> bool:
        """Whether the targets of a route pass its line on."""
        count, policy = len(route.targets), self.policy
        big = route.nbytes >= policy.forward_bytes * count
        return policy.forwarding is not Forwarding.NONE and count > 1 and big

    def flows(self, rank: int) -> Iterator[Flow]:
        """Yield who sends which bytes of each line to whom, where ``rank`` is one of the two."""
        for route in self.routes:
            if rank not in route.sources and rank not in route.targets:
                continue
            if self.is_forwarded(route):
                yield from forwarded_flows(route, self.policy.forwarding, rank)
            else:
                yield from unicast_flows(route, self.policy.seats, rank)

    def pieces(self, route: Route, low: int, high: int) -> tuple[Piece, ...]:
        """Return how bytes ``low`` to ``high`` of a line are cut into messages.

        Those that are forwarded are small enough to travel one behind the other.
        """
        alone, largest = self.policy.alone_bytes, self.policy.message_bytes
        if self.is_forwarded(route):
            largest = min(largest, max(alone, route.nbytes // _FORWARDED_PIECES))
        return route.pieces(low, high, (alone, largest))

    def messages(self, rank: int) -> list[Message]:
        """Return what ``rank`` sends and receives, in the order in which it must be posted."""
        found: list[Message] = []
        known: dict[tuple[int, int, int, bool], list[list[_Copy]]] = {}  # of what several get
        for flow in self.flows(rank):
            source, target, first = flow.source_rank, flow.target_rank, flow.hop == 0
            key = (flow.route.index, flow.low, flow.high, first)
            if key not in known:
                pieces = self.pieces(flow.route, flow.low, flow.high)
                known[key] = [[_copy(*cut, first) for cut in piece] for piece in pieces]
            for index, copies in enumerate(known[key]):
                found.append(
                    Message(
                        source_rank=source,
                        target_rank=target,
                        items=tuple([Operation(source, target, *copy) for copy in copies]),
                        step=index + _LAG * flow.hop,
                        hop=flow.hop,
                        relayed=self.is_forwarded(flow.route),
                        content=(flow.route.index, flow.stripe, index),
                    )
                )
        found.sort(key=lambda message: message.key)
        return found

    def load(self) -> Load:
        """Return the bytes that each rank sends and receives."""
        ranks = (*self.source.ranks, *self.target.ranks)
        load = Load(sent=dict.fromkeys(ranks, 0), received=dict.fromkeys(ranks, 0))
        heads: dict[tuple[int, ...], list[int]] = {}  # by group of targets: bytes by first taker
        for route in self.routes:
            if not self.is_forwarded(route):
                for source, target, low, high in unicast_stripes(route, self.policy.seats):
                    load.add(route.sources[source], route.targets[target], high - low)
                continue
            taken = heads.setdefault(route.targets, [0] * len(route.targets))
            for source, head, low, high in single_stripes(route):
                load.add(route.sources[source], route.targets[head], high - low)
                taken[head] += high - low
        for targets, taken in heads.items():
            for head, nbytes in enumerate(taken):
                for frm, to, _ in forwards(self.policy.forwarding, head, len(targets)):
                    load.add(targets[frm], targets[to], nbytes)
        return load


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes by global rank; what a rank gives itself counts on neither side."""

    sent: dict[int, int]
    received: dict[int, int]
    pairs: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, source: int, target: int, nbytes: int) -> None:
        if source != target:
            self.sent[source] += nbytes
            self.received[target] += nbytes
            self.pairs[source, target] += nbytes


_Copy = tuple[str, Box, str, Box, str, Box, str, str, str]  # an operation without its ranks


def _copy(part: Part, region: Region, low: int, high: int, first: bool) -> _Copy:
    """Return what is copied, on a ``first`` hop from a source or from target to target."""
    target_param = part.target_prefix + region.target_param
    box, source_box, target_box = region.rows(low, high)
    return (
        part.canonical + region.tensor,
        box,
        part.source_prefix + region.source_param if first else target_param,
        source_box if first else target_box,
        target_param,
        target_box,
        region.dtype,
        region.quantization,
        part.target_prefix + region.scales if region.scales else "",
    )


def plan(source: Side, target: Side, policy: PlanPolicy | None = None) -> TransferPlan:
    """Return the plan that fills every region of ``target`` from ``source``, proven.

    Raises:
        PlanError: a target element that no source holds or that would be written twice, a source
            element that no target reads, a policy that the two sides do not allow.
    """
    policy = policy or PlanPolicy()
    result = TransferPlan(source, target, policy, tuple(build_routes(source, target)))
    _check_forwarding(result)
    prove_coverage(source, target, result.routes, policy.unread)
    prove_stripes(result.routes, policy.seats)
    return result


def _check_forwarding(plan: TransferPlan) -> None:
    if plan.policy.forwarding is not Forwarding.NONE and plan.unforwardable:
        raise PlanError(
            f"{plan.unforwardable} cannot be forwarded: its replicas hold other values than those "
            "that travel (quantised after the transfer)"
        )


# --- Digests ----------------------------------------------------------------------------------


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _side_lines(side: Side) -> Iterator[str]:
    """Yield text that differs where any name, shape, region, dtype or rank differs."""
    known: dict[int, str] = {}  # blocks of a kind share their variants, which the side keeps alive
    groups: dict[int, str] = {}

    def of_variants(variants: tuple[Variant, ...]) -> str:
        if id(variants) not in known:
            known[id(variants)] = _digest(map(repr, variants))
        return known[id(variants)]

    def of_ranks(ranks: tuple[tuple[int, ...], ...]) -> str:
        if id(ranks) not in groups:
            groups[id(ranks)] = _digest(map(repr, ranks))
        return groups[id(ranks)]

    yield side.dtype
    for block in side.blocks:
        names = f"{block.canonical} {block.local} {block.is_copy}"
        yield f"{names} {of_variants(block.variants)} {of_ranks(block.ranks)}"
