"""A dense oracle for Megatron's training: transformers' model, torch's AdamW, no parallelism.

`make_case` builds a tiny model of a family and a batch; `train_dense` gives the losses, gradient
norms and weights that every layout must reproduce; `local_weight` cuts one rank's parameter out of
the dense weights, following the layouts that Megatron documents for its fused tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.runtime.batch import MicroBatch
from megatron_bridge.spec import ModelSpec

LR, EPS, WEIGHT_DECAY, CLIP, ENTROPY, TEMPERATURE = 1e-2, 1e-4, 0.1, 0.5, 0.05, 0.7
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS: dict[str, dict] = {
    "qwen3_moe": {"num_experts": 4, "experts_per_token": 2, "moe_ffn_size": 64},
    "mixtral": {"num_experts": 4, "experts_per_token": 2, "moe_ffn_size": 192, "norm_topk": True},
}
Weights = dict[str, Tensor]


@dataclass
class Case:
    """A model, its first weights (HF names) and sequences with a weight for each token."""

    spec: ModelSpec
    weights: Weights
    lengths: list[int]
    tokens: list[Tensor]
    token_weights: list[Tensor]


@dataclass
class DenseStep:
    """What one optimizer step on the whole batch must give, and the weights after it."""

    loss: float
    grad_norm: float
    num_tokens: int
    entropy_sum: float
    weights: Weights


def make_spec(family: str, num_layers: int = 4) -> ModelSpec:
    return ModelSpec(
        family=family,
        vocab_size=32,
        hidden_size=64,
        ffn_size=192,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        norm_eps=1e-5,
        rope_theta=10000.0,
        max_positions=128,
        tied_embeddings=family == "qwen2",
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        rope_scaling=tuple(sorted(LLAMA3_SCALING.items())) if family == "llama" else (),
        **EXPERTS.get(family, {}),
    )


def hf_model(spec: ModelSpec) -> torch.nn.Module:
    """Build transformers' own model of this spec (float32, weights not meaningful)."""
    import transformers

    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    }
    experts: dict[str, object] = {}
    if spec.num_experts:
        experts = {
            "num_local_experts": spec.num_experts,
            "num_experts_per_tok": spec.experts_per_token,
        }
    if spec.family == "qwen3_moe":
        experts |= {"moe_intermediate_size": spec.moe_ffn_size, "norm_topk_prob": spec.norm_topk}
    if spec.family not in kinds:
        return _hf_mixture(spec)
    make_config, make_model = kinds[spec.family]
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_scaling:
        rope = {"rope_type": "llama3", "rope_theta": spec.rope_theta, **dict(spec.rope_scaling)}
    config = make_config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        rope_parameters=rope,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=spec.tied_embeddings,
        **experts,
    )
    assert getattr(config, "head_dim", spec.head_dim) == spec.head_dim
    return make_model(config).float()


def _hf_mixture(spec: ModelSpec) -> torch.nn.Module:
    """Build a model with shared experts: Qwen2-MoE, DeepSeek-V2 or DeepSeek-V3."""
    import transformers

    shared: dict[str, object] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "moe_intermediate_size": spec.moe_ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "num_experts_per_tok": spec.experts_per_token,
        "norm_topk_prob": spec.norm_topk,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.mla is None:
        config = transformers.Qwen2MoeConfig(
            **shared,
            num_experts=spec.num_experts,
            shared_expert_intermediate_size=spec.shared_ffn_size,
            rope_parameters=rope,
        )
        return transformers.Qwen2MoeForCausalLM(config).float()
    if spec.rope_scaling:
        rope |= {"rope_type": "yarn", **dict(spec.rope_scaling)}
    shared |= {
        "q_lora_rank": spec.mla.q_lora_rank,
        "kv_lora_rank": spec.mla.kv_lora_rank,
        "qk_nope_head_dim": spec.mla.nope_head_dim,
        "qk_rope_head_dim": spec.mla.rope_head_dim,
        "v_head_dim": spec.mla.v_head_dim,
        "first_k_dense_replace": spec.first_dense_layers,
        "n_routed_experts": spec.num_experts,
        "n_shared_experts": spec.shared_ffn_size // spec.moe_ffn_size,
        "n_group": spec.num_expert_groups,
        "topk_group": spec.groups_per_token,
        "routed_scaling_factor": spec.routed_scale,
        "rope_parameters": rope,
    }
    if spec.family == "deepseek_v3":
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**shared)).float()
    method = "group_limited_greedy" if spec.num_expert_groups > 1 else "greedy"
    config = transformers.DeepseekV2Config(**shared, topk_method=method)
    return transformers.DeepseekV2ForCausalLM(config).float()


def make_case(family: str, num_layers: int = 4) -> Case:
    return make_case_of(make_spec(family, num_layers))


