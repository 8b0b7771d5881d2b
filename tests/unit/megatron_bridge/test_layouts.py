"""The layouts and the planner against the dense oracle, bit for bit, over a grid of layouts."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge.errors import PlanError
from megatron_bridge.layouts.hf import hf_manifest
from megatron_bridge.layouts.megatron import megatron_manifest, padded_vocab_size
from megatron_bridge.layouts.vllm import vllm_manifest
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.plan import plan
from megatron_bridge.spec import ModelSpec
from tests.unit.megatron_bridge.oracle import (
    Tensors,
    execute,
    hf_tensors,
    make_spec,
    megatron_tensors,
    vllm_tensors,
)

POISON = -7
# Layers of each stage of a six-layer model, written out by hand from Megatron's documentation of
# pipeline splits: (pp, vpp, first, last) -> stages.
STAGES = {
    (1, 1, None, None): [[0, 1, 2, 3, 4, 5]],
    (2, 1, None, None): [[0, 1, 2], [3, 4, 5]],
    (2, 3, None, None): [[0, 2, 4], [1, 3, 5]],
    (2, 1, 2, None): [[0, 1], [2, 3, 4, 5]],
    (2, 2, None, 2): [[0, 1, 3, 4], [2, 5]],
    (3, 1, None, None): [[0, 1], [2, 3], [4, 5]],
    (3, 2, None, None): [[0, 3], [1, 4], [2, 5]],
    (3, 1, 1, 2): [[0], [1, 2, 3], [4, 5]],
    (3, 1, None, 4): [[0], [1], [2, 3, 4, 5]],
}
MODELS = {
    "untied": make_spec(),
    "tied": make_spec(tied_embeddings=True, num_kv_heads=4),
    "qwen2": make_spec(family="qwen2", qkv_bias=True, num_kv_heads=1),
    "qwen3": make_spec(family="qwen3", qk_norm=True, tied_embeddings=True, num_kv_heads=8),
}


MIXTURES = {
    "qwen3_moe": make_spec(
        family="qwen3_moe",
        qk_norm=True,
        num_kv_heads=4,
        num_experts=8,
        experts_per_token=2,
        moe_ffn_size=8,
    ),
    "mixtral": make_spec(
        family="mixtral", num_experts=4, experts_per_token=2, moe_ffn_size=24, norm_topk=True
    ),
}


def _make_layout(tp: int, stages: tuple, dp: int = 1, cp: int = 1) -> TrainerLayout:
    pp, vpp, first, last = stages
    return TrainerLayout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        vpp=vpp,
        num_layers_in_first_stage=first,
        num_layers_in_last_stage=last,
        vocab_divisor=16,
    )


def _poisoned(tensors: Tensors) -> Tensors:
    return {name: torch.full_like(tensor, POISON) for name, tensor in tensors.items()}


def _assert_equal(got: Tensors, expected: Tensors, padding: int) -> None:
    """Compare bitwise, where the oracle's zero rows (no number is 0) stand for padding."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        wanted = tensor.masked_fill(tensor == 0, padding)
        assert got[name].shape == wanted.shape, name
        assert torch.equal(got[name], wanted), name


def _check_transfer(spec: ModelSpec, layout: TrainerLayout, stages: list, tp: int, n: int) -> None:
    whole = hf_tensors(spec)
    ranks = megatron_tensors(spec, whole, layout, stages, padding=-1)
    source = [megatron_manifest(spec, layout, rank) for rank in ranks]
    world = layout.world_size
    target = [vllm_manifest(spec, tp, i % tp, global_rank=world + i) for i in range(tp * n)]
    expected = {world + i: vllm_tensors(spec, whole, tp, i % tp) for i in range(tp * n)}
    ranks |= {rank: _poisoned(tensors) for rank, tensors in expected.items()}
    execute(plan(source, target), ranks)
    for rank, tensors in expected.items():
        _assert_equal(ranks[rank], tensors, POISON)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("tp", "stages"),
    [(tp, (1, 1, None, None)) for tp in (1, 4, 8)] + [(2, stages) for stages in STAGES],
    ids=str,
)
def test_megatron_manifest_places_what_the_oracle_places(
    model: str, tp: int, stages: tuple
) -> None:
    spec, layout = MODELS[model], _make_layout(tp, stages, dp=2)
    whole = hf_tensors(spec)
    fused = tp == 2
    expected = megatron_tensors(spec, whole, layout, STAGES[stages], fused_norms=fused)
    # The two data-parallel replicas share their manifests; check the first of each stage.
    expected = {r: t for r, t in expected.items() if layout.coordinate(r).dp == 0}
    target = [
        megatron_manifest(spec, layout, rank, fused_norms=fused, global_rank=rank)
        for rank in expected
    ]
    ranks = {rank: _poisoned(tensors) for rank, tensors in expected.items()}
    execute(plan([hf_manifest(spec, 999)], target), {**ranks, 999: whole})
    for rank, tensors in expected.items():
        _assert_equal(ranks[rank], tensors, POISON)


@pytest.mark.parametrize("generator_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_transfer_equals_the_oracle_over_tensor_parallel_sizes(
    model: str, tp: int, generator_tp: int
) -> None:
    stages = (1, 1, None, None)
    layout = _make_layout(tp, stages, dp=2)
    _check_transfer(MODELS[model], layout, STAGES[stages], generator_tp, 2)


