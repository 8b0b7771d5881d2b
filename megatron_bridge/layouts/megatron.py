"""Where weights lie in Megatron-Core's memory: fused, grouped, padded and spread over stages.

Parameter names carry *global* layer numbers (as `megatron_bridge.runtime` gives them), so that the
chunks of an interleaved pipeline do not collide. Called by the planner's users on every rank.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_bridge.errors import PlanError
from megatron_bridge.layouts.segments import Segment, consecutive, cut_columns, cut_rows, whole
from megatron_bridge.models.checks import check_layout, layers_of_stage
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.parallel import TrainerCoordinate, TrainerLayout
from megatron_bridge.spec import CanonicalTensor, LocalParam, ModelSpec, Part, RankManifest

_QKV_WEIGHT = (Part.Q, Part.K, Part.V)
_QKV_BIAS = (Part.Q_BIAS, Part.K_BIAS, Part.V_BIAS)
# What is alike on every tensor-parallel rank.
_REPLICATED = {
    Part.INPUT_NORM: "input_layernorm.weight",
    Part.POST_ATTENTION_NORM: "pre_mlp_layernorm.weight",
    Part.Q_NORM: "self_attention.q_layernorm.weight",
    Part.K_NORM: "self_attention.k_layernorm.weight",
}
# Transformer Engine's layers hold the norm in front of them.
_FUSED_NORMS = {
    Part.INPUT_NORM: "self_attention.linear_qkv.layer_norm_weight",
    Part.POST_ATTENTION_NORM: "mlp.linear_fc1.layer_norm_weight",
}
_COLUMNS = {Part.O: "self_attention.linear_proj.weight", Part.DOWN: "mlp.linear_fc2.weight"}


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


def _layer_params(
    spec: ModelSpec, parts: dict[Part, CanonicalTensor], place: tuple[int, int], fused_norms: bool
) -> list[LocalParam]:
    """Return one layer's parameters on tensor-parallel rank ``place = (tp, tp_rank)``."""
    tp, tp_rank = place
    prefix = f"decoder.layers.{parts[Part.Q].layer}."
    replicated = {**_REPLICATED, **(_FUSED_NORMS if fused_norms else {})}
    params = [
        whole(prefix + name, parts[part]) for part, name in replicated.items() if part in parts
    ]
    for kind, fused in (("weight", _QKV_WEIGHT), ("bias", _QKV_BIAS)):
        if fused[0] in parts:
            segments = _qkv_segments(spec, tuple(parts[part] for part in fused))
            name = f"{prefix}self_attention.linear_qkv.{kind}"
            params.append(_cut_evenly(name, segments, tp, tp_rank))
    gate_up = _gate_up_segments(parts[Part.GATE], parts[Part.UP], tp)
    params.append(_cut_evenly(f"{prefix}mlp.linear_fc1.weight", gate_up, tp, tp_rank))
    params += [
        cut_columns(prefix + name, parts[part], tp, tp_rank) for part, name in _COLUMNS.items()
    ]
    return params


def _outer_params(
    spec: ModelSpec, layout: TrainerLayout, rank: int, parts: dict[Part, CanonicalTensor]
) -> list[LocalParam]:
    """Return what the first and last stage hold besides layers.

    A tied model has one embedding where pp is 1; else the last stage keeps a copy as its head.
    """
    at = layout.coordinate(rank)
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
    spec: ModelSpec, layout: TrainerLayout, rank: int, fused_norms: bool
) -> tuple[LocalParam, ...]:
    """Return a rank's parameters: one object for all replicas, which the planner makes use of."""
    at = layout.coordinate(rank)
    outer: dict[Part, CanonicalTensor] = {}
    layers: dict[int, dict[Part, CanonicalTensor]] = {}
    for tensor in canonical_tensors(spec):
        parts = outer if tensor.layer is None else layers.setdefault(tensor.layer, {})
        parts[tensor.part] = tensor
    params = _outer_params(spec, layout, rank, outer)
    for layer in layers_of_stage(spec, layout, at.pp):
        params += _layer_params(spec, layers[layer], (layout.tp, at.tp), fused_norms)
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
        fused_norms: the Transformer Engine layer spec, whose linear layers hold the norms.
        global_rank: the rank written into the manifest; ``rank`` where None.

    Raises:
        PlanError: the layout does not fit the model, or has no such rank.
    """
    check_layout(spec, layout)
    if not 0 <= rank < layout.world_size:
        raise PlanError(f"trainer rank {rank} is not one of the layout's {layout.world_size} ranks")
    at = layout.coordinate(rank)
    first_replica = layout.rank_of(TrainerCoordinate(tp=at.tp, cp=0, dp=0, pp=at.pp))
    return RankManifest(
        rank=rank if global_rank is None else global_rank,
        params=_params(spec, layout, first_replica, fused_norms),
    )
