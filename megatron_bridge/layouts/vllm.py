"""Where weights lie in vLLM's memory: its fused projections, key/value replication and padding.

Names are those of vLLM's ``model.named_parameters()``; a tied ``lm_head`` is an alias of the
embedding there and has no parameter of its own. The experts of a layer are two stacks of matrices,
each taken as one matrix here; the ranks of a replica divide every expert. Called by the planner's
users on every rank.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_bridge.errors import PlanError
from megatron_bridge.layouts.segments import consecutive, cut_columns, cut_rows, whole
from megatron_bridge.models.checks import check_generator_layout, vllm_vocab_size
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.parallel import GeneratorLayout
from megatron_bridge.spec import CanonicalTensor, LocalParam, ModelSpec, Part, RankManifest

# The canonical parts that one vLLM parameter stacks, in order; it is named after the first of them.
_STACKED = {
    Part.Q: ("self_attn.qkv_proj.weight", (Part.Q, Part.K, Part.V)),
    Part.Q_BIAS: ("self_attn.qkv_proj.bias", (Part.Q_BIAS, Part.K_BIAS, Part.V_BIAS)),
    Part.GATE: ("mlp.gate_up_proj.weight", (Part.GATE, Part.UP)),
}
_INSIDE_STACKED = {part for _, parts in _STACKED.values() for part in parts[1:]}
_KV = {Part.K, Part.V, Part.K_BIAS, Part.V_BIAS}
_VOCAB = {Part.EMBEDDING, Part.HEAD}
_COLUMNS = {Part.O, Part.DOWN}
_EXPERTS = {Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN}


def _row_range(spec: ModelSpec, tensor: CanonicalTensor, tp: int, tp_rank: int) -> tuple[int, int]:
    """Return (first row, number of rows) of a stacked tensor on a rank.

    Where ranks outnumber key/value heads, ``tp / heads`` neighbours hold the same head.
    """
    if tensor.part in _KV and tp > spec.num_kv_heads:
        return tp_rank // (tp // spec.num_kv_heads) * spec.head_dim, spec.head_dim
    rows = tensor.shape[0] // tp
    return tp_rank * rows, rows


def _expert_params(
    prefix: str, experts: dict[Part, list[CanonicalTensor]], tp: int, tp_rank: int
) -> list[LocalParam]:
    """Return the two stacks of a layer: for each expert its gate block, then its up block; down."""
    rows = experts[Part.EXPERT_GATE][0].shape[0] // tp
    pairs = zip(experts[Part.EXPERT_GATE], experts[Part.EXPERT_UP], strict=True)
    segments = consecutive([(side, tp_rank * rows, rows) for pair in pairs for side in pair])
    height = sum(segment.count for segment in segments)
    return [
        cut_rows(f"{prefix}w13_weight", segments, 0, height),
        cut_columns(f"{prefix}w2_weight", experts[Part.EXPERT_DOWN], tp, tp_rank),
    ]


@lru_cache(maxsize=64)
def _params(spec: ModelSpec, tp: int, tp_rank: int) -> tuple[LocalParam, ...]:
    """Return a rank's parameters: one object for all replicas, which the planner makes use of."""
    by_place: dict[tuple[int | None, Part], CanonicalTensor] = {}
    experts: dict[str, dict[Part, list[CanonicalTensor]]] = {}
    for tensor in canonical_tensors(spec):
        if tensor.part in _EXPERTS:
            block = tensor.name.split(".experts.")[0]
            experts.setdefault(block, {part: [] for part in _EXPERTS})[tensor.part].append(tensor)
        else:
            by_place[tensor.layer, tensor.part] = tensor
    params: list[LocalParam] = []
    for block, parts in experts.items():
        params += _expert_params(f"{block}.experts.routed_experts.", parts, tp, tp_rank)
    for (layer, part), tensor in by_place.items():
        if part in _INSIDE_STACKED:
            continue
        if part in _STACKED:
            suffix, parts = _STACKED[part]
            members = [by_place[layer, member] for member in parts]
            segments = consecutive([(m, *_row_range(spec, m, tp, tp_rank)) for m in members])
            rows = sum(segment.count for segment in segments)
            params.append(cut_rows(f"model.layers.{layer}.{suffix}", segments, 0, rows))
        elif part in _VOCAB:
            rows = vllm_vocab_size(spec) // tp
            segments = consecutive([(tensor, 0, spec.vocab_size)])
            params.append(cut_rows(tensor.name, segments, tp_rank * rows, (tp_rank + 1) * rows))
        elif part in _COLUMNS:
            params.append(cut_columns(tensor.name, [tensor], tp, tp_rank))
        else:
            params.append(whole(tensor.name, tensor))
    return tuple(params)


def vllm_manifest(spec: ModelSpec, tp: int, tp_rank: int, *, global_rank: int) -> RankManifest:
    """Return what rank ``tp_rank`` of a replica of ``tp`` ranks holds.

    Raises:
        PlanError: vLLM cannot run the model with this tp, or there is no such rank.
    """
    check_generator_layout(spec, GeneratorLayout(tp=tp))
    if not 0 <= tp_rank < tp:
        raise PlanError(f"generator rank {tp_rank} is not one of the replica's {tp} ranks")
    return RankManifest(rank=global_rank, params=_params(spec, tp, tp_rank))