@pytest.mark.parametrize("generator_tp", [1, 2, 4])
@pytest.mark.parametrize(
    "divided",
    [
        {},
        {"dp": 2, "ep": 2},
        {"dp": 4, "ep": 2},
        {"tp": 2, "dp": 2, "ep": 2},
        {"tp": 2, "dp": 4, "ep": 4, "etp": 2},
        {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "pp": 3},
        {"tp": 4, "etp": 4, "pp": 2, "vpp": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", MIXTURES)
def test_transfer_of_experts_equals_the_oracle(
    model: str, divided: dict[str, int], generator_tp: int
) -> None:
    layout = TrainerLayout(**divided, sequence_parallel="tp" in divided, vocab_divisor=16)
    stages = STAGES[layout.pp, layout.vpp, None, None]
    _check_transfer(MIXTURES[model], layout, stages, generator_tp, 2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model", MIXTURES)
def test_megatron_manifest_places_experts_where_the_oracle_does(model: str, fused: bool) -> None:
    layout = TrainerLayout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True, vocab_divisor=16)
    whole = hf_tensors(MIXTURES[model])
    ranks = megatron_tensors(MIXTURES[model], whole, layout, [[*range(6)]], fused_norms=fused)
    target = [megatron_manifest(MIXTURES[model], layout, rank, fused_norms=fused) for rank in ranks]
    got = {rank: _poisoned(tensors) for rank, tensors in ranks.items()}
    execute(plan([hf_manifest(MIXTURES[model], 9)], target), {**got, 9: whole})
    for rank, tensors in ranks.items():
        _assert_equal(got[rank], tensors, POISON)


@pytest.mark.parametrize("stages", STAGES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_transfer_equals_the_oracle_over_pipelines(model: str, stages: tuple) -> None:
    _check_transfer(MODELS[model], _make_layout(2, stages, dp=2), STAGES[stages], 4, 1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("generator_tp", [1, 2, 4, 8])
def test_transfer_equals_the_oracle_over_key_value_heads(
    kv_heads: int, tp: int, generator_tp: int
) -> None:
    spec = make_spec(num_kv_heads=kv_heads, num_layers=1, qkv_bias=True)
    _check_transfer(spec, _make_layout(tp, (1, 1, None, None)), [[0]], generator_tp, 1)


@settings(max_examples=200, deadline=None)
@given(draw=st.data())
def test_any_transfer_equals_the_oracle(draw: st.DataObject) -> None:
    heads = draw.draw(st.sampled_from([4, 8, 12]), "heads")
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    kv_heads = draw.draw(st.sampled_from(divisors), "kv heads")
    fits = [t for t in divisors if kv_heads % t == 0 or t % kv_heads == 0]
    head_dim = draw.draw(st.sampled_from([2, 6]), "head dim")
    rows = (heads + 2 * kv_heads) * head_dim
    tp = draw.draw(st.sampled_from([t for t in fits if rows % t == 0]), "tp")
    vocab = draw.draw(st.integers(2, 150), "vocab")
    padded = -(-vocab // 64) * 64
    generator_tp = draw.draw(st.sampled_from([t for t in fits if padded % t == 0]), "generator tp")
    spec = make_spec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        hidden_size=draw.draw(st.integers(1, 9), "hidden"),
        ffn_size=24 * draw.draw(st.integers(1, 2), "ffn"),
        tied_embeddings=draw.draw(st.booleans(), "tied"),
        qkv_bias=draw.draw(st.booleans(), "bias"),
        qk_norm=draw.draw(st.booleans(), "qk norm"),
    )
    stages = draw.draw(st.sampled_from(list(STAGES)), "stages")
    dp, cp = draw.draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]), "dp and cp")
    divisor = draw.draw(st.sampled_from([1, 8, 128]), "divisor")
    layout = dataclasses.replace(_make_layout(tp, stages, dp, cp), vocab_divisor=divisor)
    replicas = draw.draw(st.integers(1, 2), "replicas")
    _check_transfer(spec, layout, STAGES[stages], generator_tp, replicas)


@pytest.mark.parametrize("model", [*MODELS, *MIXTURES])
def test_a_generator_can_be_read_back_into_a_checkpoint(model: str) -> None:
    spec = {**MODELS, **MIXTURES}[model]
    whole = hf_tensors(spec)
    ranks = {rank: vllm_tensors(spec, whole, 4, rank) for rank in range(4)}
    ranks[9] = _poisoned(whole)
    source = [vllm_manifest(spec, 4, rank, global_rank=rank) for rank in range(4)]
    execute(plan(source, [hf_manifest(spec, 9)]), ranks)
    _assert_equal(ranks[9], whole, POISON)


def test_canonical_tensors_are_those_of_the_oracle() -> None:
    for spec in (*MODELS.values(), *MIXTURES.values()):
        shapes = {name: tuple(tensor.shape) for name, tensor in hf_tensors(spec).items()}
        assert {item.name: item.shape for item in canonical_tensors(spec)} == shapes


def test_published_vocabulary_paddings() -> None:
    llama3 = make_spec(vocab_size=128_256)
    assert padded_vocab_size(llama3, TrainerLayout(tp=8)) == 129_024
    assert padded_vocab_size(llama3, TrainerLayout(tp=1)) == 128_256
    manifest = vllm_manifest(llama3, 8, 7, global_rank=7)
    shapes = {param.name: param.shape for param in manifest.params}
    assert shapes["model.embed_tokens.weight"][0] == 16_032


def test_ranks_outside_the_layout_are_refused() -> None:
    with pytest.raises(PlanError, match="rank 2 is not one of the layout's 2"):
        megatron_manifest(make_spec(), TrainerLayout(tp=2), 2)
    with pytest.raises(PlanError, match="rank 2 is not one of the replica's 2"):
        vllm_manifest(make_spec(), 2, 2, global_rank=2)
