"""Where weights lie in Megatron-Core's memory: fused, grouped, padded and spread over stages.

Parameter names carry *global* layer numbers (as `megatron_bridge.runtime` gives them), so that the
chunks of an interleaved pipeline do not collide. Called by the planner's users on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_bridge.errors import PlanError
from megatron_bridge.layouts.segments import Segment, consecutive, cut_columns, cut_rows, whole
from megatron_bridge.models.checks import check_layout, layers_of_stage
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.spec import CanonicalTensor, LocalParam, ModelSpec, Part, RankManifest

_QKV_WEIGHT = (Part.Q, Part.K, Part.V)
_QKV_BIAS = (Part.Q_BIAS, Part.K_BIAS, Part.V_BIAS)
# What is alike on every tensor-parallel rank.
_REPLICATED = {
    Part.INPUT_NORM: "input_layernorm.weight",
    Part.POST_ATTENTION_NORM: "pre_mlp_layernorm.weight",
    Part.Q_NORM: "self_attention.q_layernorm.weight",
    Part.K_NORM: "self_attention.k_layernorm.weight",
    Part.ROUTER: "mlp.router.weight",
}
# Transformer Engine's layers hold the norm in front of them; a router has none.
_FUSED_INPUT_NORM = "self_attention.linear_qkv.layer_norm_weight"
_FUSED_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"

Parts = dict[Part, CanonicalTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What decides which weights a rank holds: ranks of one place are replicas."""

    tp: int
    pp: int
    etp: int
    ep: int


@dataclass(slots=True)
class _Layer:
    parts: Parts = field(default_factory=dict)
    experts: dict[int, Parts] = field(default_factory=dict)


