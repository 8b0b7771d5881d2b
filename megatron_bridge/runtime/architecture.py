"""What a `ModelSpec` is in Megatron-Core's terms: configuration, layer spec, one model chunk.

Called by `model` only. With Transformer Engine (CUDA) layers are its fused ones; without, they are
Megatron's local ones with our attention (`attention`) and norm, which know packed sequences and
sequence parallelism. Multi-token-prediction layers are not built: training ignores them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_bridge.errors import LayoutError
from megatron_bridge.models.checks import check_layout
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.runtime.attention import PackedAttention
from megatron_bridge.runtime.latent import GroupLimitedRouter, LatentSelfAttention
from megatron_bridge.runtime.pointwise import RmsNorm, swiglu
from megatron_bridge.runtime.setup import acceleration
from megatron_bridge.spec import LatentAttention, ModelSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def uses_te() -> bool:
    """Return whether layers are Transformer Engine's, which fuse norms into linear layers."""
    return acceleration()["transformer_engine"]


def transformer_config(
    spec: ModelSpec, layout: TrainerLayout, dtype: str, recompute: bool
) -> TransformerConfig:
    """Return Megatron's configuration of this model in this layout.

    Raises:
        PlanError: the layout does not divide the model.
        LayoutError: the dtype is unknown, or the model has multi-token-prediction layers
            (`ModelSpec.without_mtp` leaves them out).
    """
    check_layout(spec, layout)
    if spec.mla and not uses_te():
        _check_latent_sizes(spec.mla, layout.tp)
    if spec.num_mtp_layers:
        raise LayoutError(
            f"{spec.num_mtp_layers} multi-token-prediction layers cannot be trained: expected a "
            "spec without them"
        )
    if dtype not in _DTYPES:
        raise LayoutError(f"dtype {dtype!r} of the trainer: expected one of {sorted(_DTYPES)}")
    make_config = MLATransformerConfig if spec.mla else TransformerConfig
    return make_config(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm or spec.mla is not None,  # with MLA: norms of the latents
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=_DTYPES[dtype],
        pipeline_dtype=_DTYPES[dtype],
        bf16=dtype == "bfloat16",
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        **_moe_config(spec),
        **_mla_config(spec),
        **_parallel_config(layout),
        # initialisation also marks the shards, which gradient norms need; zeros draw no numbers
        perform_initialization=True,
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        **_fusion_config(spec),
        persist_layer_norm=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def _fusion_config(spec: ModelSpec) -> dict[str, Any]:
    fast = acceleration()
    return {
        "bias_activation_fusion": fast["cuda"],
        # any function of the whole input; see `build_chunk`
        "use_te_activation_func": not fast["cuda"],
        "apply_rope_fusion": fast["transformer_engine"] and not spec.mla,
        "gradient_accumulation_fusion": fast["transformer_engine"] or fast["apex"],
        "masked_softmax_fusion": False,
    }


def _parallel_config(layout: TrainerLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        # batched messages of both directions would meet where both neighbours are one rank (pp 2)
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "num_layers_in_first_pipeline_stage": layout.num_layers_in_first_stage,
        "num_layers_in_last_pipeline_stage": layout.num_layers_in_last_stage,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding,
        "account_for_loss_in_pipeline_split": layout.account_for_loss,
        "pipeline_model_parallel_layout": layout.pipeline_layout or None,
    }


def _moe_config(spec: ModelSpec) -> dict[str, Any]:
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}  # the default refuses variable lengths
    if not spec.num_experts:
        return dispatcher
    return {
        **dispatcher,
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": spec.moe_ffn_size,
        "moe_router_topk": spec.experts_per_token,
        # softmax over the chosen experts only is the same as normalizing their probabilities
        "moe_router_pre_softmax": not spec.norm_topk,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": uses_te(),
        "moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.num_layers)],
        "moe_shared_expert_intermediate_size": spec.shared_ffn_size or None,
        "moe_shared_expert_gate": spec.shared_switch,
        "moe_router_score_function": "sigmoid" if spec.sigmoid_scores else "softmax",
        "moe_router_topk_scaling_factor": spec.routed_scale if spec.routed_scale != 1 else None,
        "moe_router_enable_expert_bias": spec.router_bias,
        "moe_router_bias_update_rate": 0.0,  # the bias balances pretraining; here it stays
    }


