"""A dense oracle of the layouts: it shards whole tensors as Megatron's and vLLM's loaders do.

Shares no code with `megatron_bridge.layouts`: reshape, cat and chunk on whole tensors.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.ddma.transports import LoopbackHub, LoopbackTransport
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.plan import TransferPlan
from megatron_bridge.spec import ModelSpec

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


def _moe_block(spec: ModelSpec) -> str:
    return "block_sparse_moe" if spec.family == "mixtral" else "mlp"


def _mlp_names(spec: ModelSpec, layer: int, expert: int | None = None) -> list[str]:
    """Names of gate, up and down."""
    at = f"model.layers.{layer}."
    if expert is None:
        return [f"{at}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    at += f"{_moe_block(spec)}.experts.{expert}."
    if spec.family == "mixtral":
        return [f"{at}w1.weight", f"{at}w3.weight", f"{at}w2.weight"]
    return [f"{at}{name}_proj.weight" for name in ("gate", "up", "down")]


def hf_tensors(spec: ModelSpec, dtype: torch.dtype = torch.int32) -> Tensors:
    """Every tensor of the checkpoint, no number twice."""
    hidden, ffn, head = spec.hidden_size, spec.ffn_size, spec.head_dim
    query, key = spec.num_heads * head, spec.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", query), ("k", key), ("v", key)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, hidden)
            if spec.qkv_bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        if spec.qk_norm:
            shapes[f"{at}self_attn.q_norm.weight"] = (head,)
            shapes[f"{at}self_attn.k_norm.weight"] = (head,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, query)
        if spec.num_experts:
            shapes[f"{at}{_moe_block(spec)}.gate.weight"] = (spec.num_experts, hidden)
        for expert in range(spec.num_experts) if spec.num_experts else [None]:
            gate, up, down = _mlp_names(spec, layer, expert)
            size = ffn if expert is None else spec.moe_ffn_size
            shapes |= {gate: (size, hidden), up: (size, hidden), down: (hidden, size)}
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
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


def _pad_rows(tensor: Tensor, multiple: int, value: int) -> Tensor:
    return pad(tensor, (0, 0, 0, -len(tensor) % multiple), value=value)


def _fuse_qkv(spec: ModelSpec, whole: Tensors, layer: int, kind: str) -> Tensor:
    """Regroup as ``torch.cat`` over (group, heads of the group) does in Megatron's converters."""
    parts = []
    for name in ("q", "k", "v"):
        tensor = whole[f"model.layers.{layer}.self_attn.{name}_proj.{kind}"]
        parts.append(tensor.view(spec.num_kv_heads, -1, spec.head_dim, *tensor.shape[1:]))
    fused = torch.cat(parts, dim=1)
    return fused.reshape(-1, *fused.shape[3:])


def megatron_tensors(
    spec: ModelSpec,
    whole: Tensors,
    layout: TrainerLayout,
    layers: list[list[int]],
    *,
    fused_norms: bool = False,
    padding: int = 0,
) -> dict[int, Tensors]:
    """Rank -> parameters; ``layers[pp]`` are the layers of a stage."""
    ranks: dict[int, Tensors] = {}
    rank = 0
    for stage in range(layout.pp):
        for within in range(layout.dp * layout.cp * layout.tp):
            place = (stage, within % layout.tp)
            out = _megatron_rank(spec, whole, layout, place, layers[stage], fused_norms, padding)
            if spec.num_experts:
                out |= _expert_rank(spec, whole, layout, within, layers[stage], fused_norms)
            ranks[rank] = out
            rank += 1
    return ranks


def _expert_rank(
    spec: ModelSpec,
    whole: Tensors,
    layout: TrainerLayout,
    within: int,
    layers: list[int],
    grouped: bool,
) -> Tensors:
    """Routers and experts of a stage's rank: expert data x expert x expert tensor parallel."""
    grid = torch.arange(layout.tp * layout.cp * layout.dp).view(-1, layout.ep, layout.etp)
    _, ep, etp = (int(index) for index in (grid == within).nonzero()[0])
    mine = list(torch.arange(spec.num_experts).chunk(layout.ep)[ep])
    out: Tensors = {}
    for layer in layers:
        mlp = f"decoder.layers.{layer}.mlp."
        router = whole[f"model.layers.{layer}.{_moe_block(spec)}.gate.weight"]
        out[f"{mlp}router.weight"] = router.clone()
        for local, expert in enumerate(mine):
            names = _mlp_names(spec, layer, int(expert))
            gate, up, down = (whole[name] for name in names)
            fc1 = torch.cat([torch.chunk(side, layout.etp)[etp] for side in (gate, up)])
            fc2 = torch.chunk(down, layout.etp, 1)[etp].clone()
            for number, tensor in ((1, fc1), (2, fc2)):
                sequential = f"experts.local_experts.{local}.linear_fc{number}.weight"
                name = f"experts.linear_fc{number}.weight{local}" if grouped else sequential
                out[mlp + name] = tensor
    return out


