"""The planner's proof, balance, rounds and digests."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from megatron_bridge.box import Box
from megatron_bridge.errors import PlanError
from megatron_bridge.layouts.hf import hf_manifest
from megatron_bridge.layouts.megatron import megatron_manifest
from megatron_bridge.layouts.vllm import vllm_manifest
from megatron_bridge.operations import Operation
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.plan import TransferPlan, manifest_digest, plan, prove
from megatron_bridge.spec import LocalParam, RankManifest, Shard
from tests.unit.megatron_bridge.oracle import make_spec

LAYOUT = TrainerLayout(tp=2, pp=2, dp=2, vocab_divisor=16)
SPEC = make_spec(num_layers=2)


def _make_source() -> list[RankManifest]:
    return [megatron_manifest(SPEC, LAYOUT, rank) for rank in range(LAYOUT.world_size)]


def _make_target() -> list[RankManifest]:
    return [vllm_manifest(SPEC, 2, rank, global_rank=8 + rank) for rank in range(2)]


def _with(whole: TransferPlan, change: Callable[[list[Operation]], None]) -> TransferPlan:
    operations = list(whole.operations)
    change(operations)
    return dataclasses.replace(whole, operations=tuple(operations))


def _drop(operations: list[Operation]) -> None:
    operations.pop(5)


def _double(operations: list[Operation]) -> None:
    operations.append(operations[5])


def _double_from_the_other_replica(operations: list[Operation]) -> None:
    item = operations[5]
    at = LAYOUT.coordinate(item.source_rank)
    other = LAYOUT.rank_of(dataclasses.replace(at, dp=1 - at.dp))
    operations.append(dataclasses.replace(item, source_rank=other))


def _shift(field: str) -> Callable[[list[Operation]], None]:
    def change(operations: list[Operation]) -> None:
        item = operations[5]
        box: Box = getattr(item, field)
        moved = box.shift((1,) + (0,) * (len(box.start) - 1))
        operations[5] = dataclasses.replace(item, **{field: moved})

    return change


def _swap_regions_of_two_targets(operations: list[Operation]) -> None:
    """Give each target rank a region that is the other's: sizes match, contents do not."""
    name = "model.layers.0.self_attn.q_proj.weight"
    index = {item.target_rank: i for i, item in enumerate(operations) if item.tensor == name}
    (a, i), (b, j) = index.items()
    operations[i] = dataclasses.replace(operations[i], target_rank=b)
    operations[j] = dataclasses.replace(operations[j], target_rank=a)


def _cut_short(operations: list[Operation]) -> None:
    item = next(item for item in operations if item.box.shape[0] > 1)
    operations[operations.index(item)] = item.rows(0, item.box.shape[0] - 1)


@pytest.mark.parametrize(
    "change",
    [
        _drop,
        _double,
        _double_from_the_other_replica,
        _shift("box"),
        _shift("source_box"),
        _shift("target_box"),
        _swap_regions_of_two_targets,
        _cut_short,
    ],
)
def test_a_corrupted_plan_is_refused(change: Callable[[list[Operation]], None]) -> None:
    source, target = _make_source(), _make_target()
    whole = plan(source, target)
    prove(whole, source, target)
    with pytest.raises(PlanError):
        prove(_with(whole, change), source, target)


def test_writing_into_padding_is_refused() -> None:
    source, target = _make_source(), _make_target()
    whole = plan(source, target)

    def pad(operations: list[Operation]) -> None:
        # The vocabulary of 100 ends at row 36 of the second rank's 64.
        item = next(
            item
            for item in operations
            if item.tensor == "model.embed_tokens.weight" and item.target_rank == 9
        )
        width = item.box.shape[1]
        operations.append(dataclasses.replace(item, target_box=Box((50, 0), (51, width))))

    with pytest.raises(PlanError, match="no shard there has"):
        prove(_with(whole, pad), source, target)


def test_a_tensor_without_a_source_is_named() -> None:
    source = [hf_manifest(make_spec(tied_embeddings=True), 0)]
    target = [vllm_manifest(make_spec(), 1, 0, global_rank=1)]
    with pytest.raises(
        PlanError, match=r"0 elements of lm_head\.weight have a source, expected 1600"
    ):
        plan(source, target)


def test_partly_overlapping_sources_are_refused() -> None:
    def holder(rank: int, low: int, high: int) -> RankManifest:
        shard = Shard(
            tensor="t", box=Box((low,), (high,)), param="p", local=Box((0,), (high - low,))
        )
        return RankManifest(
            rank=rank, params=(LocalParam(name="p", shape=(high - low,), shards=(shard,)),)
        )

    with pytest.raises(PlanError, match="overlap"):
        plan([holder(0, 0, 6), holder(1, 4, 10)], [holder(2, 0, 10)])
    whole = plan([holder(0, 0, 6), holder(1, 6, 10)], [holder(2, 0, 10)])
    assert [(item.source_rank, item.box) for item in whole.operations] == [
        (0, Box((0,), (6,))),
        (1, Box((6,), (10,))),
    ]


