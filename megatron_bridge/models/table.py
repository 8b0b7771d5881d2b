"""The table of model families. A family is a row of `FAMILIES`, not code: what it adds to the plain
transformer and which values of its configuration this project cannot honour. `families` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """How a family names the expert that every token goes through, and where its size stands."""

    block: str  # beside "gate" and "experts"; holds "gate_proj", "up_proj" and "down_proj"
    ffn_key: str | None = None  # None: "n_shared_experts" times the size of an expert
    switch: str | None = None  # module of the gate that scales its output


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How a family's checkpoint names a layer's experts, and its configuration their sizes."""

    block: str = "mlp"  # of the layer: holds "gate" and "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    ffn_key: str = "moe_intermediate_size"
    norm_topk: bool | None = None  # None: as "norm_topk_prob" says
    sigmoid_scores: bool = False
    router_bias: bool = False
    group_score_experts: int = 1  # see `ModelSpec`
    shared: SharedExpert | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row: ``required`` maps a configuration key to the values that we can honour.

    With None among them a key that the configuration lacks is honoured: Hugging Face's default is
    then meant.
    """

    name: str  # `ModelSpec.family`
    qkv_bias: bool = False
    qk_norm: bool = False
    mla: bool = False  # multi-head latent attention
    head_dim: int | None = None  # default where the configuration has none
    rope_theta: float = 1e4  # likewise
    rope_type: str = "llama3"  # scaling that it may ask for
    experts: Experts | None = None  # None: a dense model
    required: tuple[tuple[str, tuple[object, ...]], ...] = ()


REQUIRED = (  # of every family
    ("hidden_act", ("silu", None)),
    ("quantization_config", (None,)),
    ("partial_rotary_factor", (1, 1.0, None)),
)
_NO_BIAS = (("attention_bias", (False, None)), ("mlp_bias", (False, None)))
_ALL_SPARSE = (("decoder_sparse_step", (1, None)), ("mlp_only_layers", ([], None)))
_DEEPSEEK = (
    *_NO_BIAS,
    ("moe_layer_freq", (1, None)),
    # transformers' norms of the latents have this epsilon, vLLM's and Megatron's the model's
    ("rms_norm_eps", (1e-6, None)),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(name="llama", required=_NO_BIAS),
    "mistral": Family(name="llama", required=_NO_BIAS),
    "qwen2": Family(name="qwen2", qkv_bias=True),
    "qwen3": Family(name="qwen3", qk_norm=True, head_dim=128, required=_NO_BIAS),
    "qwen2_moe": Family(
        name="qwen2_moe",
        qkv_bias=True,
        experts=Experts(
            shared=SharedExpert(
                block="shared_expert",
                ffn_key="shared_expert_intermediate_size",
                switch="shared_expert_gate",
            ),
        ),
        required=(*_ALL_SPARSE, ("qkv_bias", (True, None))),
    ),
    "qwen3_moe": Family(
        name="qwen3_moe", qk_norm=True, experts=Experts(), required=(*_NO_BIAS, *_ALL_SPARSE)
    ),
    "mixtral": Family(
        name="mixtral",
        rope_theta=1e6,
        experts=Experts(
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            ffn_key="intermediate_size",
            norm_topk=True,
        ),
        required=(("router_jitter_noise", (0.0, None)),),
    ),
    "deepseek_v2": Family(
        name="deepseek_v2",
        mla=True,
        rope_type="yarn",
        experts=Experts(shared=SharedExpert(block="shared_experts")),
        required=(
            *_DEEPSEEK,
            ("scoring_func", ("softmax", None)),
            ("topk_method", ("greedy", "group_limited_greedy", None)),
            ("norm_topk_prob", (False, None)),
        ),
    ),
    "deepseek_v3": Family(
        name="deepseek_v3",
        mla=True,
        rope_type="yarn",
        experts=Experts(
            norm_topk=True,
            sigmoid_scores=True,
            router_bias=True,
            group_score_experts=2,
            shared=SharedExpert(block="shared_experts"),
        ),
        required=(
            *_DEEPSEEK,
            # without these two vLLM would route by a softmax and without the bias
            ("scoring_func", ("sigmoid",)),
            ("topk_method", ("noaux_tc",)),
            ("norm_topk_prob", (True, None)),
            ("rope_interleave", (True, None)),
        ),
    ),
}
