"""Megatron-LM's arguments and config.json of a model: the same sizes both ways, exact refusals."""

import argparse
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from megatron.core.transformer import MLATransformerConfig
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_bridge.errors import ConversionError
from megatron_bridge.models.arguments import YARN_ROPE, command_line, megatron_arguments
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.models.from_arguments import spec_from_arguments
from megatron_bridge.models.hf_config import hf_config
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.runtime.architecture import transformer_config
from megatron_bridge.spec import ModelSpec
from tests.unit.megatron_bridge.checkpoints import make_deepseek, make_mixture, make_spec

LLAMA3_ROPE = (
    ("factor", 8.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 8192.0),
)
YARN = (
    ("beta_fast", 32.0),
    ("beta_slow", 1.0),
    ("factor", 40.0),
    ("mscale", 0.7),
    ("mscale_all_dim", 0.7),
    ("original_max_position_embeddings", 4096.0),
)
V3 = make_deepseek(norm_eps=1e-6, rope_scaling=YARN)
STEEP = replace(V3, rope_scaling=(("beta_fast", 16.0), *YARN[1:]))
V2 = replace(
    V3,
    family="deepseek_v2",
    norm_topk=False,
    sigmoid_scores=False,
    router_bias=False,
    num_expert_groups=1,
    groups_per_token=1,
    group_score_experts=1,
    shared_ffn_size=24,
    num_mtp_layers=0,
)
SPECS: dict[str, ModelSpec] = {
    "llama": make_spec(rope_scaling=LLAMA3_ROPE, rope_theta=5e5),
    "tied": make_spec(tied_embeddings=True, head_dim=8),
    "multi-head": make_spec(num_kv_heads=8),
    "qwen2": make_spec(family="qwen2", qkv_bias=True),
    "qwen3": make_spec(family="qwen3", qk_norm=True),
    "qwen2_moe": make_mixture(),
    "qwen2_moe normalized": make_mixture(norm_topk=True),
    "qwen3_moe": make_mixture(
        family="qwen3_moe",
        qkv_bias=False,
        qk_norm=True,
        norm_topk=True,
        shared_ffn_size=0,
        shared_switch=False,
    ),
    "mixtral": make_spec(
        family="mixtral",
        num_experts=4,
        experts_per_token=2,
        moe_ffn_size=24,
        norm_topk=True,
    ),
    "deepseek_v2": V2,
    "deepseek_v3": V3,
    "deepseek_v3 steep": STEEP,
    "deepseek_v3 further": replace(V3, num_mtp_layers=1, rope_scaling=()),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@each_spec
def test_a_model_comes_back_from_megatrons_arguments(spec: ModelSpec) -> None:
    assert spec_from_arguments(megatron_arguments(spec)) == spec


@each_spec
def test_transformers_reads_the_written_configuration_as_the_same_model(spec: ModelSpec) -> None:
    config = AutoConfig.for_model(**hf_config(spec))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # in memory transformers stacks the experts of a layer, and knows no further layers
    tensors = canonical_tensors(spec.without_mtp())
    expected = sum(torch.Size(tensor.shape).numel() for tensor in tensors)
    held = [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("bias"))]
    assert sum(tensor.numel() for tensor in held) == expected
    if spec.num_experts == 0:
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        assert shapes == {tensor.name: tensor.shape for tensor in tensors}
    assert config.max_position_embeddings == spec.max_positions
    rope = config.rope_parameters
    assert rope["rope_theta"] == spec.rope_theta
    assert {key: rope[key] for key, _ in spec.rope_scaling} == dict(spec.rope_scaling)