def test_ranks_must_be_distinct_and_present() -> None:
    manifest = hf_manifest(SPEC, 0)
    with pytest.raises(PlanError, match=r"source manifests are of ranks \[0, 0\]"):
        plan([manifest, manifest], _make_target())
    with pytest.raises(PlanError, match=r"target manifests are of ranks \[\]"):
        plan([manifest], [])


@pytest.mark.parametrize(("dp", "cp", "replicas"), [(2, 1, 2), (4, 1, 3), (2, 2, 1), (3, 1, 4)])
def test_senders_share_the_load_evenly_over_replicas(dp: int, cp: int, replicas: int) -> None:
    spec = make_spec(hidden_size=512, ffn_size=1024, head_dim=64, vocab_size=4096, num_layers=4)
    layout = TrainerLayout(tp=2, dp=dp, cp=cp)
    source = [megatron_manifest(spec, layout, rank) for rank in range(layout.world_size)]
    world = layout.world_size
    target = [vllm_manifest(spec, 2, i % 2, global_rank=world + i) for i in range(2 * replicas)]
    report = plan(source, target).report(itemsize=2)
    # Each generator rank receives its whole shard once ...
    numel = {m.rank: sum(s.box.numel for p in m.params for s in p.shards) for m in target}
    assert report.received_bytes == {rank: 2 * count for rank, count in numel.items()}
    # ... and no trainer rank sends more than 5 % over an even share.
    assert set(report.sent_bytes) == set(range(world))
    assert report.imbalance <= 1.05
    assert report.total_bytes == sum(report.sent_bytes.values())


def test_small_tensors_open_no_connections() -> None:
    spec = make_spec(num_layers=6)
    layout = TrainerLayout(tp=2, dp=4)
    source = [megatron_manifest(spec, layout, rank) for rank in range(8)]
    target = [vllm_manifest(spec, 2, rank, global_rank=8 + rank) for rank in range(2)]
    operations = plan(source, target).operations
    matrices = {(o.source_rank, o.target_rank) for o in operations if len(o.box.start) > 1}
    assert {(o.source_rank, o.target_rank) for o in operations} == matrices


def test_rounds_cover_the_plan_within_their_caps_in_one_order() -> None:
    whole = plan(_make_source(), _make_target())
    rounds = whole.rounds(max_operations=4, max_numel=64)
    elements: dict[tuple, int] = defaultdict(int)
    seen: set[tuple] = set()
    for operations in rounds:
        counts: Counter[int] = Counter()
        numel: Counter[int] = Counter()
        for item in operations:
            for rank in (item.source_rank, item.target_rank):
                counts[rank] += 1
                numel[rank] += item.box.numel
            key = (item.target_rank, item.target_param, item.target_box)
            assert key not in seen
            seen.add(key)
            elements[item.source_rank, item.target_rank, item.tensor] += item.box.numel
        assert max(counts.values()) <= 4
        assert max(numel.values()) <= 64
    expected: dict[tuple, int] = defaultdict(int)
    for item in whole.operations:
        expected[item.source_rank, item.target_rank, item.tensor] += item.box.numel
    assert elements == expected
    for rank in (0, 3, 8):
        mine = [tuple(o for o in ops if rank in (o.source_rank, o.target_rank)) for ops in rounds]
        alone = whole.rounds(max_operations=4, max_numel=64, rank=rank)
        assert alone == tuple(operations for operations in mine if operations)
    # No rank idles through most rounds: the busiest one is in nearly all of them.
    presence = Counter(
        rank
        for operations in rounds
        for rank in {r for o in operations for r in (o.source_rank, o.target_rank)}
    )
    assert max(presence.values()) >= 0.9 * len(rounds)


def test_of_source_and_of_target_divide_the_plan() -> None:
    whole = plan(_make_source(), _make_target())
    by_source = [item for rank in whole.source_ranks for item in whole.of_source(rank)]
    by_target = [item for rank in whole.target_ranks for item in whole.of_target(rank)]
    assert sorted(by_source) == sorted(by_target) == list(whole.operations)


def test_plans_are_deterministic_and_digests_tell_every_difference() -> None:
    first, second = plan(_make_source(), _make_target()), plan(_make_source(), _make_target())
    assert first == second
    other_models = [
        make_spec(num_layers=2, vocab_size=101),
        make_spec(num_layers=2, tied_embeddings=True),
        make_spec(num_layers=2, qkv_bias=True),
        make_spec(num_layers=2, num_kv_heads=4),
    ]
    layout = dataclasses.replace(LAYOUT, vocab_divisor=128)
    manifests = [
        _make_target(),
        _make_source(),
        list(reversed(_make_source())),
        _make_source()[:-1],
        [megatron_manifest(SPEC, layout, rank) for rank in range(8)],
        [megatron_manifest(SPEC, LAYOUT, rank, fused_norms=True) for rank in range(8)],
        [megatron_manifest(SPEC, LAYOUT, rank, global_rank=rank + 1) for rank in range(8)],
        *([megatron_manifest(spec, LAYOUT, rank) for rank in range(8)] for spec in other_models),
    ]
    digests = [manifest_digest(item) for item in manifests]
    assert len(set(digests)) == len(digests)
    replicas = [vllm_manifest(SPEC, 2, i % 2, global_rank=8 + i) for i in range(4)]
    assert plan(_make_source(), replicas).digest != first.digest
