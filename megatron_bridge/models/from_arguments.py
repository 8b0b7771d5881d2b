"""A `ModelSpec` from Megatron-LM's arguments: the way back of `arguments`.

Called by what reads Megatron's checkpoints, which store them as ``args``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from megatron_bridge.errors import ConversionError
from megatron_bridge.models.arguments import ALWAYS, LLAMA3_ROPE, YARN_ROPE
from megatron_bridge.models.hf_config import hf_config
from megatron_bridge.models.table import FAMILIES
from megatron_bridge.spec import LatentAttention, ModelSpec

Arguments = Mapping[str, Any]
Number = TypeVar("Number", int, float)

# What no model here has, with the values beside None that say so.
_NEVER: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("rotary_percent", (1.0,)),
    ("rotary_interleaved", (False,)),
    ("rotary_seq_len_interpolation_factor", (1,)),
    ("apply_layernorm_1p", (False,)),
    ("apply_residual_connection_post_layernorm", (False,)),
    ("squared_relu", (False,)),
    ("quick_geglu", (False,)),
    ("glu_linear_offset", (0.0,)),
    ("activation_func_clamp_value", ()),
    ("attention_output_gate", (False,)),
    ("softmax_type", ("vanilla",)),
    ("softmax_scale", ()),
    ("window_size", ()),
    ("no_rope_freq", ()),
    ("experimental_attention_variant", ()),
    ("linear_attention_freq", ()),
    ("heterogeneous_layers_config_path", ()),
    ("hybrid_override_pattern", ()),
    ("is_hybrid_model", (False,)),
    ("moe_latent_size", ()),
    ("moe_apply_probs_on_input", (False,)),
    ("moe_router_topk_limited_devices", ()),
)
# Where a field that no supported family has comes from.
_SAID_BY = {
    "ffn_size": "ffn_hidden_size",
    "first_dense_layers": "moe_layer_freq",
    "group_score_experts": "moe_router_group_topk",
    "head_dim": "kv_channels",
    "norm_eps": "norm_epsilon",
    "norm_topk": "moe_router_pre_softmax",
    "num_expert_groups": "moe_router_num_groups",
    "num_mtp_layers": "mtp_num_layers",
    "qk_norm": "qk_layernorm",
    "qkv_bias": "add_qkv_bias",
    "routed_scale": "moe_router_topk_scaling_factor",
    "router_bias": "moe_router_enable_expert_bias",
    "shared_ffn_size": "moe_shared_expert_intermediate_size",
    "shared_switch": "moe_shared_expert_gate",
    "sigmoid_scores": "moe_router_score_function",
}


def spec_from_arguments(arguments: Arguments) -> ModelSpec:
    """Return the sizes of the model that Megatron-LM builds from its arguments.

    Those of training, and whatever else does not change the model, are not read.

    Raises:
        ConversionError: names an argument that is missing, or whose value cannot be honoured.
    """
    _refuse(arguments)
    heads = _number(arguments, "num_attention_heads", int)
    grouped = bool(arguments.get("group_query_attention"))
    mla = _latent(arguments) if arguments.get("multi_latent_attention") else None
    hidden_size = _number(arguments, "hidden_size", int)
    sizes: dict[str, Any] = {
        "vocab_size": _number(arguments, "vocab_size", int),
        "hidden_size": hidden_size,
        "ffn_size": _number(arguments, "ffn_hidden_size", int),
        "num_layers": _number(arguments, "num_layers", int),
        "num_heads": heads,
        "num_kv_heads": _number(arguments, "num_query_groups", int) if grouped else heads,
        "head_dim": (
            mla.nope_head_dim + mla.rope_head_dim
            if mla
            else _number(arguments, "kv_channels", int, hidden_size // heads)
        ),
        "norm_eps": _number(arguments, "norm_epsilon", float, 1e-5),
        "rope_theta": _number(arguments, "rotary_base", float, 10000),
        "max_positions": _number(arguments, "max_position_embeddings", int),
        "tied_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
        "initializer_range": _number(arguments, "init_method_std", float, 0.02),
        "qkv_bias": bool(arguments.get("add_qkv_bias")),
        "qk_norm": bool(arguments.get("qk_layernorm")) and mla is None,
        "rope_scaling": _yarn(arguments) if mla else _llama3_rope(arguments),
        "mla": mla,
        "num_mtp_layers": arguments.get("mtp_num_layers") or 0,
    }
    if mla and not arguments.get("qk_layernorm"):
        raise _unsupported("qk_layernorm", False, True)
    if arguments.get("num_experts"):
        sizes |= _mixture(arguments, sizes["num_layers"])
    spec = ModelSpec(family=_family(sizes), **_with_group_scores(sizes))
    try:
        hf_config(spec)
    except ConversionError as error:
        field = str(error).split(" ", 1)[0]
        said = f"{_SAID_BY[field]}: " if field in _SAID_BY else ""
        raise ConversionError(f"Megatron's arguments: {said}{error}") from error
    return spec


def _unsupported(name: str, got: object, expected: object) -> ConversionError:
    return ConversionError(
        f"Megatron's arguments: {name} = {got!r} is not supported, expected {expected!r}"
    )


def _refuse(arguments: Arguments) -> None:
    for name, expected in ALWAYS:
        if arguments.get(name) != expected:
            raise _unsupported(name, arguments.get(name), expected)
    for name, allowed in _NEVER:
        value = arguments.get(name)
        if value is not None and value not in allowed:
            raise _unsupported(name, value, allowed[0] if allowed else None)


def _number(
    arguments: Arguments, name: str, kind: type[Number], default: Number | None = None
) -> Number:
    value = arguments.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise _unsupported(name, value, "a positive number")
    return kind(value)


def _latent(arguments: Arguments) -> LatentAttention:
    rank = arguments.get("q_lora_rank")
    return LatentAttention(
        q_lora_rank=None if rank is None else _number(arguments, "q_lora_rank", int),
        kv_lora_rank=_number(arguments, "kv_lora_rank", int),
        nope_head_dim=_number(arguments, "qk_head_dim", int),
        rope_head_dim=_number(arguments, "qk_pos_emb_head_dim", int),
        v_head_dim=_number(arguments, "v_head_dim", int),
    )


def _llama3_rope(arguments: Arguments) -> tuple[tuple[str, float], ...]:
    if not arguments.get("use_rope_scaling"):
        return ()
    factor = _number(arguments, "rope_scaling_factor", float, 8.0)
    return tuple(sorted({"factor": factor, **LLAMA3_ROPE}.items()))


def _yarn(arguments: Arguments) -> tuple[tuple[str, float], ...]:
    if arguments.get("rope_type") == "rope":
        return ()
    found = {
        "factor": _number(arguments, "rotary_scaling_factor", float),
        "mscale": _number(arguments, "mscale", float),
        "mscale_all_dim": _number(arguments, "mscale_all_dim", float),
        **{name: _number(arguments, name, float, value) for name, value in YARN_ROPE.items()},
    }
    return tuple(sorted(found.items()))


def _mixture(arguments: Arguments, num_layers: int) -> dict[str, Any]:
    score = arguments.get("moe_router_score_function", "softmax")
    if score not in ("softmax", "sigmoid"):
        raise _unsupported("moe_router_score_function", score, "softmax")
    groups = _number(arguments, "moe_router_num_groups", int, 1)
    return {
        "num_experts": _number(arguments, "num_experts", int),
        "experts_per_token": _number(arguments, "moe_router_topk", int, 2),
        "moe_ffn_size": _number(
            arguments, "moe_ffn_hidden_size", int, arguments["ffn_hidden_size"]
        ),
        # scores by a sigmoid are normalized whatever this argument says
        "norm_topk": score == "sigmoid" or not arguments.get("moe_router_pre_softmax"),
        "first_dense_layers": _first_dense_layers(arguments.get("moe_layer_freq", 1), num_layers),
        "shared_ffn_size": arguments.get("moe_shared_expert_intermediate_size") or 0,
        "shared_switch": bool(arguments.get("moe_shared_expert_gate")),
        "sigmoid_scores": score == "sigmoid",
        "router_bias": bool(arguments.get("moe_router_enable_expert_bias")),
        "num_expert_groups": groups,
        "groups_per_token": _number(arguments, "moe_router_group_topk", int, groups),
        "routed_scale": _number(arguments, "moe_router_topk_scaling_factor", float, 1.0),
    }


def _first_dense_layers(pattern: object, num_layers: int) -> int:
    """Return how many layers without experts come first; ``pattern`` as Megatron has it."""
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        pattern = [int(layer % pattern == 0) for layer in range(num_layers)]
    if isinstance(pattern, list) and len(pattern) == num_layers:
        dense = pattern.count(0)
        if pattern == [0] * dense + [1] * (num_layers - dense):
            return dense
    raise _unsupported("moe_layer_freq", pattern, f"some 0, then some 1, {num_layers} in all")


def _family(sizes: Mapping[str, Any]) -> str:
    """Return the family whose models may have these sizes; whether they do, its config.json says."""
    if sizes["mla"]:
        return "deepseek_v3" if sizes.get("sigmoid_scores") else "deepseek_v2"
    if "num_experts" in sizes:
        if sizes["shared_ffn_size"]:
            return "qwen2_moe"
        return "qwen3_moe" if sizes["qk_norm"] else "mixtral"
    return "qwen2" if sizes["qkv_bias"] else "qwen3" if sizes["qk_norm"] else "llama"


def _with_group_scores(sizes: dict[str, Any]) -> dict[str, Any]:
    experts = FAMILIES[_family(sizes)].experts
    if "num_experts" not in sizes or experts is None:
        return sizes
    groups, best = sizes["num_expert_groups"], sizes["groups_per_token"]
    score = sizes["experts_per_token"] // best if groups > best else experts.group_score_experts
    return {**sizes, "group_score_experts": score}