def _megatron_rank(
    spec: ModelSpec,
    whole: Tensors,
    layout: TrainerLayout,
    place: tuple[int, int],
    layers: list[int],
    fused_norms: bool,
    padding: int,
) -> Tensors:
    stage, tp = place

    def part(tensor: Tensor, dim: int = 0) -> Tensor:
        return torch.chunk(tensor, layout.tp, dim)[tp].clone()

    out: Tensors = {}
    embedding = whole["model.embed_tokens.weight"]
    multiple = layout.vocab_divisor * layout.tp
    if stage == 0:
        name = "embedding.word_embeddings.weight"
        out[name] = part(_pad_rows(embedding, multiple, padding))
    if stage == layout.pp - 1:
        out["decoder.final_layernorm.weight"] = whole["model.norm.weight"].clone()
        if not spec.tied_embeddings or layout.pp > 1:
            head = embedding if spec.tied_embeddings else whole["lm_head.weight"]
            out["output_layer.weight"] = part(_pad_rows(head, multiple, padding))
    for layer in layers:
        hf, mc = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        attention, mlp = f"{mc}self_attention.", f"{mc}mlp."
        out[f"{attention}linear_qkv.weight"] = part(_fuse_qkv(spec, whole, layer, "weight"))
        if spec.qkv_bias:
            out[f"{attention}linear_qkv.bias"] = part(_fuse_qkv(spec, whole, layer, "bias"))
        if spec.qk_norm:
            out[f"{attention}q_layernorm.weight"] = whole[f"{hf}self_attn.q_norm.weight"].clone()
            out[f"{attention}k_layernorm.weight"] = whole[f"{hf}self_attn.k_norm.weight"].clone()
        out[f"{attention}linear_proj.weight"] = part(whole[f"{hf}self_attn.o_proj.weight"], 1)
        if not spec.num_experts:
            gate, up, down = (whole[name] for name in _mlp_names(spec, layer))
            out[f"{mlp}linear_fc1.weight"] = torch.cat([part(gate), part(up)])
            out[f"{mlp}linear_fc2.weight"] = part(down, 1)
        norms = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        if fused_norms:
            norms = [
                "self_attention.linear_qkv.layer_norm_weight",
                norms[1] if spec.num_experts else "mlp.linear_fc1.layer_norm_weight",
            ]
        out[mc + norms[0]] = whole[f"{hf}input_layernorm.weight"].clone()
        out[mc + norms[1]] = whole[f"{hf}post_attention_layernorm.weight"].clone()
    return out


def vllm_tensors(spec: ModelSpec, whole: Tensors, tp: int, rank: int) -> Tensors:
    """Parameters of one rank, as vLLM's weight loaders narrow and copy; padding rows are 0."""
    out = _vllm_experts(spec, whole, tp, rank) if spec.num_experts else {}
    for name, tensor in whole.items():
        if ".experts." in name:
            continue
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            padded = _pad_rows(tensor, 64, 0)
            out[name] = padded.narrow(0, rank * len(padded) // tp, len(padded) // tp).clone()
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            width = tensor.shape[1] // tp
            out[name] = tensor.narrow(1, rank * width, width).clone()
        elif "q_proj" in name:
            heads = len(tensor) // tp
            parts = [tensor.narrow(0, rank * heads, heads)]
            replicas = max(1, tp // spec.num_kv_heads)
            for other in ("k_proj", "v_proj"):
                kv = whole[name.replace("q_proj", other)]
                size = max(1, spec.num_kv_heads // tp) * spec.head_dim
                parts.append(kv.narrow(0, rank // replicas * size, size))
            out[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            up = whole[name.replace("gate_proj", "up_proj")]
            rows = len(up) // tp
            parts = [side.narrow(0, rank * rows, rows) for side in (tensor, up)]
            out[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif not any(inner in name for inner in ("k_proj", "v_proj", "up_proj")):
            out[name] = tensor.clone()
    return out


def _vllm_experts(spec: ModelSpec, whole: Tensors, tp: int, rank: int) -> Tensors:
    """Stacks [E, rows, columns] filled expert by expert, shown as matrices."""
    size = spec.moe_ffn_size // tp
    out: Tensors = {}
    for layer in range(spec.num_layers):
        dtype = whole["model.norm.weight"].dtype
        w13 = torch.zeros(spec.num_experts, 2 * size, spec.hidden_size, dtype=dtype)
        w2 = torch.zeros(spec.num_experts, spec.hidden_size, size, dtype=dtype)
        for expert in range(spec.num_experts):
            gate, up, down = (whole[name] for name in _mlp_names(spec, layer, expert))
            w13[expert, :size] = gate.narrow(0, rank * size, size)
            w13[expert, size:] = up.narrow(0, rank * size, size)
            w2[expert] = down.narrow(1, rank * size, size)
        at = f"model.layers.{layer}.{_moe_block(spec)}.experts.routed_experts."
        out[f"{at}w13_weight"], out[f"{at}w2_weight"] = w13.flatten(0, 1), w2.flatten(0, 1)
    return out


def execute(
    plan: TransferPlan, ranks: dict[int, Tensors], dtype: torch.dtype = torch.int32
) -> None:
    """Run a plan in this process."""
    hub = LoopbackHub(timeout_seconds=0.1)
    transports = {rank: LoopbackTransport(hub, rank, dtype) for rank in ranks}
    for rank, transport in transports.items():
        transport.register(ranks[rank])
    for operations in plan.rounds(max_operations=40, max_numel=4000):
        for rank in {item.source_rank for item in operations}:
            transports[rank].post([item for item in operations if item.source_rank == rank])
        for rank in {item.target_rank for item in operations}:
            transports[rank].post([item for item in operations if item.target_rank == rank])
            transports[rank].wait()
