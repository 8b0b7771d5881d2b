"""A ``config.json`` from a model's sizes: the way back of `families.spec_from_hf`.

Called by what writes a Hugging Face folder where no such file travels with the weights: from
Megatron's arguments (`arguments`) or from Meta's own checkpoints.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_bridge.errors import ConversionError
from megatron_bridge.models.families import spec_from_hf
from megatron_bridge.models.table import FAMILIES, Experts
from megatron_bridge.spec import LatentAttention, ModelSpec

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_EXPERT_COUNTS = {
    "mixtral": "num_local_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}  # others: "num_experts"


def hf_config(spec: ModelSpec, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the parsed ``config.json`` of a model; `spec_from_hf` reads the same sizes from it.

    Raises:
        ConversionError: names the field that no model of this family has.
    """
    family = FAMILIES[spec.family]
    config: dict[str, Any] = {
        **{key: allowed[0] for key, allowed in family.required},
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "hidden_act": "silu",
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "initializer_range": spec.initializer_range,
        **({"head_dim": spec.head_dim} if spec.mla is None else _latent(spec.mla)),
        **_rope(spec, family.rope_type),
        **(_mixture(spec, family.experts) if family.experts else {}),
        "torch_dtype": dtype,
    }
    _check(spec, config)
    return config


def _rope(spec: ModelSpec, kind: str) -> dict[str, Any]:
    if not spec.rope_scaling:
        return {"rope_theta": spec.rope_theta, "rope_scaling": None}
    scaling: dict[str, Any] = dict(spec.rope_scaling)
    positions = "original_max_position_embeddings"
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": {"rope_type": kind, **scaling, positions: int(scaling[positions])},
    }


def _latent(mla: LatentAttention) -> dict[str, Any]:
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope_head_dim,
        "qk_rope_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }


def _mixture(spec: ModelSpec, experts: Experts) -> dict[str, Any]:
    config: dict[str, Any] = {
        _EXPERT_COUNTS.get(spec.family, "num_experts"): spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        experts.ffn_key: spec.moe_ffn_size,
    }
    if experts.norm_topk is None:
        config["norm_topk_prob"] = spec.norm_topk
    if experts.shared and experts.shared.ffn_key:
        config[experts.shared.ffn_key] = spec.shared_ffn_size
    if spec.mla:
        config |= {
            "first_k_dense_replace": spec.first_dense_layers,
            "n_shared_experts": spec.shared_ffn_size // max(spec.moe_ffn_size, 1),
            "routed_scaling_factor": spec.routed_scale,
            "n_group": spec.num_expert_groups,
            "topk_group": spec.groups_per_token,
            "num_nextn_predict_layers": spec.num_mtp_layers,
        }
        if spec.num_expert_groups > 1 and not experts.sigmoid_scores:
            config["topk_method"] = "group_limited_greedy"
    return config


def differing_field(first: ModelSpec, second: ModelSpec) -> str | None:
    """Return the name of the first field in which two specs differ."""
    names = (item.name for item in fields(ModelSpec))
    return next((name for name in names if getattr(first, name) != getattr(second, name)), None)


def _check(spec: ModelSpec, config: dict[str, Any]) -> None:
    again = spec_from_hf(config)
    name = differing_field(spec, again)
    if name:
        raise ConversionError(
            f"{name} = {getattr(spec, name)!r} is not supported of a {spec.family} model, "
            f"expected {getattr(again, name)!r}"
        )
