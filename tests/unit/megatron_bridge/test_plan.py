"""The planner's proof, balance, order and digests."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import pytest

from megatron_bridge.box import Box
from megatron_bridge.errors import PlanError
from megatron_bridge.flows import Forwarding, Seat, Stripe, single_stripes
from megatron_bridge.layouts.hf import hf_side
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.layouts.vllm import vllm_side
from megatron_bridge.operations import Message
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.plan import PlanPolicy, TransferPlan, plan
from megatron_bridge.proof import prove_coverage, prove_tiling
from megatron_bridge.routes import Region, Route
from megatron_bridge.side import Block, Side
from megatron_bridge.spec import LocalParam, Shard
from tests.unit.megatron_bridge.oracle import make_spec

LAYOUT = TrainerLayout(tp=2, pp=2, dp=2, vocab_divisor=16)
SPEC = make_spec(num_layers=2)
SMALL = PlanPolicy(alone_bytes=256, message_bytes=1000)


def _make_source(**changes: int) -> Side:
    return megatron_side(SPEC, dataclasses.replace(LAYOUT, **changes))


def _make_target(**layout: int) -> Side:
    return vllm_side(SPEC, GeneratorLayout(**{"tp": 2, **layout}), first_rank=8)


# --- Proof ------------------------------------------------------------------------------------


def _matrix(route: Route) -> tuple[int, int]:
    """Return where a route keeps its first query projection: (part, region)."""
    return next(
        (p, r)
        for p, part in enumerate(route.parts)
        for r, region in enumerate(part.regions)
        if "q_proj" in region.tensor
    )


def _change(route: Route, change: Callable[[Region], list[Region]]) -> None:
    p, r = _matrix(route)
    part = route.parts[p]
    regions = [*part.regions[:r], *change(part.regions[r]), *part.regions[r + 1 :]]
    route.parts[p] = dataclasses.replace(part, regions=tuple(regions))


def _shift(name: str) -> Callable[[Region], list[Region]]:
    def change(region: Region) -> list[Region]:
        return [dataclasses.replace(region, **{name: getattr(region, name).shift((1, 0))})]

    return change


def _cut(region: Region) -> list[Region]:
    def shorter(box: Box) -> Box:
        return Box(box.start, (box.stop[0] - 1, *box.stop[1:]))

    boxes = {name: shorter(getattr(region, name)) for name in ("box", "source_box", "target_box")}
    return [dataclasses.replace(region, **boxes)]


def _rename(region: Region) -> list[Region]:
    return [dataclasses.replace(region, tensor=region.tensor.replace("q_proj", "o_proj"))]


CHANGES: dict[str, Callable[[Region], list[Region]]] = {
    "dropped": lambda region: [],
    "twice": lambda region: [region, region],
    "other elements": _shift("box"),
    "from another place": _shift("source_box"),
    "to another place": _shift("target_box"),
    "cut short": _cut,
    "another tensor": _rename,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_corrupted_region_is_refused(change: str) -> None:
    source, target = _make_source(), _make_target()
    whole = plan(source, target)
    prove_coverage(source, target, whole.routes, ())
    # Routes of norms have no projections.
    route = next(r for r in whole.routes if r.sources == (0, 2) and len(r.parts[-1].regions) > 4)
    _change(route, CHANGES[change])
    with pytest.raises(PlanError):
        prove_coverage(source, target, whole.routes, ())


def test_a_lost_route_is_refused() -> None:
    source, target = _make_source(), _make_target()
    whole = plan(source, target)
    for index in range(len(whole.routes)):
        rest = [*whole.routes[:index], *whole.routes[index + 1 :]]
        with pytest.raises(PlanError, match="have a source"):
            prove_coverage(source, target, rest, ())


def test_writing_into_padding_is_refused() -> None:
    source, target = _make_source(), _make_target()
    whole = plan(source, target)
    # The vocabulary of 100 ends at row 36 of the second rank's 64.
    route = next(r for r in whole.routes if r.targets == (9,) and r.parts[0].canonical == "")
    part = route.parts[0]
    (region,) = part.regions
    padding = dataclasses.replace(region, target_box=region.target_box.shift((20, 0)))
    route.parts[0] = dataclasses.replace(part, regions=(padding,))
    with pytest.raises(PlanError, match="no shard there has"):
        prove_coverage(source, target, whole.routes, ())


def test_a_tensor_without_a_source_is_named() -> None:
    source = hf_side(make_spec(tied_embeddings=True), 0)
    target = vllm_side(make_spec(), GeneratorLayout(), first_rank=1)
    with pytest.raises(
        PlanError, match=r"0 elements of lm_head\.weight have a source, expected 1600"
    ):
        plan(source, target)


def test_a_tensor_that_nobody_reads_is_named_unless_it_is_left_out_on_purpose() -> None:
    target = vllm_side(make_spec(tied_embeddings=True), GeneratorLayout(), first_rank=1)
    with pytest.raises(
        PlanError, match=r"lm_head\.weight: 0 elements are read by a target, expected 1600"
    ):
        plan(hf_side(make_spec(), 0), target)
    shorter = vllm_side(make_spec(num_layers=5), GeneratorLayout(), first_rank=1)
    with pytest.raises(PlanError, match=r"model\.layers\.5\..*: 0 elements are read"):
        plan(hf_side(make_spec(), 0), shorter)
    plan(hf_side(make_spec(), 0), shorter, PlanPolicy(unread=("model.layers.5.",)))


def test_replicas_of_two_layouts_are_filled_and_what_neither_reads_is_named() -> None:
    source = _make_source()
    first = _make_target().blocks
    other = vllm_side(SPEC, GeneratorLayout(tp=1), first_rank=10).blocks
    whole = plan(source, Side((*first, *other)))
    assert {message.target_rank for message in whole.messages(0)} == {8, 10}
    with pytest.raises(PlanError, match=r"model\.layers\.1\..*: 0 elements are read"):
        plan(source, Side(tuple(b for b in (*first, *other) if b.local != "model.layers.1.")))


def test_what_is_left_of_a_box_without_another() -> None:
    box = Box((0, 0), (6, 4))
    for hole in (
        Box((2, 1), (4, 3)),
        Box((0, 0), (6, 2)),
        Box((5, 3), (9, 9)),
        Box((7, 0), (8, 4)),
    ):
        rest = box.without(hole)
        cells = [(r, c) for r in range(6) for c in range(4)]
        inside = {cell for cell in cells if hole.contains(Box(cell, (cell[0] + 1, cell[1] + 1)))}
        found = [(r, c) for b in rest for r in range(*_ends(b, 0)) for c in range(*_ends(b, 1))]
        assert sorted(found) == sorted(set(cells) - inside)
    assert box.without(box) == []


def _ends(box: Box, dim: int) -> tuple[int, int]:
    return box.start[dim], box.stop[dim]


def _holder(rank: int, low: int, high: int) -> Block:
    shard = Shard(tensor="t", box=Box((low,), (high,)), param="p", local=Box((0,), (high - low,)))
    param = LocalParam(name="p", shape=(high - low,), shards=(shard,))
    return Block(canonical="", local="", variants=((param,),), ranks=((rank,),))


def test_partly_overlapping_sources_are_refused() -> None:
    target = Side((_holder(2, 0, 10),))
    with pytest.raises(PlanError, match="overlap"):
        plan(Side((_holder(0, 0, 6), _holder(1, 4, 10))), target)
    whole = plan(Side((_holder(0, 0, 6), _holder(1, 6, 10))), target)
    items = [item for message in whole.messages(2) for item in message.items]
    assert sorted((item.source_rank, item.box) for item in items) == [
        (0, Box((0,), (6,))),
        (1, Box((6,), (10,))),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda stripes: stripes[1:],
        lambda stripes: stripes[:-1],
        lambda stripes: [*stripes, stripes[0]],
        lambda stripes: [(*stripes[0][:2], 0, stripes[0][3] - 1), *stripes[1:]],
    ],
)
def test_a_line_with_a_gap_or_a_repetition_is_refused(
    change: Callable[[list[Stripe]], list[Stripe]],
) -> None:
    route = plan(_make_source(), _make_target(replicas=3)).routes[0]
    stripes = single_stripes(route)
    assert len(stripes) > 2
    prove_tiling(route, stripes)
    with pytest.raises(PlanError, match=r"are sent twice or never|are never sent"):
        prove_tiling(route, change(stripes))


# --- Division ---------------------------------------------------------------------------------

BIG = make_spec(hidden_size=512, ffn_size=1024, head_dim=64, vocab_size=4096, num_layers=4)


def _received(whole: TransferPlan, rank: int) -> dict[tuple[str, Box], int]:
    """Return how often each row of each parameter arrives, by whole regions."""
    found: dict[tuple[str, Box], int] = defaultdict(int)
    for message in whole.messages(rank):
        for item in message.items if message.target_rank == rank else ():
            found[item.target_param, item.target_box] += 1
    return found


@pytest.mark.parametrize("forwarding", Forwarding)
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_each_target_receives_its_shard_once(forwarding: Forwarding, replicas: int) -> None:
    policy = dataclasses.replace(SMALL, forwarding=forwarding, forward_bytes=100)
    target = _make_target(replicas=replicas)
    whole = plan(_make_source(), target, policy)
    for manifest in target.manifests():
        found = _received(whole, manifest.rank)
        assert set(found.values()) == {1}
        expected = {p.name: sum(s.box.numel for s in p.shards) for p in manifest.params}
        got: dict[str, int] = defaultdict(int)
        for name, box in found:
            got[name] += box.numel
        assert got == expected
    forwarded = any(m.hop for rank in target.ranks for m in whole.messages(rank))
    assert forwarded == (forwarding is not Forwarding.NONE and replicas > 1)


@pytest.mark.parametrize(("dp", "cp", "replicas"), [(2, 1, 2), (4, 1, 3), (2, 2, 1), (3, 1, 4)])
def test_senders_share_the_load_evenly_over_replicas(dp: int, cp: int, replicas: int) -> None:
    layout = TrainerLayout(tp=2, dp=dp, cp=cp)
    target = vllm_side(
        BIG,
        GeneratorLayout(tp=2, replicas=replicas),
        first_rank=layout.world_size,
        dtype="bfloat16",
    )
    load = plan(megatron_side(BIG, layout), target).load()
    # Each generator rank receives its whole shard once ...
    numel = {
        m.rank: sum(s.box.numel for p in m.params for s in p.shards) for m in target.manifests()
    }
    assert {rank: load.received[rank] for rank in numel} == {r: 2 * n for r, n in numel.items()}
    # ... and no trainer rank sends more than 1 % over an even share.
    sent = [load.sent[rank] for rank in range(layout.world_size)]
    assert sum(sent) == 2 * sum(numel.values())
    assert max(sent) <= 1.01 * sum(sent) / len(sent)


@pytest.mark.parametrize("forwarding", [Forwarding.RING, Forwarding.SPREAD])
def test_forwarding_takes_the_load_from_trainers_evenly(forwarding: Forwarding) -> None:
    target = vllm_side(BIG, GeneratorLayout(tp=2, replicas=6), first_rank=2)
    whole = plan(megatron_side(BIG, TrainerLayout(tp=2)), target, PlanPolicy(forwarding=forwarding))
    load = whole.load()
    one = load.received[2]
    # A trainer sends about one copy of its shard, a generator five sixths of it.
    assert max(load.sent[rank] for rank in (0, 1)) <= 1.1 * one
    sent = [load.sent[rank] for rank in target.ranks]
    assert max(sent) <= 1.05 * one * 5 / 6
    for rank in (0, 1, *target.ranks):
        total = sum(m.nbytes for m in whole.messages(rank) if m.source_rank == rank)
        assert total == pytest.approx(load.sent[rank], rel=0.01)


def test_targets_are_served_from_their_own_host_then_rail_and_evenly() -> None:
    layout = TrainerLayout(tp=2, dp=4)
    # Hosts of four ranks: trainers 0-7 on 0 and 1, two generators on 0, two on 2.
    hosts = [0] * 4 + [1] * 4 + [1, 0, 2, 2]
    seats = tuple((host, rank % 4) for rank, host in enumerate(hosts))
    target = vllm_side(BIG, GeneratorLayout(tp=1, replicas=4), first_rank=8)
    whole = plan(megatron_side(BIG, layout), target, PlanPolicy(seats=seats))
    load = whole.load()
    near = sum(n for (a, b), n in load.pairs.items() if hosts[a] == hosts[b])
    blind = plan(megatron_side(BIG, layout), target).load()
    assert near > sum(n for (a, b), n in blind.pairs.items() if hosts[a] == hosts[b])
    assert near >= 0.45 * sum(load.sent.values())  # two of four targets are near all they need
    sent = [load.sent[rank] for rank in range(8)]
    assert max(sent) <= 1.01 * sum(sent) / 8


@pytest.mark.parametrize("seats", [(), tuple((rank // 2, rank % 2) for rank in range(4))])
def test_a_target_that_is_a_source_too_takes_from_itself(seats: tuple[Seat, ...]) -> None:
    # Every source holds all that any target needs.
    layout = GeneratorLayout(tp=2, replicas=2)
    policy = PlanPolicy(seats=seats)
    colocated = vllm_side(SPEC, layout, first_rank=0)
    whole = plan(megatron_side(SPEC, TrainerLayout(dp=4)), colocated, policy)
    assert sum(whole.load().received.values()) == 0
    assert all(m.source_rank == m.target_rank for rank in range(4) for m in whole.messages(rank))
    # Of these five targets only the first is a source.
    partly = vllm_side(SPEC, GeneratorLayout(replicas=5), first_rank=3)
    load = plan(megatron_side(SPEC, TrainerLayout(dp=4)), partly, PlanPolicy()).load()
    assert load.received[3] == 0
    assert min(load.received[rank] for rank in range(4, 8)) == load.received[4] > 0


def test_small_tensors_travel_together_across_layers() -> None:
    spec = make_spec(num_layers=6)
    target = vllm_side(spec, GeneratorLayout(tp=2), first_rank=2)
    whole = plan(megatron_side(spec, TrainerLayout(tp=2)), target)
    messages = [m for m in whole.messages(2) if m.target_rank == 2]
    # Everything is small here: one message a route, of many regions.
    assert len(messages) == len({m.content[0] for m in messages}) <= 4
    assert sum(len(m.items) for m in messages) > 40


def test_messages_respect_their_size_and_cut_at_rows() -> None:
    whole = plan(_make_source(), _make_target(), SMALL)
    for message in whole.messages(8):
        assert sum(item.nbytes for item in message.items) <= 1000
        for item in message.items:
            assert item.box.shape == item.source_box.shape == item.target_box.shape


# --- Order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("forwarding", Forwarding)
def test_both_ends_see_the_same_messages_and_forwarders_have_what_they_send(
    forwarding: Forwarding,
) -> None:
    policy = dataclasses.replace(SMALL, forwarding=forwarding, forward_bytes=100)
    source, target = _make_source(), _make_target(replicas=3)
    whole = plan(source, target, policy)
    seen: dict[tuple, list[Message]] = defaultdict(list)
    for rank in (*source.ranks, *target.ranks):
        messages = whole.messages(rank)
        keys = [message.key for message in messages]
        assert keys == sorted(set(keys))
        held: set[tuple] = set()
        for message in messages:
            seen[message.key].append(message)
            if message.target_rank == rank:
                held.add(message.content)
            elif message.hop:
                assert message.content in held
    for ends in seen.values():
        assert len(ends) == 2
        assert ends[0] == ends[1]


def test_pairs_take_turns() -> None:
    """A target hears from all of its sources early, a source serves all of its targets early."""
    target = vllm_side(BIG, GeneratorLayout(tp=2, replicas=4), first_rank=8)
    policy = PlanPolicy(alone_bytes=1 << 10, message_bytes=1 << 16)
    whole = plan(megatron_side(BIG, TrainerLayout(tp=2, pp=4)), target, policy)
    for rank in (0, 7, 8, 15):
        messages = whole.messages(rank)
        peers = {m.source_rank + m.target_rank - rank for m in messages}
        early = messages[: 2 * len(peers)]
        assert {m.source_rank + m.target_rank - rank for m in early} == peers


def test_plans_are_deterministic_and_digests_tell_every_difference() -> None:
    megatron_side.cache_clear()
    first = plan(_make_source(), _make_target())
    megatron_side.cache_clear()
    vllm_side.cache_clear()
    second = plan(_make_source(), _make_target())
    assert first.digest == second.digest
    assert first.messages(8) == second.messages(8)
    others = [
        make_spec(num_layers=2, vocab_size=101),
        make_spec(num_layers=2, qkv_bias=True),
        make_spec(num_layers=2, num_kv_heads=4),
    ]
    target = _make_target()
    plans = [
        first,
        plan(_make_source(vocab_divisor=128), target),
        plan(_make_source(dp=4), vllm_side(SPEC, GeneratorLayout(tp=2), first_rank=16)),
        plan(_make_source(), _make_target(replicas=2)),
        plan(_make_source(), _make_target(), SMALL),
        plan(
            _make_source(), vllm_side(SPEC, GeneratorLayout(tp=2), first_rank=8, dtype="bfloat16")
        ),
        plan(megatron_side(SPEC, LAYOUT, te=True), target),
        *(
            plan(
                megatron_side(spec, LAYOUT),
                vllm_side(spec, GeneratorLayout(tp=2), first_rank=8),
            )
            for spec in others
        ),
    ]
    assert len({item.digest for item in plans}) == len(plans)
