"""Where weights lie in Megatron-Core's memory: fused, grouped, padded and spread over stages.

Parameter names carry *global* layer numbers (as `megatron_bridge.runtime` gives them), so that the
chunks of an interleaved pipeline do not collide. Called by the planner's users on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_bridge.errors import PlanError
from megatron_bridge.layouts.kinds import Kind, Parts, kinds_of, layer_prefix
from megatron_bridge.layouts.segments import Segment, consecutive, cut_columns, cut_rows, whole
from megatron_bridge.models.checks import check_layout, layers_of_stage
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.side import Block, Side, Variant
from megatron_bridge.spec import CanonicalTensor, LocalParam, ModelSpec, Part, RankManifest

# Stacked group by group: its queries, its key, its value.
_QKV = {
    "self_attention.linear_qkv.weight": (Part.Q, Part.K, Part.V),
    "self_attention.linear_qkv.bias": (Part.Q_BIAS, Part.K_BIAS, Part.V_BIAS),
}
# Each rank's gate rows above its up rows, and the columns of down.
_MLPS = {
    "mlp.linear_fc{}.weight": (Part.GATE, Part.UP, Part.DOWN),
    "mlp.shared_experts.linear_fc{}.weight": (
        Part.SHARED_GATE,
        Part.SHARED_UP,
        Part.SHARED_DOWN,
    ),
}
_ROWS = {
    Part.MLA_Q: "self_attention.linear_q_proj.weight",
    Part.MLA_Q_UP: "self_attention.linear_q_up_proj.weight",
    Part.MLA_KV_UP: "self_attention.linear_kv_up_proj.weight",
}
_COLUMNS = {Part.O: "self_attention.linear_proj.weight"}
# What is alike on every tensor-parallel rank.
_REPLICATED = {
    Part.INPUT_NORM: "input_layernorm.weight",
    Part.POST_ATTENTION_NORM: "pre_mlp_layernorm.weight",
    Part.Q_NORM: "self_attention.q_layernorm.weight",
    Part.K_NORM: "self_attention.k_layernorm.weight",
    Part.MLA_Q_DOWN: "self_attention.linear_q_down_proj.weight",
    Part.MLA_Q_NORM: "self_attention.q_layernorm.weight",
    Part.MLA_KV_DOWN: "self_attention.linear_kv_down_proj.weight",
    Part.MLA_KV_NORM: "self_attention.kv_layernorm.weight",
    Part.ROUTER: "mlp.router.weight",
    Part.ROUTER_BIAS: "mlp.router.expert_bias",
    Part.SHARED_SWITCH: "mlp.shared_experts.gate_weight",
}
# Transformer Engine's layers hold the norm in front of them; a router has none, nor have MLA's
# projections down.
_FUSED = {
    Part.MLA_Q_NORM: "self_attention.linear_q_up_proj.layer_norm_weight",
    Part.MLA_KV_NORM: "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_FUSED_INPUT_NORM = "self_attention.linear_qkv.layer_norm_weight"
_FUSED_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"
# A multi-token-prediction layer's own parameters beside those of the transformer layer inside.
_MTP_REPLICATED = {
    Part.MTP_EMBEDDING_NORM: "enorm.weight",
    Part.MTP_HIDDEN_NORM: "hnorm.weight",
    Part.MTP_FINAL_NORM: "final_layernorm.weight",
}
_MTP_ROWS = {Part.MTP_PROJECTION: "eh_proj.weight"}


def padded_vocab_size(spec: ModelSpec, layout: TrainerLayout) -> int:
    """Return the rows of the padded vocabulary over all tensor-parallel ranks."""
    multiple = layout.vocab_divisor * layout.tp
    return -(-spec.vocab_size // multiple) * multiple


# --- One kind of layer ------------------------------------------------------------------------


def _qkv_segments(spec: ModelSpec, tensors: Sequence[CanonicalTensor]) -> list[Segment]:
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


def _mlp_params(name: str, parts: Sequence[CanonicalTensor], tp: int, rank: int) -> Variant:
    """Return fc1 and fc2 of (gate, up, down); their number fills the gap in ``name``."""
    gate, up, down = parts
    return (
        _cut_evenly(name.format(1), _gate_up_segments(gate, up, tp), tp, rank),
        cut_columns(name.format(2), [down], tp, rank),
    )


def _inside(kind: Kind) -> str:
    """Return where a layer keeps its transformer layer: it is one, or predicts further tokens."""
    return "transformer_layer." if Part.MTP_PROJECTION in kind.parts else ""


def _replicated_variant(kind: Kind, te: bool) -> Variant:
    parts, names = kind.parts, dict(_REPLICATED)
    if te:
        names |= _FUSED
        if Part.Q in parts:
            names[Part.INPUT_NORM] = _FUSED_INPUT_NORM
        if not kind.experts:
            names[Part.POST_ATTENTION_NORM] = _FUSED_MLP_NORM
    named = {part: _inside(kind) + name for part, name in names.items()} | _MTP_REPLICATED
    return tuple(whole(name, parts[part]) for part, name in named.items() if part in parts)


def _sharded_variant(spec: ModelSpec, kind: Kind, tp: int, rank: int) -> Variant:
    parts, at = kind.parts, _inside(kind)
    params: list[LocalParam] = []
    for name, members in _QKV.items():
        if members[0] in parts:
            segments = _qkv_segments(spec, [parts[part] for part in members])
            params.append(_cut_evenly(at + name, segments, tp, rank))
    rows = {part: at + name for part, name in _ROWS.items()} | _MTP_ROWS
    for part, name in rows.items():
        if part in parts:
            segments = consecutive([(parts[part], 0, parts[part].shape[0])])
            params.append(_cut_evenly(name, segments, tp, rank))
    for part, name in _COLUMNS.items():
        params.append(cut_columns(at + name, [parts[part]], tp, rank))
    for name, members in _MLPS.items():
        if members[0] in parts:
            params += _mlp_params(at + name, [parts[part] for part in members], tp, rank)
    return tuple(params)


def _expert_variant(kind: Kind, layout: TrainerLayout, place: int, te: bool) -> Variant:
    """Return the experts at place ``ep * etp ranks + etp``, numbered from 0: a block of them all."""
    ep, etp = divmod(place, layout.etp)
    count = len(kind.experts) // layout.ep
    params: list[LocalParam] = []
    for local in range(count):
        name = (
            f"linear_fc{{}}.weight{local}" if te else f"local_experts.{local}.linear_fc{{}}.weight"
        )
        expert = kind.experts[ep * count + local]
        parts = [expert[part] for part in (Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN)]
        params += _mlp_params(f"{_inside(kind)}mlp.experts.{name}", parts, layout.etp, etp)
    return tuple(params)


# --- Who holds what ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """The ranks of a pipeline stage, by what they hold."""

    all: tuple[
        tuple[int, ...]
    ]  # one group, by place in tp, so that what all hold comes from who sends the rest
    by_tp: tuple[tuple[int, ...], ...]
    by_expert: tuple[tuple[int, ...], ...]  # place ep * etp ranks + etp


def _stage(layout: TrainerLayout, pp: int, first_rank: int) -> _Stage:
    size = layout.tp * layout.cp * layout.dp
    by_tp: list[list[int]] = [[] for _ in range(layout.tp)]
    by_expert: list[list[int]] = [[] for _ in range(layout.ep * layout.etp)]
    for rank in range(pp * size, (pp + 1) * size):
        at = layout.expert_coordinate(rank)
        by_tp[layout.coordinate(rank).tp].append(first_rank + rank)
        by_expert[at.ep * layout.etp + at.etp].append(first_rank + rank)
    return _Stage(
        all=(tuple(rank for ranks in by_tp for rank in ranks),),
        by_tp=tuple(map(tuple, by_tp)),
        by_expert=tuple(map(tuple, by_expert)),
    )


class _Builder:
    """Makes the blocks of one side; variants are made once for each kind of layer."""

    def __init__(self, spec: ModelSpec, layout: TrainerLayout, te: bool):
        self._spec, self._layout, self._te = spec, layout, te
        self._known: dict[int, tuple[tuple[Variant, ...], ...]] = {}

    def _variants(self, kind: Kind) -> tuple[tuple[Variant, ...], ...]:
        """Return the variants that all hold, that differ by tp, that differ by expert place."""
        if id(kind) not in self._known:
            layout = self._layout
            places = range(layout.ep * layout.etp if kind.experts else 0)
            self._known[id(kind)] = (
                (_replicated_variant(kind, self._te),),
                tuple(
                    _sharded_variant(self._spec, kind, layout.tp, rank) for rank in range(layout.tp)
                ),
                tuple(_expert_variant(kind, layout, place, self._te) for place in places),
            )
        return self._known[id(kind)]

    def layer(self, kind: Kind, layer: int, stage: _Stage) -> Iterator[Block]:
        """Yield the blocks of one layer; those behind the model's own predict further tokens."""
        further = layer - self._spec.num_layers
        places = (stage.all, stage.by_tp, stage.by_expert)
        for variants, ranks in zip(self._variants(kind), places, strict=True):
            if variants:
                yield Block(
                    canonical=layer_prefix(layer),
                    local=f"decoder.layers.{layer}." if further < 0 else f"mtp.layers.{further}.",
                    variants=variants,
                    ranks=ranks,
                )

    def _vocab(self, name: str, tensor: CanonicalTensor) -> tuple[Variant, ...]:
        segments = consecutive([(tensor, 0, self._spec.vocab_size)])
        rows = padded_vocab_size(self._spec, self._layout) // self._layout.tp
        cuts = ((rank * rows, (rank + 1) * rows) for rank in range(self._layout.tp))
        return tuple((cut_rows(name, segments, low, high),) for low, high in cuts)

    def outer(self, parts: Parts, first: _Stage, last: _Stage) -> Iterator[Block]:
        """Yield what the first and last stage hold besides layers.

        A tied model has one embedding where pp is 1; else the last stage keeps a copy as its head,
        and one more as embedding where it predicts further tokens.
        """
        embedding = parts[Part.EMBEDDING]
        tied = Part.HEAD not in parts
        variants = self._vocab("embedding.word_embeddings.weight", embedding)
        yield Block(canonical="", local="", variants=variants, ranks=first.by_tp)
        if self._spec.num_mtp_layers and last is not first:
            yield Block(canonical="", local="", variants=variants, ranks=last.by_tp, is_copy=True)
        norm = whole("decoder.final_layernorm.weight", parts[Part.FINAL_NORM])
        yield Block(canonical="", local="", variants=((norm,),), ranks=last.all)
        if not tied or self._layout.pp > 1:
            variants = self._vocab("output_layer.weight", parts.get(Part.HEAD, embedding))
            yield Block(canonical="", local="", variants=variants, ranks=last.by_tp, is_copy=tied)