def make_case_of(spec: ModelSpec) -> Case:
    generator = torch.Generator().manual_seed(7)

    def near(value: float, scale: float, shape: torch.Size) -> Tensor:
        return value + scale * torch.randn(shape, generator=generator)

    weights = {
        name: near(1.0, 0.2, tensor.shape) if "norm" in name else near(0.0, 0.15, tensor.shape)
        for name, tensor in hf_model(spec).state_dict().items()
    }
    if spec.tied_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    lengths = [5, 1, 23, 9, 40, 2, 17, 8]
    tokens = [torch.randint(0, 32, (n,), generator=generator) for n in lengths]
    # with its second and fourth neighbour, whichever are in one micro-batch: computed once
    for i in range(2, len(lengths)):
        common = min(lengths[i - 2], lengths[i], 6)
        tokens[i][:common] = tokens[i - 2][:common]
    token_weights = [torch.rand(n, generator=generator) + 0.1 for n in lengths]
    for column in token_weights:
        column[: len(column) // 3] = 0  # a prompt
    return Case(spec, weights, lengths, tokens, token_weights)


def micro_batch(case: Case, members: list[int]) -> MicroBatch:
    token_weights = torch.cat([case.token_weights[i] for i in members])
    return MicroBatch(
        lengths=torch.tensor([case.lengths[i] for i in members]),
        tokens=torch.cat([case.tokens[i] for i in members]),
        columns={"weights": token_weights, "loss_mask": (token_weights > 0).float()},
    )


def dense_logprobs(
    model: torch.nn.Module, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy [n] of each token of one sequence; 0 for the first."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].double() / temperature
    table = logits.log_softmax(-1)[:-1]
    chosen = table.gather(1, tokens[1:, None])[:, 0]
    entropy = -(table.exp() * table).sum(-1)
    zero = table.new_zeros(1)
    return torch.cat([zero, chosen]), torch.cat([zero, entropy])


def train_dense(case: Case, steps: int) -> list[DenseStep]:
    model = hf_model(case.spec)
    model.load_state_dict(case.weights)
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=LR,
        eps=EPS,
    )
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        total, count, entropy_sum = torch.zeros([], dtype=torch.float64), 0, 0.0
        for tokens, token_weights in zip(case.tokens, case.token_weights, strict=True):
            logprobs, entropy = dense_logprobs(model, tokens, TEMPERATURE)
            mask = (token_weights > 0).double()
            total = total - (logprobs * token_weights).sum() - ENTROPY * (entropy * mask).sum()
            count += int(mask.sum())
            entropy_sum += float((entropy * mask).sum().detach())
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found.append(
            DenseStep(float(total.detach() / count), float(norm), count, entropy_sum, weights)
        )
    return found


_HF_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_REPLICATED = ("layernorm", "router")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")


def local_weight(
    name: str, weights: Weights, spec: ModelSpec, layout: TrainerLayout, rank: int
) -> Tensor:
    """Cut Megatron's parameter ``name`` (local layer spec) of one rank."""
    tp, tp_rank = layout.tp, rank % layout.tp
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        hf = "model.embed_tokens.weight" if name.startswith("embedding") else "lm_head.weight"
        unit = layout.vocab_divisor * tp
        missing = -spec.vocab_size % unit
        return torch.nn.functional.pad(weights[hf], (0, 0, 0, missing)).chunk(tp)[tp_rank]
    if name == "decoder.final_layernorm.weight":
        return weights["model.norm.weight"]
    _, _, layer, rest = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if rest.startswith("self_attention.linear_qkv"):
        kind = rest.rsplit(".", 1)[1]
        q, k, v = (weights[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv")
        groups = spec.num_kv_heads
        parts = zip(q.chunk(groups), k.chunk(groups), v.chunk(groups), strict=True)
        return torch.cat([torch.cat(part) for part in parts]).chunk(tp)[tp_rank]
    if rest == "mlp.linear_fc1.weight":
        halves = (weights[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up"))
        return torch.cat([half.chunk(tp)[tp_rank] for half in halves])
    expert = _EXPERT.fullmatch(rest)
    if expert:
        experts = f"{prefix}mlp.experts."
        number, etp_rank = int(expert[1]), rank % layout.etp
        first = rank // layout.etp % layout.ep * (spec.num_experts // layout.ep)
        if expert[2] == "2":
            down = weights[f"{experts}down_proj"][first + number]
            return down.chunk(layout.etp, dim=1)[etp_rank]
        halves = weights[f"{experts}gate_up_proj"][first + number].chunk(2)
        return torch.cat([half.chunk(layout.etp)[etp_rank] for half in halves])
    tensor = weights[prefix + _HF_NAMES[rest]]
    return tensor if any(word in rest for word in _REPLICATED) else tensor.chunk(tp, dim=1)[tp_rank]
