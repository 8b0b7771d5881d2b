"""A model in the words of Megatron-LM: its command-line arguments, from a `ModelSpec`.

Names are those of the attributes that Megatron-LM parses its command line into and stores with its
checkpoints as ``args``; `from_arguments` reads them back. Called by what writes Megatron's
checkpoints, and by who prints a command line. Megatron-Core's `TransformerConfig`, which
`runtime.architecture` builds, says the same in its own fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_bridge.errors import ConversionError
from megatron_bridge.spec import LatentAttention, ModelSpec

# What Megatron-LM's arguments cannot say: its code takes it for granted.
LLAMA3_ROPE = {
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192.0,
}
# What it reads from its arguments, but has no flags for.
YARN_ROPE = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
# What Megatron-LM must be told of every model here.
ALWAYS: tuple[tuple[str, Any], ...] = (
    ("normalization", "RMSNorm"),
    ("swiglu", True),
    ("add_bias_linear", False),
    ("position_embedding_type", "rope"),
)
_NEGATED = {"add_bias_linear": "--disable-bias-linear"}
_NOT_FLAGS = ("padded_vocab_size",)  # follows from the vocabulary and the layout


def megatron_arguments(
    spec: ModelSpec, *, dtype: str = "bfloat16", padded_vocab_size: int | None = None
) -> dict[str, Any]:
    """Return what Megatron-LM must be told to build the model.

    Args:
        padded_vocab_size: rows of the stored embedding, where it is known.

    Raises:
        ConversionError: names what Megatron-LM has no argument for.
    """
    grouped = spec.num_kv_heads != spec.num_heads
    arguments: dict[str, Any] = {
        **dict(ALWAYS),
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "group_query_attention": grouped,
        "num_query_groups": spec.num_kv_heads if grouped else 1,  # 1: its default, not read
        "kv_channels": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "norm_epsilon": spec.norm_eps,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm or spec.mla is not None,
        "untie_embeddings_and_output_weights": not spec.tied_embeddings,
        "init_method_std": spec.initializer_range,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "rotary_percent": 1.0,
        "rotary_base": _whole_number("rope_theta", spec.rope_theta),
        "vocab_size": spec.vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        **(_mla_arguments(spec, spec.mla) if spec.mla else _llama3_rope_arguments(spec)),
    }
    if spec.num_experts:
        arguments |= _moe_arguments(spec)
    if spec.num_mtp_layers:
        arguments["mtp_num_layers"] = spec.num_mtp_layers
    return arguments


def _whole_number(name: str, value: float) -> int:
    if value != int(value):
        raise ConversionError(
            f"{name} = {value} cannot be said to Megatron-LM: expected an integer"
        )
    return int(value)


def _llama3_rope_arguments(spec: ModelSpec) -> dict[str, Any]:
    if not spec.rope_scaling:
        return {"use_rope_scaling": False}
    scaling = dict(spec.rope_scaling)
    for name, value in LLAMA3_ROPE.items():
        if scaling[name] != value:
            raise ConversionError(
                f"rope_scaling: {name} = {scaling[name]} cannot be said to Megatron-LM, "
                f"which takes {value}"
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": scaling["factor"]}


def _mla_arguments(spec: ModelSpec, mla: LatentAttention) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.nope_head_dim,
        "qk_pos_emb_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }
    if not spec.rope_scaling:
        return {**arguments, "rope_type": "rope"}
    scaling: dict[str, Any] = dict(spec.rope_scaling)
    positions = "original_max_position_embeddings"
    return {
        **arguments,
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.pop("factor"),
        **scaling,
        positions: int(scaling[positions]),
    }


def _moe_arguments(spec: ModelSpec) -> dict[str, Any]:
    grouped = spec.num_expert_groups > 1
    _check_group_scores(spec)
    return {
        "num_experts": spec.num_experts,
        "moe_ffn_hidden_size": spec.moe_ffn_size,
        "moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.num_layers)],
        "moe_router_topk": spec.experts_per_token,
        # softmax over the chosen experts only is the same as normalizing their probabilities
        "moe_router_pre_softmax": not spec.norm_topk,
        "moe_router_score_function": "sigmoid" if spec.sigmoid_scores else "softmax",
        "moe_router_enable_expert_bias": spec.router_bias,
        "moe_router_topk_scaling_factor": spec.routed_scale if spec.routed_scale != 1 else None,
        "moe_router_num_groups": spec.num_expert_groups if grouped else None,
        "moe_router_group_topk": spec.groups_per_token if grouped else None,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": spec.shared_ffn_size or None,
        "moe_shared_expert_gate": spec.shared_switch,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _check_group_scores(spec: ModelSpec) -> None:
    limited = spec.num_expert_groups > spec.groups_per_token
    best = spec.experts_per_token // spec.groups_per_token
    if limited and best != spec.group_score_experts:
        raise ConversionError(
            f"n_group = {spec.num_expert_groups} with topk_group = {spec.groups_per_token} of a "
            f"{spec.family} model cannot be said to Megatron-LM: it scores a group by its best "
            f"{best} experts, the model by its best {spec.group_score_experts}"
        )


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return the words of Megatron-LM's command line that say these arguments.

    Raises:
        ConversionError: names one for which there is no flag.
    """
    words: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if name in YARN_ROPE:
            if value != YARN_ROPE[name]:
                raise ConversionError(
                    f"{name} = {value} has no flag of Megatron-LM, which takes {YARN_ROPE[name]}"
                )
        elif name in _NEGATED:
            words += [] if value else [_NEGATED[name]]
        elif name == "moe_layer_freq" and isinstance(value, list):
            dense = value.count(0)
            words += [flag, f"([0]*{dense}+[1]*{len(value) - dense})"]
        elif value is True:
            words.append(flag)
        elif value is not None and value is not False and name not in _NOT_FLAGS:
            words += [flag, str(value)]
    return words
