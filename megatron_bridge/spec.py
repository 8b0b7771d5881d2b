"""Canonical description of a model: its sizes, and its tensors under their Hugging Face names.

Every layout (Megatron, vLLM, files) is a function of a `ModelSpec`; `Shard` says where a piece of
a canonical tensor lies in one rank's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    ROUTER = "router"
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalTensor:
    """One tensor of the model as the HF checkpoint names and shapes it."""

    name: str
    part: Part
    shape: tuple[int, ...]
    layer: int | None = None  # global index of its transformer layer
    expert: int | None = None  # index of its expert in the layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of a decoder-only transformer and what its family adds.

    With experts every layer is a mixture of them, without a load-balancing loss; ``ffn_size`` is
    then unused.
    """

    family: str  # "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: tuple[tuple[str, float], ...] = ()  # llama3 scaling: sorted (key, value) pairs
    initializer_range: float = 0.02
    num_experts: int = 0  # of a layer; 0: a dense model
    experts_per_token: int = 0
    moe_ffn_size: int = 0  # of one expert
    norm_topk: bool = False  # a token's chosen experts share a weight of 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """All that one rank holds, in a deterministic order."""

    rank: int  # global rank
    params: tuple[LocalParam, ...]