def padded_vocab_size(spec: ModelSpec, layout: TrainerLayout) -> int:
    """Return the rows of the padded vocabulary over all tensor-parallel ranks."""
    multiple = layout.vocab_divisor * layout.tp
    return -(-spec.vocab_size // multiple) * multiple


def _qkv_segments(spec: ModelSpec, tensors: tuple[CanonicalTensor, ...]) -> list[Segment]:
    """Lay out the fused rows: for each key/value group its queries, its key, its value."""
    query, key, value = tensors
    head, rows = spec.head_dim, spec.num_heads // spec.num_kv_heads * spec.head_dim
    pieces: list[tuple[CanonicalTensor, int, int]] = []
    for group in range(spec.num_kv_heads):
        pieces += [
            (query, group * rows, rows),
            (key, group * head, head),
            (value, group * head, head),
        ]
    return consecutive(pieces)


def _gate_up_segments(gate: CanonicalTensor, up: CanonicalTensor, tp: int) -> list[Segment]:
    """Lay out the fused rows: for each rank its gate block, then its up block (stride 2)."""
    rows = gate.shape[0] // tp
    return consecutive([(tensor, rank * rows, rows) for rank in range(tp) for tensor in (gate, up)])


def _cut_evenly(name: str, segments: list[Segment], tp: int, tp_rank: int) -> LocalParam:
    rows = sum(segment.count for segment in segments) // tp
    return cut_rows(name, segments, tp_rank * rows, (tp_rank + 1) * rows)


def _mlp_params(name: str, parts: list[CanonicalTensor], tp: int, tp_rank: int) -> list[LocalParam]:
    """Return fc1 and fc2 of (gate, up, down); their number fills the gap in ``name``."""
    gate, up, down = parts
    return [
        _cut_evenly(name.format(1), _gate_up_segments(gate, up, tp), tp, tp_rank),
        cut_columns(name.format(2), [down], tp, tp_rank),
    ]


def _expert_params(
    prefix: str, layer: _Layer, layout: TrainerLayout, place: _Place, grouped: bool
) -> list[LocalParam]:
    """Return the experts of one rank, numbered from 0 on each: a contiguous block of all."""
    count = len(layer.experts) // layout.ep
    params: list[LocalParam] = []
    for local in range(count):
        name = f"local_experts.{local}.linear_fc{{}}.weight"
        if grouped:
            name = f"linear_fc{{}}.weight{local}"
        expert = layer.experts[place.ep * count + local]
        parts = [expert[part] for part in (Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN)]
        params += _mlp_params(f"{prefix}mlp.experts.{name}", parts, layout.etp, place.etp)
    return params


def _replicated_names(fused_norms: bool, dense: bool) -> dict[Part, str]:
    names = dict(_REPLICATED)
    if fused_norms:
        names[Part.INPUT_NORM] = _FUSED_INPUT_NORM
        if dense:
            names[Part.POST_ATTENTION_NORM] = _FUSED_MLP_NORM
    return names


def _layer_params(
    spec: ModelSpec, layer: _Layer, layout: TrainerLayout, place: _Place, fused_norms: bool
) -> list[LocalParam]:
    """Return one layer's parameters on the ranks of a place."""
    parts, tp, tp_rank = layer.parts, layout.tp, place.tp
    prefix = f"decoder.layers.{parts[Part.Q].layer}."
    replicated = _replicated_names(fused_norms, dense=not layer.experts)
    params = [
        whole(prefix + name, parts[part]) for part, name in replicated.items() if part in parts
    ]
    for kind, fused in (("weight", _QKV_WEIGHT), ("bias", _QKV_BIAS)):
        if fused[0] in parts:
            segments = _qkv_segments(spec, tuple(parts[part] for part in fused))
            name = f"{prefix}self_attention.linear_qkv.{kind}"
            params.append(_cut_evenly(name, segments, tp, tp_rank))
    name = f"{prefix}self_attention.linear_proj.weight"
    params.append(cut_columns(name, [parts[Part.O]], tp, tp_rank))
    if layer.experts:
        return params + _expert_params(prefix, layer, layout, place, fused_norms)
    mlp = [parts[part] for part in (Part.GATE, Part.UP, Part.DOWN)]
    return params + _mlp_params(f"{prefix}mlp.linear_fc{{}}.weight", mlp, tp, tp_rank)


def _outer_params(
    spec: ModelSpec, layout: TrainerLayout, at: _Place, parts: Parts
) -> list[LocalParam]:
    """Return what the first and last stage hold besides layers.

    A tied model has one embedding where pp is 1; else the last stage keeps a copy as its head.
    """
    rows = padded_vocab_size(spec, layout) // layout.tp
    low, high = at.tp * rows, (at.tp + 1) * rows
    params: list[LocalParam] = []
    if at.pp == 0:
        segments = consecutive([(parts[Part.EMBEDDING], 0, spec.vocab_size)])
        params.append(cut_rows("embedding.word_embeddings.weight", segments, low, high))
    if at.pp == layout.pp - 1:
        params.append(whole("decoder.final_layernorm.weight", parts[Part.FINAL_NORM]))
        if Part.HEAD in parts or layout.pp > 1:
            head = parts.get(Part.HEAD, parts[Part.EMBEDDING])
            segments = consecutive([(head, 0, spec.vocab_size)])
            params.append(cut_rows("output_layer.weight", segments, low, high))
    return params


@lru_cache(maxsize=1024)
def _params(
    spec: ModelSpec, layout: TrainerLayout, place: _Place, fused_norms: bool
) -> tuple[LocalParam, ...]:
    """Return a rank's parameters: one object for all replicas, which the planner makes use of."""
    outer: Parts = {}
    layers: dict[int, _Layer] = defaultdict(_Layer)
    for tensor in canonical_tensors(spec):
        if tensor.layer is None:
            outer[tensor.part] = tensor
        elif tensor.expert is None:
            layers[tensor.layer].parts[tensor.part] = tensor
        else:
            layers[tensor.layer].experts.setdefault(tensor.expert, {})[tensor.part] = tensor
    params = _outer_params(spec, layout, place, outer)
    for layer in layers_of_stage(spec, layout, place.pp):
        params += _layer_params(spec, layers[layer], layout, place, fused_norms)
    return tuple(params)


def megatron_manifest(
    spec: ModelSpec,
    layout: TrainerLayout,
    rank: int,
    *,
    fused_norms: bool = False,
    global_rank: int | None = None,
) -> RankManifest:
    """Return what executor-world rank ``rank`` of the trainer holds.

    Args:
        fused_norms: the Transformer Engine layer spec, whose linear layers hold the norms and
            whose experts are one module.
        global_rank: the rank written into the manifest; ``rank`` where None.

    Raises:
        PlanError: the layout does not fit the model, or has no such rank.
    """
    check_layout(spec, layout)
    if not 0 <= rank < layout.world_size:
        raise PlanError(f"trainer rank {rank} is not one of the layout's {layout.world_size} ranks")
    at, expert = layout.coordinate(rank), layout.expert_coordinate(rank)
    place = _Place(tp=at.tp, pp=at.pp, etp=expert.etp, ep=expert.ep)
    return RankManifest(
        rank=rank if global_rank is None else global_rank,
        params=_params(spec, layout, place, fused_norms),
    )
