"""Mixtures with shared experts and latent attention: published sizes, and exact refusals."""

from math import prod

import pytest

from megatron_bridge.errors import ConversionError
from megatron_bridge.models.families import canonical_tensors, mtp_aliases, spec_from_hf
from megatron_bridge.spec import ModelSpec, Part
from tests.unit.megatron_bridge.checkpoints import (
    hf_tensors,
    make_deepseek,
    make_mixture,
    make_spec,
)
from tests.unit.megatron_bridge.test_models import GROUPED, SIZES, V2, V3

DEEPSEEK: dict = {"model_type": "deepseek_v3", **SIZES, **V3}
YARN: dict = {
    "type": "yarn",
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
LLAMA_405B: dict = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
QWEN3_235B: dict = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}
QWEN15_MOE: dict = {
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 8192,
}
_LATENT: dict = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
DEEPSEEK_V2: dict = {
    **_LATENT,
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 16.0,
}
DEEPSEEK_V2_LITE: dict = {
    **DEEPSEEK_V2,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
DEEPSEEK_V3: dict = {
    **_LATENT,
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}


def _billions(spec: ModelSpec) -> float:
    return sum(prod(item.shape) for item in canonical_tensors(spec)) / 1e9


@pytest.mark.parametrize(
    ("config", "billions", "digits"),
    [
        (LLAMA_405B, 405.85, 2),
        (QWEN3_235B, 235.09, 2),
        (QWEN15_MOE, 14.3, 1),
        (DEEPSEEK_V2_LITE, 15.7, 1),
        (DEEPSEEK_V2, 235.7, 1),
        (DEEPSEEK_V3, 671.03, 2),
    ],
    ids=["llama-405b", "qwen3-235b", "qwen1.5-moe", "v2-lite", "v2", "v3"],
)
def test_parameters_are_as_many_as_published(config: dict, billions: float, digits: int) -> None:
    assert round(_billions(spec_from_hf(config).without_mtp()), digits) == billions


def test_the_hub_counts_the_mtp_layer_of_deepseek_v3_and_what_it_repeats() -> None:
    spec = spec_from_hf(DEEPSEEK_V3)
    shapes = {item.name: item.shape for item in canonical_tensors(spec)}
    repeated = sum(prod(shapes[name]) for name in mtp_aliases(spec).values()) / 1e9
    # its safetensors index: 684,531,386,000 elements, less the scales of its FP8 blocks
    assert round(_billions(spec) + repeated, 1) == 684.5
    layer = [item for item in canonical_tensors(spec) if item.layer == 61]
    assert {item.name.split(".", 3)[3] for item in layer if item.part.name.startswith("MTP")} == {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
    }
    assert {item.expert for item in layer} == {None, *range(256)}


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(qkv_bias=True, qk_norm=True, family="qwen3"),
        make_mixture(tied_embeddings=True),
        make_deepseek(num_mtp_layers=2),
        make_deepseek(family="deepseek_v2", router_bias=False, first_dense_layers=2),
    ],
    ids=["dense", "qwen2_moe", "v3", "v2"],
)
def test_canonical_tensors_are_those_of_the_dense_oracle(spec: ModelSpec) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in hf_tensors(spec).items()}
    assert {item.name: item.shape for item in canonical_tensors(spec)} == shapes


def test_a_layer_has_each_part_once_and_each_part_of_an_expert_once() -> None:
    for spec in (make_mixture(), make_deepseek(num_mtp_layers=1)):
        places = [(item.layer, item.expert, item.part) for item in canonical_tensors(spec)]
        assert len(places) == len(set(places))


def test_sizes_of_deepseek_are_read() -> None:
    spec = spec_from_hf({**DEEPSEEK, "rope_scaling": YARN, "num_nextn_predict_layers": 1})
    assert spec.mla is not None
    assert (spec.mla.q_lora_rank, spec.mla.kv_lora_rank, spec.head_dim) == (12, 20, 12)
    assert (spec.first_dense_layers, spec.num_mtp_layers, spec.shared_ffn_size) == (1, 1, 24)
    groups = (spec.num_expert_groups, spec.groups_per_token, spec.group_score_experts)
    assert groups == (4, 2, 2)
    assert (spec.router_bias, spec.sigmoid_scores, spec.norm_topk) == (True, True, True)
    scaling = dict(spec.rope_scaling)
    assert scaling["beta_fast"] == 32
    assert (scaling["factor"], scaling["mscale"], scaling["mscale_all_dim"]) == (40, 0.707, 1)
    older = spec_from_hf({"model_type": "deepseek_v2", **SIZES, **V2, "q_lora_rank": None})
    assert older.mla is not None
    assert older.mla.q_lora_rank is None
    assert (older.shared_ffn_size, older.routed_scale, older.router_bias) == (48, 3.0, False)
    assert Part.MLA_Q in {item.part for item in canonical_tensors(older)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scoring_func": None}, "scoring_func = None of 'deepseek_v3' .* expected 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' .* expected 'noaux_tc'"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 with latent attention"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None"),
        ({"n_routed_experts": None}, "n_routed_experts is None"),
        ({"n_shared_experts": None}, "n_shared_experts is None"),
        ({"n_group": 3}, "n_group = 3 and topk_group = 2 do not divide 8"),
        ({"n_group": 8}, "into groups of 2 or more"),
        ({"topk_group": 5}, "topk_group = 5"),
        ({"topk_group": 1}, "num_experts_per_tok = 4 is more than the 2 experts"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace = 2 leaves none"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"rope_scaling": {**YARN, "mscale": None}}, "mscale is None"),
        ({"rope_scaling": {**YARN, "type": "llama3"}}, "rope_type 'llama3' .* 'yarn'"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor = 1.0"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate = False"),
    ],
)
def test_what_cannot_be_honoured_of_deepseek_is_named(change: dict, words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        spec_from_hf({**DEEPSEEK, **change})


def test_engines_disagree_on_greedy_choice_among_groups() -> None:
    config = {"model_type": "deepseek_v2", **SIZES, **V2, **GROUPED}
    assert spec_from_hf(config).num_expert_groups == 4
    with pytest.raises(ConversionError, match="n_group = 4 with topk_method 'greedy'"):
        spec_from_hf({**config, "topk_method": "greedy"})
