"""The layouts and the planner against the dense oracle, bit for bit, over a grid of layouts."""

import dataclasses
import math
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_bridge.errors import PlanError
from megatron_bridge.flows import Forwarding
from megatron_bridge.layouts.hf import hf_side
from megatron_bridge.layouts.megatron import (
    megatron_manifest,
    megatron_side,
    padded_vocab_size,
)
from megatron_bridge.layouts.vllm import vllm_manifest, vllm_side
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.plan import PlanPolicy, plan
from megatron_bridge.spec import LatentAttention, ModelSpec
from tests.unit.megatron_bridge.checkpoints import make_deepseek, make_mixture
from tests.unit.megatron_bridge.oracle import (
    Tensors,
    hf_tensors,
    make_spec,
    megatron_tensors,
    vllm_tensors,
)
from tests.unit.megatron_bridge.transfer import execute

POISON = -7
DRAWS = int(os.environ.get("MEGARL_DRAWS", "200"))  # `make nightly` draws more
Draw = Any  # of `st.DataObject.draw`
SMALL = PlanPolicy(alone_bytes=256, message_bytes=1000)  # cuts the tensors of tiny models
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
FOUR_LAYERS = {
    (1, 1, None, None): [[0, 1, 2, 3]],
    (2, 1, None, None): [[0, 1], [2, 3]],
    (2, 2, None, None): [[0, 2], [1, 3]],
    (2, 1, 1, None): [[0], [1, 2, 3]],
    (3, 1, None, 2): [[0], [1], [2, 3]],
    (4, 1, None, None): [[0], [1], [2], [3]],
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
    "qwen2_moe": make_mixture(num_experts=8, shared_ffn_size=24, moe_ffn_size=16),
    "deepseek_v3": make_deepseek(shared_ffn_size=24, moe_ffn_size=16),
    "deepseek_v2": make_deepseek(
        family="deepseek_v2",
        moe_ffn_size=16,
        shared_ffn_size=16,
        router_bias=False,
        mla=LatentAttention(
            q_lora_rank=None, kv_lora_rank=6, nope_head_dim=4, rope_head_dim=2, v_head_dim=2
        ),
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


def _check_transfer(
    spec: ModelSpec,
    layout: TrainerLayout,
    stages: list,
    to: GeneratorLayout,
    policy: PlanPolicy = SMALL,
) -> None:
    whole = hf_tensors(spec)
    ranks = megatron_tensors(spec, whole, layout, stages, padding=-1)
    world, size = layout.world_size, to.ranks_per_replica
    source = megatron_side(spec, layout, dtype="int32")
    target = vllm_side(spec, to, first_rank=world, dtype="int32")
    expected = {
        world + i: vllm_tensors(spec, whole, to.tp, i % size, ep=to.ep, pp=to.pp)
        for i in range(to.world_size)
    }
    ranks |= {rank: _poisoned(tensors) for rank, tensors in expected.items()}
    further = range(spec.num_layers, spec.num_layers + spec.num_mtp_layers)
    unread = tuple(f"model.layers.{layer}." for layer in further)
    execute(plan(source, target, dataclasses.replace(policy, unread=unread)), ranks)
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
    target = megatron_side(spec, layout, te=fused, dtype="int32")
    ranks = {rank: _poisoned(tensors) for rank, tensors in expected.items()}
    execute(plan(hf_side(spec, 999, "int32"), target, SMALL), {**ranks, 999: whole})
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
    _check_transfer(
        MODELS[model], layout, STAGES[stages], GeneratorLayout(tp=generator_tp, replicas=2)
    )


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
    _check_transfer(MIXTURES[model], layout, stages, GeneratorLayout(tp=generator_tp, replicas=2))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model", MIXTURES)
def test_megatron_manifest_places_experts_where_the_oracle_does(model: str, fused: bool) -> None:
    layout = TrainerLayout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True, vocab_divisor=16)
    whole = hf_tensors(MIXTURES[model])
    ranks = megatron_tensors(MIXTURES[model], whole, layout, [[*range(6)]], fused_norms=fused)
    target = megatron_side(MIXTURES[model], layout, te=fused, dtype="int32")
    got = {rank: _poisoned(tensors) for rank, tensors in ranks.items()}
    execute(plan(hf_side(MIXTURES[model], 9, "int32"), target, SMALL), {**got, 9: whole})
    for rank, tensors in ranks.items():
        _assert_equal(got[rank], tensors, POISON)


@pytest.mark.parametrize("stages", STAGES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_transfer_equals_the_oracle_over_pipelines(model: str, stages: tuple) -> None:
    _check_transfer(
        MODELS[model], _make_layout(2, stages, dp=2), STAGES[stages], GeneratorLayout(tp=4)
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("generator_tp", [1, 2, 4, 8])
def test_transfer_equals_the_oracle_over_key_value_heads(
    kv_heads: int, tp: int, generator_tp: int
) -> None:
    spec = make_spec(num_kv_heads=kv_heads, num_layers=1, qkv_bias=True)
    _check_transfer(
        spec, _make_layout(tp, (1, 1, None, None)), [[0]], GeneratorLayout(tp=generator_tp)
    )


def _draw_model(draw: Draw, tp: int, generator_tp: int) -> ModelSpec:
    """Draw a model that both sides can divide."""
    both = math.lcm(tp, generator_tp)
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", *MIXTURES]), "family")
    heads = both * draw(st.integers(1, 2), "heads")
    fits = [g for g in range(1, heads + 1) if heads % g == 0 and _divides(g, tp, generator_tp)]
    changes: dict = {
        "num_heads": heads,
        "num_kv_heads": draw(st.sampled_from(fits), "kv heads"),
        "head_dim": draw(st.sampled_from([4, 6]), "head dim"),
        "vocab_size": draw(st.integers(2, 150), "vocab"),
        "hidden_size": draw(st.integers(1, 9), "hidden"),
        "ffn_size": both * draw(st.integers(1, 5), "ffn"),
        "tied_embeddings": draw(st.booleans(), "tied"),
    }
    if family in MIXTURES:
        changes |= {
            "num_experts": max(4, generator_tp),
            "moe_ffn_size": both * draw(st.integers(1, 3), "expert ffn"),
        }
    if family in ("qwen2_moe", "deepseek_v2", "deepseek_v3"):
        changes["shared_ffn_size"] = both * draw(st.integers(1, 3), "shared ffn")
    if family.startswith("deepseek"):
        changes |= {
            "num_kv_heads": heads,
            "head_dim": 6,
            "hidden_size": tp * draw(st.integers(1, 3), "hidden by tp"),
            "num_mtp_layers": draw(st.integers(0, 1), "mtp layers"),
            "first_dense_layers": draw(st.integers(0, 2), "dense layers"),
        }
    base = {**MODELS, **MIXTURES}.get(family, MODELS["untied"])
    return dataclasses.replace(base, num_layers=4, **changes)


def _divides(groups: int, *sizes: int) -> bool:
    return all(groups % size == 0 or size % groups == 0 for size in sizes)


@settings(max_examples=DRAWS, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_any_transfer_equals_the_oracle(data: st.DataObject) -> None:
    draw = data.draw
    tp = draw(st.sampled_from([1, 2, 4]), "tp")
    generator_tp = draw(st.sampled_from([1, 2, 4, 8]), "generator tp")
    spec = _draw_model(draw, tp, generator_tp)
    assume((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim % tp == 0)
    stages = draw(st.sampled_from(list(FOUR_LAYERS)), "stages")
    dp, cp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1)]), "dp and cp")
    experts = spec.num_experts > 0
    layout = dataclasses.replace(
        _make_layout(tp, stages, dp, cp),
        vocab_divisor=draw(st.sampled_from([1, 8, 128]), "divisor"),
        sequence_parallel=experts and tp > 1,
        ep=draw(st.sampled_from([1, dp * cp if dp * cp < 3 else 1]), "ep") if experts else 1,
        etp=draw(st.sampled_from([1, tp]), "etp") if experts else 1,
    )
    to = GeneratorLayout(
        tp=generator_tp,
        pp=draw(st.sampled_from([1, 1, 2, 4]), "generator pp"),
        ep=experts and draw(st.booleans(), "generator ep"),
        replicas=draw(st.integers(1, 3), "replicas"),
    )
    policy = PlanPolicy(
        forwarding=draw(st.sampled_from(Forwarding), "forwarding"),
        forward_bytes=64,
        alone_bytes=draw(st.sampled_from([1, 300, 1 << 20]), "alone"),
        message_bytes=draw(st.sampled_from([200, 5000, 5000]), "message"),
    )
    _check_transfer(spec, layout, FOUR_LAYERS[stages], to, policy)


@pytest.mark.parametrize(
    ("divided", "stages"),
    [
        ({"pp": 2, "pipeline_layout": "Et*2|t*4L"}, [[0, 1], [2, 3, 4, 5]]),
        ({"pp": 2, "vpp": 2, "pipeline_layout": "Et|tt|tt,|tL"}, [[0, 3, 4], [1, 2, 5]]),
        ({"pp": 3, "pipeline_layout": "E|(t)*6|L"}, [[], [0, 1, 2, 3, 4, 5], []]),
        (
            {"pp": 4, "account_for_embedding": True, "account_for_loss": True},
            [[0], [1, 2], [3, 4], [5]],
        ),
        (
            {"pp": 2, "vpp": 2, "account_for_embedding": True, "account_for_loss": True},
            [[0, 3, 4], [1, 2, 5]],
        ),
    ],
    ids=str,
)
def test_transfer_equals_the_oracle_over_custom_pipelines(divided: dict, stages: list) -> None:
    layout = TrainerLayout(**divided, tp=2, vocab_divisor=16)
    _check_transfer(MODELS["tied"], layout, stages, GeneratorLayout(tp=4))


@pytest.mark.parametrize("model", [*MODELS, *MIXTURES])
def test_a_generator_can_be_read_back_into_a_checkpoint(model: str) -> None:
    spec = {**MODELS, **MIXTURES}[model]
    whole = hf_tensors(spec)
    ranks = {rank: vllm_tensors(spec, whole, 4, rank) for rank in range(4)}
    ranks[9] = _poisoned(whole)
    source = vllm_side(spec, GeneratorLayout(tp=4), dtype="int32")
    execute(plan(source, hf_side(spec, 9, "int32"), SMALL), ranks)
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
