"""Reading a parsed ``config.json``: its numbers, and groups of them as fields of `ModelSpec`.

Called by `families` only. A value that cannot be honoured is a `ConversionError` that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from megatron_bridge.errors import ConversionError
from megatron_bridge.models.table import REQUIRED, Experts, Family
from megatron_bridge.spec import LatentAttention

Config = Mapping[str, object]
Number = TypeVar("Number", int, float)

_LLAMA3_ROPE_KEYS = (
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
)
_YARN_ROPE_DEFAULTS = {  # None: it must be there
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "original_max_position_embeddings": None,
}


def number(config: Config, key: str, kind: type[Number], default: Number | None = None) -> Number:
    """Return a positive number; ``default`` where the configuration has none."""
    value = config.get(key)
    if value is None:
        value = default
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
        raise ConversionError(f"config.json: {key} is {value!r}, expected a positive number")
    return kind(value)


def count(config: Config, key: str) -> int:
    """Return a number of layers that may be 0, or absent."""
    value = config.get(key)
    if value is None or (type(value) is int and value == 0):
        return 0
    return number(config, key, int)


def refuse(config: Config, family: Family) -> None:
    """Refuse what a family's row does not allow, and attention that is not full.

    Raises:
        ConversionError: names the field, its value and what is supported.
    """
    for key, allowed in (*REQUIRED, *family.required):
        if config.get(key) not in allowed:
            raise ConversionError(
                f"config.json: {key} = {config.get(key)!r} of {config['model_type']!r} is not "
                f"supported, expected {allowed[0]!r}"
            )
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", True) and isinstance(window, int) and window > 0
    if used and isinstance(window, int) and window < number(config, "max_position_embeddings", int):
        raise ConversionError(
            f"config.json: sliding_window = {window} is not supported, expected null"
        )
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - {"full_attention"}:
        raise ConversionError(
            f"config.json: layer_types {sorted(set(kinds))} are not supported, "
            "expected 'full_attention' only"
        )


def rope(config: Config, family: Family) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Return theta and the family's scaling; transformers 5 writes both into ``rope_parameters``."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ConversionError(
            f"config.json: rope parameters are {parameters!r}, expected a mapping"
        )
    theta = number(
        {"rope_theta": config.get("rope_theta"), **parameters},
        "rope_theta",
        float,
        family.rope_theta,
    )
    for key, allowed in (
        ("partial_rotary_factor", (1, None)),
        ("attention_factor", (None,)),
        ("truncate", (True, None)),
    ):
        if parameters.get(key) not in allowed:
            raise ConversionError(
                f"config.json: {key} = {parameters[key]!r} is not supported, "
                f"expected {allowed[0]!r}"
            )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, ()
    if kind != family.rope_type:
        raise ConversionError(
            f"config.json: rope_type {kind!r} is not supported, expected 'default' or "
            f"{family.rope_type!r}"
        )
    if kind == "yarn":
        pairs = _YARN_ROPE_DEFAULTS.items()
        return theta, tuple((key, number(parameters, key, float, value)) for key, value in pairs)
    return theta, tuple((key, number(parameters, key, float)) for key in _LLAMA3_ROPE_KEYS)


def latent_attention(config: Config) -> LatentAttention:
    """Return the sizes of multi-head latent attention, which has as many key as query heads."""
    heads = number(config, "num_attention_heads", int)
    kv_heads = number(config, "num_key_value_heads", int, heads)
    if kv_heads != heads:
        raise ConversionError(
            f"config.json: num_key_value_heads {kv_heads} with latent attention is not "
            f"supported, expected num_attention_heads {heads}"
        )
    q_rank = config.get("q_lora_rank")
    return LatentAttention(
        q_lora_rank=None if q_rank is None else number(config, "q_lora_rank", int),
        kv_lora_rank=number(config, "kv_lora_rank", int),
        nope_head_dim=number(config, "qk_nope_head_dim", int),
        rope_head_dim=number(config, "qk_rope_head_dim", int),
        v_head_dim=number(config, "v_head_dim", int),
    )


def mixture(config: Config, experts: Experts) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that a dense model leaves alone."""
    keys = ("num_experts", "n_routed_experts", "num_local_experts")  # the last: transformers 5
    key = next((key for key in keys if key in config), keys[-1])
    num_experts = number(config, key, int)
    chosen = number(config, "num_experts_per_tok", int)
    norm_topk = experts.norm_topk
    if norm_topk is None:
        norm_topk = bool(config.get("norm_topk_prob", False))
    # A single expert of normalized weight has weight 1: its router could not learn.
    if chosen > num_experts or (chosen == 1 and norm_topk):
        raise ConversionError(
            f"config.json: num_experts_per_tok = {chosen} of {num_experts} experts is not "
            f"supported, expected {2 if norm_topk else 1}..{num_experts}"
        )
    ffn_size = number(config, experts.ffn_key, int)
    fields: dict[str, Any] = {
        "num_experts": num_experts,
        "experts_per_token": chosen,
        "moe_ffn_size": ffn_size,
        "norm_topk": norm_topk,
        "sigmoid_scores": experts.sigmoid_scores,
        "router_bias": experts.router_bias,
        "first_dense_layers": count(config, "first_k_dense_replace"),
        "routed_scale": number(config, "routed_scaling_factor", float, 1.0),
        **_groups(config, experts, num_experts, chosen),
    }
    if experts.shared:
        shared_key = experts.shared.ffn_key
        fields["shared_switch"] = experts.shared.switch is not None
        fields["shared_ffn_size"] = (
            number(config, shared_key, int)
            if shared_key
            else number(config, "n_shared_experts", int) * ffn_size
        )
    return fields


def _groups(config: Config, experts: Experts, num_experts: int, chosen: int) -> dict[str, int]:
    """Return what limits the choice of a token's experts to some groups of them."""
    groups = number(config, "n_group", int, 1)
    best = number(config, "topk_group", int, 1)
    if config.get("topk_method") == "greedy" and groups > 1:
        raise ConversionError(
            f"config.json: n_group = {groups} with topk_method 'greedy' is not supported, "
            "expected 1 (engines disagree on it)"
        )
    size = num_experts // groups
    if num_experts % groups or best > groups or size < experts.group_score_experts:
        raise ConversionError(
            f"config.json: n_group = {groups} and topk_group = {best} do not divide "
            f"{num_experts} experts into groups of {experts.group_score_experts} or more"
        )
    if chosen > best * size:
        raise ConversionError(
            f"config.json: num_experts_per_tok = {chosen} is more than the {best * size} experts "
            f"of topk_group = {best} groups"
        )
    return {
        "num_expert_groups": groups,
        "groups_per_token": best,
        "group_score_experts": experts.group_score_experts,
    }