def _megatrons_own(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return fields of `TransformerConfig` as Megatron-LM fills them from its arguments."""
    fill = {item.name for item in fields(MLATransformerConfig)} & arguments.keys()
    made = {name: arguments[name] for name in fill}
    made |= {
        "layernorm_epsilon": arguments["norm_epsilon"],
        "num_moe_experts": arguments.get("num_experts"),
        "gated_linear_unit": arguments["swiglu"],
        "add_bias_linear": arguments["add_bias_linear"],
        "num_query_groups": arguments["num_query_groups"]
        if arguments["group_query_attention"]
        else arguments["num_attention_heads"],
    }
    return made


@each_spec
def test_megatrons_arguments_are_the_configuration_that_the_runtime_builds(
    spec: ModelSpec,
) -> None:
    config = transformer_config(spec.without_mtp(), TrainerLayout(), "bfloat16", recompute=False)
    built = vars(config)
    made = _megatrons_own(megatron_arguments(spec.without_mtp()))
    # Without Transformer Engine experts are modules of their own; initial weights are loaded; the
    # runtime's router chooses groups itself, as every release does and not only those of V3.
    for name in (
        "moe_grouped_gemm",
        "init_method_std",
        "moe_router_num_groups",
        "moe_router_group_topk",
    ):
        made.pop(name, None)
    if spec.mla is None:
        made = {name: value for name, value in made.items() if name in built}
    assert {name: built[name] for name in made} == made


def test_the_command_line_says_the_arguments() -> None:
    arguments = megatron_arguments(V3)
    words = command_line(arguments)
    parser = argparse.ArgumentParser()
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        elif name not in ("moe_layer_freq", *YARN_ROPE):
            parser.add_argument(flag, type=type(value), default=None)
    parser.add_argument("--moe-layer-freq", type=str)
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    parsed = vars(parser.parse_args(words))
    assert parsed["moe_layer_freq"] == "([0]*1+[1]*5)"
    parsed["moe_layer_freq"] = [0] * 1 + [1] * 5
    parsed |= YARN_ROPE  # without flags
    assert parsed == {**arguments, "padded_vocab_size": None}
    assert spec_from_arguments(parsed) == V3
    with pytest.raises(ConversionError, match=r"beta_fast = 16\.0 has no flag"):
        command_line(megatron_arguments(STEEP))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (make_spec(rope_theta=1e4 + 0.5), "rope_theta = 10000.5"),
        (
            make_spec(rope_scaling=(*LLAMA3_ROPE[:2], ("low_freq_factor", 2.0), LLAMA3_ROPE[3])),
            "low_freq_factor = 2.0",
        ),
        (
            replace(V2, num_expert_groups=4, groups_per_token=2),
            "n_group = 4 with topk_group = 2 of a deepseek_v2 model",
        ),
    ],
)
def test_what_megatron_has_no_argument_for_is_named(spec: ModelSpec, words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        megatron_arguments(spec)


LLAMA = megatron_arguments(SPECS["llama"])
MIXTURE = megatron_arguments(SPECS["qwen2_moe"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (LLAMA | {"normalization": "LayerNorm"}, "normalization = 'LayerNorm'"),
        (LLAMA | {"swiglu": False, "squared_relu": True}, "swiglu = False"),
        (LLAMA | {"add_bias_linear": True}, "add_bias_linear = True"),
        (LLAMA | {"position_embedding_type": "yarn"}, "position_embedding_type = 'yarn'"),
        (LLAMA | {"rotary_percent": 0.5}, "rotary_percent = 0.5"),
        (LLAMA | {"rotary_interleaved": True}, "rotary_interleaved = True"),
        (LLAMA | {"apply_layernorm_1p": True}, "apply_layernorm_1p = True"),
        (LLAMA | {"window_size": (128, 0)}, "window_size"),
        (LLAMA | {"attention_output_gate": True}, "attention_output_gate = True"),
        (LLAMA | {"vocab_size": None}, "vocab_size = None"),
        (LLAMA | {"num_layers": "6"}, "num_layers = '6'"),
        (LLAMA | {"add_qkv_bias": True, "qk_layernorm": True}, "qk_layernorm: qk_norm = True"),
        (LLAMA | {"mtp_num_layers": 1}, "mtp_num_layers: num_mtp_layers = 1"),
        (MIXTURE | {"moe_layer_freq": [1, 0] * 3}, "moe_layer_freq"),
        (MIXTURE | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (MIXTURE | {"moe_layer_freq": [0] + [1] * 5}, "moe_layer_freq: first_dense_layers = 1"),
        (MIXTURE | {"moe_router_score_function": "tanh"}, "moe_router_score_function = 'tanh'"),
        (MIXTURE | {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
        (MIXTURE | {"moe_shared_expert_gate": False}, "moe_shared_expert_gate"),
        (MIXTURE | {"moe_router_topk_scaling_factor": 2.0}, "moe_router_topk_scaling_factor"),
        (megatron_arguments(V3) | {"qk_layernorm": False}, "qk_layernorm = False"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_named(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConversionError, match=words):
        spec_from_arguments(arguments)


def test_arguments_of_training_and_absent_ones_are_passed_over() -> None:
    given = {key: value for key, value in LLAMA.items() if value is not None}
    for default in ("group_query_attention", "num_query_groups", "kv_channels", "add_qkv_bias"):
        del given[default]
    spec = spec_from_arguments({**given, "lr": 1e-4, "moe_layer_freq": 1, "rank": 3})
    assert spec == replace(SPECS["llama"], num_kv_heads=8, head_dim=2)
