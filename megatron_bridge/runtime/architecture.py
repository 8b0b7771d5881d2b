"""What a `ModelSpec` is in Megatron-Core's terms: configuration, layer spec, one model chunk.

Called by `model` only. With Transformer Engine (CUDA) layers are its fused ones; without, they are
Megatron's local ones with our attention (`attention`) and norm, which know packed sequences and
sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megatron_bridge.errors import LayoutError
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.runtime.attention import PackedAttention
from megatron_bridge.runtime.setup import acceleration
from megatron_bridge.spec import ModelSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def uses_te() -> bool:
    """Return whether layers are Transformer Engine's, which fuse norms into linear layers."""
    return acceleration()["transformer_engine"]


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm for Megatron's specs; unlike Megatron's wrapper of it, it knows sequence
    parallelism: its weight is marked, so that its gradient is summed over the tensor-parallel group.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore


def transformer_config(
    spec: ModelSpec, layout: TrainerLayout, dtype: str, recompute: bool
) -> TransformerConfig:
    """Return Megatron's configuration of this model in this layout.

    Raises:
        LayoutError: the layout does not divide the model, or the dtype is unknown.
    """
    _check_fit(spec, layout)
    if dtype not in _DTYPES:
        raise LayoutError(f"dtype {dtype!r} of the trainer: expected one of {sorted(_DTYPES)}")
    fast = acceleration()
    return TransformerConfig(
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
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=_DTYPES[dtype],
        pipeline_dtype=_DTYPES[dtype],
        bf16=dtype == "bfloat16",
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        **_moe_config(spec),
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        # batched messages of both directions would meet where both neighbours are one rank (pp 2)
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        num_layers_in_first_pipeline_stage=layout.num_layers_in_first_stage,
        num_layers_in_last_pipeline_stage=layout.num_layers_in_last_stage,
        # initialisation also marks the shards, which gradient norms need; zeros draw no numbers
        perform_initialization=True,
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        bias_activation_fusion=fast["cuda"],
        apply_rope_fusion=fast["transformer_engine"],
        gradient_accumulation_fusion=fast["transformer_engine"] or fast["apex"],
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


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
    }


def _check_fit(spec: ModelSpec, layout: TrainerLayout) -> None:
    ends = (layout.num_layers_in_first_stage, layout.num_layers_in_last_stage)
    even_layers = spec.num_layers - sum(end or 0 for end in ends)
    even_stages = layout.pp - sum(end is not None for end in ends)
    if even_layers < 0 or even_layers % max(even_stages * layout.vpp, 1):
        raise LayoutError(
            f"{even_layers} of {spec.num_layers} layers do not divide among {even_stages} pipeline "
            f"stages of {layout.vpp} chunks (pp={layout.pp}, first and last stage {ends})"
        )
    qkv_rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    ffn_size = (spec.moe_ffn_size, layout.etp) if spec.num_experts else (spec.ffn_size, layout.tp)
    for what, size, tp in (
        ("num_heads", spec.num_heads, layout.tp),
        ("ffn_size", *ffn_size),
        ("qkv rows", qkv_rows, layout.tp),
    ):
        if size % tp:
            raise LayoutError(f"{what} {size} of the model is not divisible by tp={tp}")


def _layer_spec(spec: ModelSpec) -> ModuleSpec:
    if uses_te():
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=spec.num_experts or None,
            moe_grouped_gemm=spec.num_experts > 0,
            qk_layernorm=spec.qk_norm,
        )
    layer = get_gpt_layer_local_spec(
        num_experts=spec.num_experts or None,
        qk_layernorm=spec.qk_norm,
        normalization="RMSNorm",
    )
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return layer


def build_chunk(
    spec: ModelSpec, layout: TrainerLayout, config: TransformerConfig, stage: int
) -> GPTModel:
    """Build this rank's model chunk number ``stage`` (0 without virtual pipeline stages)."""
    vp_stage = stage if layout.vpp > 1 else None
    layer: Any = _layer_spec(spec)
    if not uses_te():
        num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        norm: Any = RmsNorm
        layer = TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)
    padding_unit = layout.vocab_divisor * layout.tp
    chunk = GPTModel(
        config,
        layer,
        vocab_size=-(-spec.vocab_size // padding_unit) * padding_unit,
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(False, vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(False, vp_stage),
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope" if uses_te() else "none",  # `PackedAttention` rotates itself
        vp_stage=vp_stage,
    )
    if uses_te():
        chunk.rotary_pos_emb.inv_freq = inverse_frequencies(spec)
    return chunk


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Return the rotary embedding's inverse frequencies [d/2] float32, scaled as llama3 does."""
    rope = RotaryEmbedding(
        kv_channels=spec.head_dim,
        rotary_percent=1.0,
        rotary_base=spec.rope_theta,  # pyright: ignore
        use_cpu_initialization=True,
    )
    if not spec.rope_scaling:
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
