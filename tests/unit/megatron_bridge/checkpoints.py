"""Made-up models and their checkpoint's whole tensors, for the dense `oracle` of the layouts."""

import torch
from torch import Tensor

from megatron_bridge.spec import LatentAttention, ModelSpec

Tensors = dict[str, Tensor]


def make_spec(**changes: object) -> ModelSpec:
    values: dict = {
        "family": "llama",
        "vocab_size": 100,
        "hidden_size": 16,
        "ffn_size": 24,
        "num_layers": 6,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 4,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_positions": 128,
        "tied_embeddings": False,
    }
    return ModelSpec(**{**values, **changes})


def make_mixture(**changes: object) -> ModelSpec:
    """Qwen2-MoE: biases, a shared expert with a gate."""
    values: dict = {
        "family": "qwen2_moe",
        "qkv_bias": True,
        "num_experts": 4,
        "experts_per_token": 2,
        "moe_ffn_size": 12,
        "shared_ffn_size": 20,
        "shared_switch": True,
    }
    return make_spec(**{**values, **changes})


def make_deepseek(**changes: object) -> ModelSpec:
    """DeepSeek-V3: latent attention, a dense layer before those with experts, a router's bias."""
    values: dict = {
        "family": "deepseek_v3",
        "num_kv_heads": 8,
        "head_dim": 6,
        "num_experts": 8,
        "experts_per_token": 4,
        "moe_ffn_size": 12,
        "norm_topk": True,
        "first_dense_layers": 1,
        "shared_ffn_size": 12,
        "sigmoid_scores": True,
        "router_bias": True,
        "num_expert_groups": 4,
        "groups_per_token": 2,
        "group_score_experts": 2,
        "routed_scale": 2.5,
        "mla": LatentAttention(
            q_lora_rank=10, kv_lora_rank=14, nope_head_dim=4, rope_head_dim=2, v_head_dim=3
        ),
    }
    return make_spec(**{**values, **changes})


def moe_block(spec: ModelSpec) -> str:
    return "block_sparse_moe" if spec.family == "mixtral" else "mlp"


def shared_name(spec: ModelSpec) -> str:
    return "shared_expert" if spec.family == "qwen2_moe" else "shared_experts"


def mlp_names(spec: ModelSpec, layer: int, expert: int | str | None = None) -> list[str]:
    """Names of gate, up and down; of an expert by number, or of the shared one by its name."""
    at = f"model.layers.{layer}."
    if expert is None:
        return [f"{at}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    at += f"{moe_block(spec)}.{expert if isinstance(expert, str) else f'experts.{expert}'}."
    if spec.family == "mixtral":
        return [f"{at}w1.weight", f"{at}w3.weight", f"{at}w2.weight"]
    return [f"{at}{name}_proj.weight" for name in ("gate", "up", "down")]


def _attention_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, heads, head = spec.hidden_size, spec.num_heads, spec.head_dim
    if spec.mla:
        rank, latent = spec.mla.q_lora_rank, spec.mla.kv_lora_rank
        nope, rope, value = spec.mla.nope_head_dim, spec.mla.rope_head_dim, spec.mla.v_head_dim
        return {
            **(
                {"q_proj.weight": (heads * (nope + rope), hidden)}
                if rank is None
                else {
                    "q_a_proj.weight": (rank, hidden),
                    "q_a_layernorm.weight": (rank,),
                    "q_b_proj.weight": (heads * (nope + rope), rank),
                }
            ),
            "kv_a_proj_with_mqa.weight": (latent + rope, hidden),
            "kv_a_layernorm.weight": (latent,),
            "kv_b_proj.weight": (heads * (nope + value), latent),
            "o_proj.weight": (hidden, heads * value),
        }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows in (("q", heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        shapes[f"{name}_proj.weight"] = (rows * head, hidden)
        if spec.qkv_bias:
            shapes[f"{name}_proj.bias"] = (rows * head,)
    if spec.qk_norm:
        shapes |= {"q_norm.weight": (head,), "k_norm.weight": (head,)}
    return {**shapes, "o_proj.weight": (hidden, heads * head)}


def _mlp_shapes(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    hidden = spec.hidden_size
    sizes: list[tuple[int | str | None, int]] = [(None, spec.ffn_size)]
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.num_experts and layer >= spec.first_dense_layers:
        at = f"model.layers.{layer}.{moe_block(spec)}."
        shapes[f"{at}gate.weight"] = (spec.num_experts, hidden)
        sizes = [(expert, spec.moe_ffn_size) for expert in range(spec.num_experts)]
        if spec.router_bias:
            shapes[f"{at}gate.e_score_correction_bias"] = (spec.num_experts,)
        if spec.shared_ffn_size:
            sizes.append((shared_name(spec), spec.shared_ffn_size))
        if spec.shared_switch:
            shapes[f"{at}shared_expert_gate.weight"] = (1, hidden)
    for expert, size in sizes:
        gate, up, down = mlp_names(spec, layer, expert)
        shapes |= {gate: (size, hidden), up: (size, hidden), down: (hidden, size)}
    return shapes


def hf_tensors(spec: ModelSpec, dtype: torch.dtype = torch.int32) -> Tensors:
    """Every tensor of the checkpoint, no number twice."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers + spec.num_mtp_layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{k}": shape for k, shape in _attention_shapes(spec).items()}
        shapes |= _mlp_shapes(spec, layer)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if layer >= spec.num_layers:
            norms += ["enorm", "hnorm", "shared_head.norm"]
            shapes[f"{at}eh_proj.weight"] = (hidden, 2 * hidden)
        shapes |= {f"{at}{norm}.weight": (hidden,) for norm in norms}
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    tensors: Tensors = {}
    start = 1
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + numel, dtype=dtype).view(shape)
        start += numel
    return tensors