@lru_cache(maxsize=16)
def megatron_side(
    spec: ModelSpec, layout: TrainerLayout, *, te: bool = False, dtype: str = "float32"
) -> Side:
    """Return what the trainer's ranks hold; they are the first of the global ranks.

    Args:
        te: the Transformer Engine layer spec, whose linear layers hold the norms and whose experts
            are one module.

    Raises:
        PlanError: the layout does not fit the model.
    """
    check_layout(spec, layout)
    outer, kinds = kinds_of(spec)
    builder = _Builder(spec, layout, te)
    stages = [_stage(layout, pp, 0) for pp in range(layout.pp)]
    blocks = list(builder.outer(outer.parts, stages[0], stages[-1]))
    for pp, stage in enumerate(stages):
        for layer in layers_of_stage(spec, layout, pp):
            blocks += builder.layer(kinds[layer], layer, stage)
    for layer in range(spec.num_layers, spec.num_layers + spec.num_mtp_layers):
        blocks += builder.layer(kinds[layer], layer, stages[-1])
    return Side(tuple(blocks), dtype)


def megatron_manifest(
    spec: ModelSpec, layout: TrainerLayout, rank: int, *, te: bool = False
) -> RankManifest:
    """Return what executor-world rank ``rank`` of the trainer holds.

    Raises:
        PlanError: the layout does not fit the model, or has no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise PlanError(f"trainer rank {rank} is not one of the layout's {layout.world_size} ranks")
    return megatron_side(spec, layout, te=te).manifest(rank)
