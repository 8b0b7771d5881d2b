"""Canonical description of a model: its sizes, and its tensors under their Hugging Face names.

Every layout (Megatron, vLLM, files) is a function of a `ModelSpec`; `Shard` says where a piece of
a canonical tensor lies in one rank's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from megatron_bridge.box import Box


class Part(Enum):
    """What a canonical tensor is in the transformer; layouts decide by it, never by its name."""

    EMBEDDING = "embedding"
    HEAD = "head"
    FINAL_NORM = "final_norm"
    INPUT_NORM = "input_norm"
    POST_ATTENTION_NORM = "post_attention_norm"
    Q = "q"
    K = "k"
    V = "v"
    Q_BIAS = "q_bias"
    K_BIAS = "k_bias"
    V_BIAS = "v_bias"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    O = "o"  # noqa: E741 - the field's name of the attention output projection
    MLA_Q = "mla_q"  # queries without a low-rank factor
    MLA_Q_DOWN = "mla_q_down"
    MLA_Q_NORM = "mla_q_norm"
    MLA_Q_UP = "mla_q_up"
    MLA_KV_DOWN = "mla_kv_down"  # keys' and values' latent, then the rotary key of all heads
    MLA_KV_NORM = "mla_kv_norm"
    MLA_KV_UP = "mla_kv_up"  # per head: keys, then values
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"  # added to the scores for the choice of experts only
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    SHARED_SWITCH = "shared_switch"  # [1, H]: its sigmoid scales the shared expert's output
    MTP_EMBEDDING_NORM = "mtp_embedding_norm"
    MTP_HIDDEN_NORM = "mtp_hidden_norm"
    MTP_PROJECTION = "mtp_projection"  # [H, 2H]: embedding, then hidden state
    MTP_FINAL_NORM = "mtp_final_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalTensor:
    """One tensor of the model as the HF checkpoint names and shapes it."""

    name: str
    part: Part
    shape: tuple[int, ...]
    layer: int | None = None  # global index of its transformer layer; MTP layers follow the model's
    expert: int | None = None  # index of its expert in the layer
    dtype: str = ""  # "": the model's; "float32": kept in it whatever the model's is


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (MLA)."""

    q_lora_rank: int | None  # None: queries have no low-rank factor
    kv_lora_rank: int
    nope_head_dim: int  # of a query's or key's part without position
    rope_head_dim: int  # of its rotary part, which all heads' keys share
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of a decoder-only transformer and what its family adds.

    With experts every layer from ``first_dense_layers`` on is a mixture of them, without a
    load-balancing loss; ``ffn_size`` is then that of the layers before.
    """

    family: str  # "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", ...
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of a query; with MLA both its parts
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: tuple[tuple[str, float], ...] = ()  # llama3 scaling, with MLA yarn: sorted pairs
    initializer_range: float = 0.02
    num_experts: int = 0  # of a layer; 0: a dense model
    experts_per_token: int = 0
    moe_ffn_size: int = 0  # of one expert
    norm_topk: bool = False  # a token's chosen experts share a weight of 1
    first_dense_layers: int = 0  # layers without experts before those with
    shared_ffn_size: int = 0  # of the expert that every token goes through; 0: none
    shared_switch: bool = False  # a learnt gate scales the shared expert's output
    sigmoid_scores: bool = False  # experts are scored by a sigmoid, not a softmax
    router_bias: bool = False  # an fp32 bias takes part in the choice of experts
    num_expert_groups: int = 1  # a token's experts come from ``groups_per_token`` of them
    groups_per_token: int = 1
    group_score_experts: int = 1  # a group's score is the sum of its best experts' scores
    routed_scale: float = 1.0  # of the chosen experts' weights
    mla: LatentAttention | None = None
    num_mtp_layers: int = 0  # layers that predict tokens further ahead, after the model's

    def has_experts(self, layer: int) -> bool:
        """Return whether ``layer`` is a mixture of experts; MTP layers are as the last one."""
        return self.num_experts > 0 and layer >= self.first_dense_layers

    def without_mtp(self) -> ModelSpec:
        """Return the main model alone."""
        return replace(self, num_mtp_layers=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A piece of a canonical tensor in one rank's memory: ``param[local] == tensor[box]``.

    ``box`` and ``local`` have equal shapes.
    """

    tensor: str  # canonical name
    box: Box  # region of the canonical tensor
    param: str  # local parameter's name
    local: Box  # region of the local parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParam:
    """One parameter as a rank holds it. What no shard covers is padding and must be zero.

    A stack of matrices [E, rows, columns] counts as one matrix [E * rows, columns].
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    dtype: str = ""  # "": that of its side
    quantization: str = ""  # "block" (128 x 128) or "tensor": what its elements are scaled by
    scales: str = ""  # name of the parameter of its scales, where it is quantized
    derived: bool = False  # made from another parameter, never sent: scales


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """All that one rank holds, in a deterministic order."""

    rank: int  # global rank
    params: tuple[LocalParam, ...]
