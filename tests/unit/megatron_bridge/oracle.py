"""A dense oracle of the layouts: it shards whole tensors as Megatron's and vLLM's loaders do.

Shares no code with `megatron_bridge.layouts`: reshape, cat and chunk on whole tensors.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.spec import ModelSpec
from tests.unit.megatron_bridge.checkpoints import Tensors as Tensors
from tests.unit.megatron_bridge.checkpoints import hf_tensors as hf_tensors
from tests.unit.megatron_bridge.checkpoints import make_spec as make_spec
from tests.unit.megatron_bridge.checkpoints import mlp_names, moe_block, shared_name


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
    """Rank -> parameters; ``layers[pp]`` are the layers of a stage, the last has the MTP layers."""
    ranks: dict[int, Tensors] = {}
    for rank in range(layout.pp * layout.dp * layout.cp * layout.tp):
        stage, within = divmod(rank, layout.dp * layout.cp * layout.tp)
        view = _Rank(spec, whole, layout, within, fused_norms)
        out = view.ends(stage, padding)
        for layer in layers[stage]:
            out |= view.layer(layer, f"decoder.layers.{layer}.")
        if stage == layout.pp - 1:
            for number in range(spec.num_mtp_layers):
                out |= view.mtp_layer(number)
        ranks[rank] = out
    return ranks


class _Rank:
    """What one rank of a stage holds, as Megatron's modules divide their weights."""

    def __init__(
        self, spec: ModelSpec, whole: Tensors, layout: TrainerLayout, within: int, te: bool
    ) -> None:
        self.spec, self.whole, self.layout, self.te = spec, whole, layout, te
        self.tp = within % layout.tp
        # expert data x expert x expert tensor parallel
        grid = torch.arange(layout.tp * layout.cp * layout.dp).view(-1, layout.ep, layout.etp)
        _, self.ep, self.etp = (int(index) for index in (grid == within).nonzero()[0])

    def part(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return torch.chunk(tensor, self.layout.tp, dim)[self.tp].clone()

    def ends(self, stage: int, padding: int) -> Tensors:
        spec, layout, out = self.spec, self.layout, {}
        embedding = self.whole["model.embed_tokens.weight"]
        multiple = layout.vocab_divisor * layout.tp
        last = stage == layout.pp - 1
        if stage == 0 or (last and spec.num_mtp_layers):
            padded = _pad_rows(embedding, multiple, padding)
            out["embedding.word_embeddings.weight"] = self.part(padded)
        if last:
            out["decoder.final_layernorm.weight"] = self.whole["model.norm.weight"].clone()
            if not spec.tied_embeddings or layout.pp > 1:
                head = embedding if spec.tied_embeddings else self.whole["lm_head.weight"]
                out["output_layer.weight"] = self.part(_pad_rows(head, multiple, padding))
        return out

    def mtp_layer(self, number: int) -> Tensors:
        at = f"model.layers.{self.spec.num_layers + number}."
        mine = f"mtp.layers.{number}."
        out = self.layer(self.spec.num_layers + number, f"{mine}transformer_layer.")
        out[f"{mine}eh_proj.weight"] = self.part(self.whole[f"{at}eh_proj.weight"])
        for ours, theirs in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("final_layernorm", "shared_head.norm"),
        ):
            out[f"{mine}{ours}.weight"] = self.whole[f"{at}{theirs}.weight"].clone()
        return out

    def layer(self, layer: int, at: str) -> Tensors:
        spec, hf = self.spec, f"model.layers.{layer}."
        dense = not (spec.num_experts and layer >= spec.first_dense_layers)
        out = self._latent(layer, at) if spec.mla else self._attention(layer, at)
        proj = self.whole[f"{hf}self_attn.o_proj.weight"]
        out[f"{at}self_attention.linear_proj.weight"] = self.part(proj, 1)
        out |= self._mlp(layer, None, f"{at}mlp.") if dense else self._mixture(layer, f"{at}mlp.")
        norms = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        if self.te and not spec.mla:
            norms[0] = "self_attention.linear_qkv.layer_norm_weight"
        if self.te and dense:
            norms[1] = "mlp.linear_fc1.layer_norm_weight"
        out[at + norms[0]] = self.whole[f"{hf}input_layernorm.weight"].clone()
        out[at + norms[1]] = self.whole[f"{hf}post_attention_layernorm.weight"].clone()
        return out

    def _attention(self, layer: int, at: str) -> Tensors:
        spec, ours = self.spec, f"{at}self_attention."
        out: Tensors = {}
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            fused = _fuse_qkv(spec, self.whole, layer, kind)
            out[f"{ours}linear_qkv.{kind}"] = self.part(fused)
        for name in ("q", "k") if spec.qk_norm else ():
            norm = self.whole[f"model.layers.{layer}.self_attn.{name}_norm.weight"]
            out[f"{ours}{name}_layernorm.weight"] = norm.clone()
        return out

    def _latent(self, layer: int, at: str) -> Tensors:
        """Projections down are on all ranks, those up are divided by heads."""
        theirs, ours = f"model.layers.{layer}.self_attn.", f"{at}self_attention."
        out: Tensors = {}
        for mine, down, norm, up in (
            ("q", "q_a_proj", "q_a_layernorm", "q_b_proj"),
            ("kv", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
        ):
            if f"{theirs}{down}.weight" not in self.whole:
                query = self.whole[f"{theirs}q_proj.weight"]
                out[f"{ours}linear_q_proj.weight"] = self.part(query)
                continue
            fused = f"linear_{mine}_up_proj.layer_norm_weight"
            out |= {
                f"{ours}linear_{mine}_down_proj.weight": self.whole[f"{theirs}{down}.weight"],
                f"{ours}linear_{mine}_up_proj.weight": self.part(
                    self.whole[f"{theirs}{up}.weight"]
                ),
                ours + (fused if self.te else f"{mine}_layernorm.weight"): self.whole[
                    f"{theirs}{norm}.weight"
                ],
            }
        return {name: tensor.clone() for name, tensor in out.items()}

    def _mlp(self, layer: int, expert: str | None, at: str) -> Tensors:
        gate, up, down = (self.whole[name] for name in mlp_names(self.spec, layer, expert))
        return {
            f"{at}linear_fc1.weight": torch.cat([self.part(gate), self.part(up)]),
            f"{at}linear_fc2.weight": self.part(down, 1),
        }

    def _mixture(self, layer: int, at: str) -> Tensors:
        """Router, shared expert and this rank's experts."""
        spec, block = self.spec, f"model.layers.{layer}.{moe_block(self.spec)}."
        out = {f"{at}router.weight": self.whole[f"{block}gate.weight"].clone()}
        if spec.router_bias:
            bias = self.whole[f"{block}gate.e_score_correction_bias"]
            out[f"{at}router.expert_bias"] = bias.clone()
        if spec.shared_ffn_size:
            out |= self._mlp(layer, shared_name(spec), f"{at}shared_experts.")
        if spec.shared_switch:
            switch = self.whole[f"{block}shared_expert_gate.weight"]
            out[f"{at}shared_experts.gate_weight"] = switch.clone()
        for local, expert in enumerate(
            torch.arange(spec.num_experts).chunk(self.layout.ep)[self.ep]
        ):
            names = mlp_names(spec, layer, int(expert))
            gate, up, down = (self.whole[name] for name in names)
            etp = self.layout.etp
            fc1 = torch.cat([torch.chunk(side, etp)[self.etp] for side in (gate, up)])
            fc2 = torch.chunk(down, etp, 1)[self.etp].clone()
            for number, tensor in ((1, fc1), (2, fc2)):
                sequential = f"experts.local_experts.{local}.linear_fc{number}.weight"
                name = f"experts.linear_fc{number}.weight{local}" if self.te else sequential
                out[at + name] = tensor
        return out


def vllm_tensors(
    spec: ModelSpec, whole: Tensors, tp: int, rank: int, *, ep: bool = False, pp: int = 1
) -> Tensors:
    """Parameters of one rank, as vLLM's weight loaders narrow and copy; padding rows are 0.

    ``rank`` counts the ``tp * pp`` ranks of a replica, tensor parallelism fastest. With ``ep`` a
    rank holds whole experts. MTP layers belong to another model, the drafter. What vLLM derives
    from its weights is not there (`vllm_derived`).
    """
    stage, rank = divmod(rank, tp)
    layers = _vllm_layers(spec.num_layers, pp, stage)
    out: Tensors = {}
    for name, tensor in whole.items():
        if name.startswith("model.layers."):
            if int(name.split(".")[2]) in layers and ".experts." not in name:
                out |= _vllm_layer_tensor(spec, whole, name, tp, rank)
        elif name == "model.norm.weight":
            if stage == pp - 1:
                out[name] = tensor.clone()
        elif stage == (pp - 1 if name == "lm_head.weight" else 0) or (
            stage == pp - 1 and spec.tied_embeddings
        ):
            padded = _pad_rows(tensor, 64, 0)
            out[name] = padded.narrow(0, rank * len(padded) // tp, len(padded) // tp).clone()
    for layer in layers:
        if spec.num_experts and layer >= spec.first_dense_layers:
            out |= _vllm_experts(spec, whole, layer, (tp, rank), ep)
    return out


def _vllm_layers(num_layers: int, pp: int, stage: int) -> range:
    """Layers of a stage: those left over go one each to the stages before the last, from the back."""
    extra = num_layers % pp
    favoured = [pp - 1 - extra <= index < pp - 1 for index in range(pp)]
    ends = torch.tensor([num_layers // pp + more for more in favoured]).cumsum(0).tolist()
    return range(0 if stage == 0 else ends[stage - 1], ends[stage])


def _vllm_layer_tensor(spec: ModelSpec, whole: Tensors, name: str, tp: int, rank: int) -> Tensors:
    """The parameter that this tensor begins; nothing where it comes after the first in one."""
    tensor = whole[name]

    def rows(side: Tensor) -> Tensor:
        return side.narrow(0, rank * len(side) // tp, len(side) // tp)

    if name.endswith(("o_proj.weight", "down_proj.weight")):
        width = tensor.shape[1] // tp
        return {name: tensor.narrow(1, rank * width, width).clone()}
    if "gate_proj" in name:
        up = whole[name.replace("gate_proj", "up_proj")]
        return {name.replace("gate_proj", "gate_up_proj"): torch.cat([rows(tensor), rows(up)])}
    if spec.mla and any(inner in name for inner in ("q_proj", "q_b_proj", "kv_b_proj")):
        return {name: rows(tensor).clone()}
    if "q_a_proj" in name:
        latent = whole[name.replace("q_a_proj", "kv_a_proj_with_mqa")]
        return {name.replace("q_a_proj", "fused_qkv_a_proj"): torch.cat([tensor, latent])}
    if "q_proj" in name:
        parts = [rows(tensor)]
        replicas = max(1, tp // spec.num_kv_heads)
        for other in ("k_proj", "v_proj"):
            kv = whole[name.replace("q_proj", other)]
            size = max(1, spec.num_kv_heads // tp) * spec.head_dim
            parts.append(kv.narrow(0, rank // replicas * size, size))
        return {name.replace("q_proj", "qkv_proj"): torch.cat(parts)}
    fused = "kv_a_proj" in name and spec.mla is not None and spec.mla.q_lora_rank is not None
    if fused or any(inner in name for inner in ("k_proj", "v_proj", "up_proj")):
        return {}
    return {name: tensor.clone()}


def _vllm_experts(
    spec: ModelSpec, whole: Tensors, layer: int, place: tuple[int, int], ep: bool
) -> Tensors:
    """Stacks [E, rows, columns] filled expert by expert, shown as matrices."""
    tp, rank = place
    experts = torch.arange(spec.num_experts)
    if ep:
        experts, tp, rank = experts.view(tp, -1)[rank], 1, 0
    size = spec.moe_ffn_size // tp
    dtype = whole["model.norm.weight"].dtype
    w13 = torch.zeros(len(experts), 2 * size, spec.hidden_size, dtype=dtype)
    w2 = torch.zeros(len(experts), spec.hidden_size, size, dtype=dtype)
    for local, expert in enumerate(experts.tolist()):
        gate, up, down = (whole[name] for name in mlp_names(spec, layer, expert))
        w13[local, :size] = gate.narrow(0, rank * size, size)
        w13[local, size:] = up.narrow(0, rank * size, size)
        w2[local] = down.narrow(1, rank * size, size)
    at = f"model.layers.{layer}.{moe_block(spec)}.experts.routed_experts."
    return {f"{at}w13_weight": w13.flatten(0, 1), f"{at}w2_weight": w2.flatten(0, 1)}


def vllm_derived(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """What vLLM's latent attention makes of each ``kv_b_proj`` after loading: per head the keys'
    rows [heads, nope, latent] and the values' rows transposed [heads, latent, value]. Without
    quantization they are views of it, which live with every write.
    """
    assert spec.mla is not None
    out: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            per_head = tensor.view(
                -1, spec.mla.nope_head_dim + spec.mla.v_head_dim, tensor.shape[1]
            )
            keys, values = per_head.split([spec.mla.nope_head_dim, spec.mla.v_head_dim], dim=1)
            at = name.replace("kv_b_proj.weight", "mla_attn.mla_attn.")
            out |= {f"{at}W_UK_T": keys, f"{at}W_UV": values.transpose(1, 2)}
    return out
