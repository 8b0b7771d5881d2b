"""Reading config.json: equal to transformers' own models, and exact refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_bridge.errors import ConversionError, PlanError
from megatron_bridge.models.checks import check_generator_layout, check_layout
from megatron_bridge.models.families import (
    canonical_tensors,
    load_spec,
    spec_from_hf,
)
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from tests.unit.megatron_bridge.checkpoints import make_spec

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", **SIZES}
MIXTURE: dict = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
V2: dict = {
    **LATENT,
    "n_shared_experts": 2,
    "routed_scaling_factor": 3.0,
    "scoring_func": "softmax",
}
V3: dict = {
    **LATENT,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
GROUPED: dict = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
EXPERTS: dict = {"family": "mixtral", "num_experts": 4, "experts_per_token": 2, "moe_ffn_size": 6}


def _as_dict(config: PretrainedConfig) -> dict:
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=False),
        LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=16),
        MistralConfig(**SIZES, sliding_window=None),
        Qwen2Config(**SIZES, tie_word_embeddings=True),
        Qwen3Config(**SIZES, head_dim=16),
    ],
    ids=lambda config: config.model_type,
)
def test_canonical_tensors_are_those_of_transformers(config: PretrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    spec = spec_from_hf(_as_dict(config))
    assert {item.name: item.shape for item in canonical_tensors(spec)} == shapes


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**SIZES, **MIXTURE, head_dim=16, norm_topk_prob=True),
        MixtralConfig(**SIZES, num_local_experts=3, sliding_window=None),
        Qwen2MoeConfig(**SIZES, **MIXTURE, shared_expert_intermediate_size=40, norm_topk_prob=True),
        DeepseekV2Config(**{**SIZES, **V2}),
        DeepseekV2Config(**{**SIZES, **V2, **GROUPED, "q_lora_rank": None}),
        DeepseekV3Config(**{**SIZES, **V3, "num_nextn_predict_layers": 0}),
    ],
    ids=lambda config: config.model_type,
)
def test_canonical_tensors_of_experts_are_those_that_transformers_saves(
    config: Any, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)  # in memory the experts are stacked
    shapes = {k: tuple(v.shape) for k, v in load_file(tmp_path / "model.safetensors").items()}
    spec = load_spec(tmp_path)
    assert {item.name: item.shape for item in canonical_tensors(spec)} == shapes
    kept = {item.name for item in canonical_tensors(spec) if item.dtype == "float32"}
    assert kept == {name for name in shapes if name.endswith("e_score_correction_bias")}
    assert spec.norm_topk == (config.model_type != "deepseek_v2")
    assert spec.rope_theta == config.rope_parameters["rope_theta"]


def test_experts_are_read_from_the_new_and_the_old_keys() -> None:
    old = spec_from_hf({**LLAMA, "model_type": "qwen3_moe", **MIXTURE})
    new = {**MIXTURE, "num_local_experts": 4}
    del new["num_experts"]
    assert spec_from_hf({**LLAMA, "model_type": "qwen3_moe", **new}) == old
    assert (old.num_experts, old.experts_per_token, old.moe_ffn_size) == (4, 2, 24)
    assert not old.norm_topk


def test_rope_is_read_from_the_new_and_the_old_keys() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    new = spec_from_hf({**LLAMA, "rope_parameters": {"rope_theta": 5e5, **scaling}})
    old = spec_from_hf({**LLAMA, "rope_theta": 500000, "rope_scaling": scaling})
    assert new == old
    assert new.rope_theta == 5e5
    assert dict(new.rope_scaling) == {k: v for k, v in scaling.items() if k != "rope_type"}
    plain = spec_from_hf({**LLAMA, "rope_theta": 1e6, "rope_scaling": None})
    assert (plain.rope_theta, plain.rope_scaling) == (1e6, ())
    assert spec_from_hf(LLAMA).rope_theta == LlamaConfig().rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' of 'llama'"),
        ({"attention_bias": True}, "attention_bias = True of 'llama'"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias = True of 'qwen3'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mistral", "sliding_window": 32}, "sliding_window = 32"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32},
            "sliding_window = 32",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor is None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": "96"}, "vocab_size is '96'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ({"model_type": "qwen3_moe"}, "num_local_experts is None"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1},
            r"num_experts_per_tok = 1 of 2 experts is not supported, expected 2\.\.2",
        ),
        (
            {"model_type": "qwen3_moe", **MIXTURE, "num_experts_per_tok": 5},
            r"num_experts_per_tok = 5 of 4 experts is not supported, expected 1\.\.4",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(change: dict, words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        spec_from_hf({**LLAMA, **change})


def test_a_window_that_is_switched_off_is_accepted() -> None:
    spec_from_hf(
        {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32}
    )
    spec_from_hf({**LLAMA, "model_type": "mistral", "sliding_window": 64})


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="nowhere does not exist"):
        load_spec(tmp_path / "nowhere")
    with pytest.raises(ConversionError, match=r"has no config\.json"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConversionError, match="is not JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    with pytest.raises(ConversionError, match=f"{tmp_path}.*model_type 'x'"):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ({"tp": 3}, {}, "tp 3 does not divide the model's 8 attention heads"),
        (
            {"tp": 4},
            {"num_heads": 24, "num_kv_heads": 6},
            "tp 4 is neither a divisor nor a multiple",
        ),
        ({"tp": 8}, {"ffn_size": 20}, "tp 8 does not divide the model's ffn size 20"),
        ({"tp": 8}, {"head_dim": 1}, "tp 8 does not divide the 12 fused"),
        ({"ep": 2}, {}, "a llama model has no experts"),
        ({"dp": 3, "ep": 3}, EXPERTS, "ep 3 does not divide the model's 4 experts and dp x cp = 3"),
        ({"dp": 3, "ep": 2}, EXPERTS, "ep 2 does not divide the model's 4 experts and dp x cp = 3"),
        ({"tp": 4, "etp": 2}, EXPERTS, "etp 2 is neither 1 nor trainer tp 4"),
        ({"tp": 4, "etp": 4}, EXPERTS, "etp 4 does not divide the model's expert ffn size 6"),
        ({"tp": 2}, EXPERTS, "a mixture of experts with trainer tp 2 needs sequence_parallel"),
        ({"sequence_parallel": True}, {}, "sequence parallelism needs trainer tp > 1"),
        ({"pp": 4}, {}, "6 layers do not divide over 4 stages"),
        ({"pp": 8}, {}, "6 layers"),
        ({"pp": 2, "vpp": 2}, {}, "vpp 2 does not divide the 3 layers of pipeline stage 0"),
        ({"vpp": 2}, {}, "vpp 2 needs pp > 1"),
        ({"num_layers_in_first_stage": 6}, {}, "needs pp > 1"),
        ({"pp": 3, "num_layers_in_first_stage": 0}, {}, "num_layers_in_first_stage 0"),
        (
            {"pp": 2, "num_layers_in_first_stage": 2, "num_layers_in_last_stage": 3},
            {},
            "leave 1 layers",
        ),
    ],
)
def test_a_trainer_layout_that_does_not_fit_is_refused(
    layout: dict, changes: dict, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        check_layout(make_spec(**changes), TrainerLayout(**layout))


def test_a_generator_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="generator tp 3 does not divide the model's 8"):
        check_generator_layout(make_spec(), GeneratorLayout(tp=3))
    with pytest.raises(PlanError, match="generator tp 4 is neither"):
        check_generator_layout(make_spec(num_heads=24, num_kv_heads=6), GeneratorLayout(tp=4))
    spec = make_spec(num_heads=12, num_kv_heads=3)
    with pytest.raises(PlanError, match="padded vocabulary of 128 rows"):
        check_generator_layout(spec, GeneratorLayout(tp=3))
    check_generator_layout(make_spec(num_kv_heads=1), GeneratorLayout(tp=8, replicas=3))