def _mla_config(spec: ModelSpec) -> dict[str, Any]:
    if spec.mla is None:
        return {}
    scaling: dict[str, Any] = dict(spec.rope_scaling)
    if scaling:
        scaling["original_max_position_embeddings"] = int(
            scaling["original_max_position_embeddings"]
        )
    return {
        "q_lora_rank": spec.mla.q_lora_rank,
        "kv_lora_rank": spec.mla.kv_lora_rank,
        "qk_head_dim": spec.mla.nope_head_dim,
        "qk_pos_emb_head_dim": spec.mla.rope_head_dim,
        "v_head_dim": spec.mla.v_head_dim,
        "rope_type": "yarn" if scaling else "rope",
        "rotary_base": spec.rope_theta,
        "rotary_scaling_factor": scaling.pop("factor", 1.0),
        **scaling,
    }


def _layer_spec(spec: ModelSpec, with_experts: bool) -> ModuleSpec:
    shared: dict[str, Any] = {
        "num_experts": spec.num_experts if with_experts else None,
        "qk_layernorm": spec.qk_norm or spec.mla is not None,
        "multi_latent_attention": spec.mla is not None,
    }
    if uses_te():
        layer = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=with_experts, **shared)
    else:
        layer = get_gpt_layer_local_spec(normalization="RMSNorm", **shared)
        _use_own_modules(layer, spec)
    if with_experts and spec.num_expert_groups > spec.groups_per_token:
        mlp: Any = layer.submodules
        mlp.mlp.submodules.router = partial(
            GroupLimitedRouter,
            num_groups=spec.num_expert_groups,
            groups_per_token=spec.groups_per_token,
            score_experts=spec.group_score_experts,
        )
    return layer


def _use_own_modules(layer: ModuleSpec, spec: ModelSpec) -> None:
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if spec.mla:
        parts.self_attention.module = LatentSelfAttention
        attention.q_layernorm = attention.kv_layernorm = RmsNorm
    elif spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm


def _layers_of_chunk(config: TransformerConfig, vp_stage: int | None) -> range:
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))


def build_chunk(
    spec: ModelSpec, layout: TrainerLayout, config: TransformerConfig, stage: int
) -> GPTModel:
    """Build this rank's model chunk number ``stage`` (0 without virtual pipeline stages)."""
    vp_stage = stage if layout.vpp > 1 else None
    norm: Any = TENorm if uses_te() else RmsNorm
    kinds = {kind: _layer_spec(spec, kind) for kind in {spec.has_experts(0), spec.num_experts > 0}}
    layers = [kinds[spec.has_experts(layer)] for layer in _layers_of_chunk(config, vp_stage)]
    # `PackedAttention` rotates itself; latent attention does, with either spec
    rotates = uses_te() and spec.mla is None
    padding_unit = layout.vocab_divisor * layout.tp
    chunk = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm),  # pyright: ignore
        vocab_size=-(-spec.vocab_size // padding_unit) * padding_unit,
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(False, vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(False, vp_stage),
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope" if rotates else "none",
        vp_stage=vp_stage,
    )
    if rotates:
        chunk.rotary_pos_emb.inv_freq = inverse_frequencies(spec)
    if config.use_te_activation_func:
        for module in chunk.modules():
            if isinstance(module, MLP):
                module.activation_func = swiglu
    return chunk


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Return the rotary embedding's inverse frequencies [d/2] float32, scaled as llama3 does.

    Latent attention does not use them.
    """
    rope = RotaryEmbedding(
        kv_channels=spec.head_dim,
        rotary_percent=1.0,
        rotary_base=spec.rope_theta,  # pyright: ignore
        use_cpu_initialization=True,
    )
    if spec.mla or not spec.rope_scaling:
        return rope.inv_freq
    # Megatron's constructor would take the factor only
    scaling: dict[str, Any] = dict(spec.rope_scaling)
    return rope._apply_scaling(
        rope.inv_freq,
        factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
    )


def _check_latent_sizes(mla: LatentAttention, tp: int) -> None:
    """Megatron's local layers build the projections down divided, before ours replace them."""
    for what, size in (
        ("q_lora_rank", mla.q_lora_rank or 0),
        ("kv_lora_rank and rotary key", mla.kv_lora_rank + mla.rope_head_dim),
    ):
        if size % tp:
            raise LayoutError(f"{what} {size} of the model is not divisible by trainer tp {tp}")
