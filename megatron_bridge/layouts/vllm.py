"""Where weights lie in vLLM's memory: its fused projections, key/value replication and padding.

Names are those of vLLM's ``model.named_parameters()``; a tied ``lm_head`` is an alias of the
embedding there and has no parameter of its own. The experts of a layer are two stacks of matrices,
each taken as one matrix here; the ranks of a replica divide every expert, or with ``ep`` the number
of them. Called by the planner's users on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_bridge.errors import PlanError
from megatron_bridge.layouts.kinds import Kind, Parts, kinds_of, layer_prefix
from megatron_bridge.layouts.quantized import quantized
from megatron_bridge.layouts.segments import consecutive, cut_columns, cut_rows, whole
from megatron_bridge.models.checks import (
    check_generator_layout,
    generator_layers_of_stage,
    vllm_vocab_size,
)
from megatron_bridge.parallel import GeneratorLayout, Quantization
from megatron_bridge.side import Block, Side, Variant
from megatron_bridge.spec import CanonicalTensor, LocalParam, ModelSpec, Part, RankManifest

# The canonical parts that one vLLM parameter stacks, in order, and what its name says instead of
# the first one's.
_STACKED = (
    ("q_proj", "qkv_proj", (Part.Q, Part.K, Part.V)),
    ("q_proj", "qkv_proj", (Part.Q_BIAS, Part.K_BIAS, Part.V_BIAS)),
    ("gate_proj", "gate_up_proj", (Part.GATE, Part.UP)),
    ("gate_proj", "gate_up_proj", (Part.SHARED_GATE, Part.SHARED_UP)),
)
# The same, but whole on every rank.
_STACKED_WHOLE = (("q_a_proj", "fused_qkv_a_proj", (Part.MLA_Q_DOWN, Part.MLA_KV_DOWN)),)
_LINEAR_WHOLE = (Part.MLA_Q_DOWN, Part.MLA_KV_DOWN)  # quantised, where the generator is
_ROWS = (Part.MLA_Q, Part.MLA_Q_UP, Part.MLA_KV_UP)
_COLUMNS = (Part.O, Part.DOWN, Part.SHARED_DOWN)
_SHARDED = {part for *_, parts in _STACKED for part in parts} | {*_ROWS, *_COLUMNS}
_KV = {Part.K, Part.V, Part.K_BIAS, Part.V_BIAS}
_EXPERTS = (Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN)


def _row_range(spec: ModelSpec, tensor: CanonicalTensor, tp: int, tp_rank: int) -> tuple[int, int]:
    """Return (first row, number of rows) of a stacked tensor on a rank.

    Where ranks outnumber key/value heads, ``tp / heads`` neighbours hold the same head.
    """
    if tensor.part in _KV and tp > spec.num_kv_heads:
        return tp_rank // (tp // spec.num_kv_heads) * spec.head_dim, spec.head_dim
    rows = tensor.shape[0] // tp
    return tp_rank * rows, rows


def _whole_variant(parts: Parts, how: Quantization) -> Variant:
    params: list[LocalParam] = []
    stacked: set[Part] = set()
    for old, new, members in _STACKED_WHOLE:
        if all(part in parts for part in members):
            tensors = [parts[part] for part in members]
            segments = consecutive([(tensor, 0, tensor.shape[0]) for tensor in tensors])
            rows = sum(segment.count for segment in segments)
            params.append(cut_rows(tensors[0].name.replace(old, new), segments, 0, rows))
            stacked |= set(members)
    rest = {part: whole(t.name, t) for part, t in parts.items() if part not in _SHARDED | stacked}
    params += [rest.pop(part) for part in _LINEAR_WHOLE if part in rest]
    return (*quantized(params, how), *rest.values())


def _sharded_variant(spec: ModelSpec, parts: Parts, tp: int, tp_rank: int) -> Variant:
    params: list[LocalParam] = []
    for old, new, members in _STACKED:
        if members[0] in parts:
            tensors = [parts[part] for part in members]
            segments = consecutive([(t, *_row_range(spec, t, tp, tp_rank)) for t in tensors])
            rows = sum(segment.count for segment in segments)
            params.append(cut_rows(tensors[0].name.replace(old, new), segments, 0, rows))
    for tensor in (parts[part] for part in _ROWS if part in parts):
        rows = tensor.shape[0] // tp
        segments = consecutive([(tensor, 0, tensor.shape[0])])
        params.append(cut_rows(tensor.name, segments, tp_rank * rows, (tp_rank + 1) * rows))
    for tensor in (parts[part] for part in _COLUMNS if part in parts):
        params.append(cut_columns(tensor.name, [tensor], tp, tp_rank))
    return tuple(params)


def _expert_variant(kind: Kind, layout: GeneratorLayout, tp_rank: int) -> Variant:
    """Return the two stacks of a layer: for each expert its gate block, then its up block; down."""
    experts = [kind.experts[index] for index in sorted(kind.experts)]
    tp, cut = layout.tp, tp_rank
    if layout.ep:
        count = len(experts) // tp
        experts, tp, cut = experts[tp_rank * count : (tp_rank + 1) * count], 1, 0
    gate, up, down = ([expert[part] for expert in experts] for part in _EXPERTS)
    rows = gate[0].shape[0] // tp
    pieces = [(side, cut * rows, rows) for pair in zip(gate, up, strict=True) for side in pair]
    prefix = f"{kind.experts[0][Part.EXPERT_GATE].name.split('experts.')[0]}experts.routed_experts."
    height = len(pieces) * rows
    return (
        cut_rows(f"{prefix}w13_weight", consecutive(pieces), 0, height),
        cut_columns(f"{prefix}w2_weight", down, tp, cut),
    )


class _Builder:
    """Makes the blocks of one side; variants are made once for each kind of layer."""

    def __init__(self, spec: ModelSpec, layout: GeneratorLayout):
        self._spec, self._layout = spec, layout
        self._known: dict[int, tuple[tuple[Variant, ...], ...]] = {}

    def _variants(self, kind: Kind) -> tuple[tuple[Variant, ...], ...]:
        """Return the variants that all ranks hold, and those that differ by rank of a replica."""
        if id(kind) not in self._known:
            spec, layout = self._spec, self._layout
            alike = _whole_variant(kind.parts, layout.quantization)
            differing: list[Variant] = []
            for rank in range(layout.tp):
                params = _sharded_variant(spec, kind.parts, layout.tp, rank)
                if kind.experts:
                    params += _expert_variant(kind, layout, rank)
                differing.append(quantized(params, layout.quantization))
            self._known[id(kind)] = ((alike,), tuple(differing))
        return self._known[id(kind)]

    def layer(self, kind: Kind, layer: int, by_tp: tuple[tuple[int, ...], ...]) -> Iterator[Block]:
        """Yield the blocks of one layer."""
        prefix = layer_prefix(layer)
        places = (_joined(by_tp), by_tp)
        for variants, ranks in zip(self._variants(kind), places, strict=True):
            yield Block(canonical=prefix, local=prefix, variants=variants, ranks=ranks)

    def _vocab(self, tensor: CanonicalTensor) -> tuple[Variant, ...]:
        segments = consecutive([(tensor, 0, self._spec.vocab_size)])
        rows = vllm_vocab_size(self._spec) // self._layout.tp
        cuts = ((rank * rows, (rank + 1) * rows) for rank in range(self._layout.tp))
        return tuple((cut_rows(tensor.name, segments, low, high),) for low, high in cuts)

    def outer(self, parts: Parts, stages: Sequence[tuple[tuple[int, ...], ...]]) -> Iterator[Block]:
        """Yield what stands outside layers; the last stage of a tied model holds a copy."""
        first, last = stages[0], stages[-1]
        embedding = self._vocab(parts[Part.EMBEDDING])
        yield Block(canonical="", local="", variants=embedding, ranks=first)
        norm = whole(parts[Part.FINAL_NORM].name, parts[Part.FINAL_NORM])
        yield Block(canonical="", local="", variants=((norm,),), ranks=_joined(last))
        if Part.HEAD in parts:
            head = self._vocab(parts[Part.HEAD])
            yield Block(canonical="", local="", variants=head, ranks=last)
        elif len(stages) > 1:
            yield Block(canonical="", local="", variants=embedding, ranks=last)


@lru_cache(maxsize=256)
def _joined(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...]]:
    """Return one group of all ranks, those of one place together; one object for one argument."""
    return (tuple(rank for ranks in groups for rank in ranks),)


@lru_cache(maxsize=16)
def vllm_side(
    spec: ModelSpec, layout: GeneratorLayout, *, first_rank: int = 0, dtype: str = "float32"
) -> Side:
    """Return what all replicas hold; their global ranks follow one another from ``first_rank`` on.

    Raises:
        PlanError: vLLM cannot run the model in this layout.
    """
    check_generator_layout(spec, layout)
    outer, kinds = kinds_of(spec)
    builder = _Builder(spec, layout)
    size = layout.ranks_per_replica
    stages = [
        tuple(
            tuple(
                first_rank + replica * size + pp * layout.tp + tp
                for replica in range(layout.replicas)
            )
            for tp in range(layout.tp)
        )
        for pp in range(layout.pp)
    ]
    blocks = list(builder.outer(outer.parts, stages))
    for pp, by_tp in enumerate(stages):
        for layer in generator_layers_of_stage(spec, layout, pp):
            blocks += builder.layer(kinds[layer], layer, by_tp)
    return Side(tuple(blocks), dtype)


def vllm_manifest(
    spec: ModelSpec,
    tp: int,
    tp_rank: int,
    *,
    global_rank: int,
    layout: GeneratorLayout | None = None,
) -> RankManifest:
    """Return what rank ``tp_rank`` of a replica of ``tp`` ranks holds.

    Raises:
        PlanError: vLLM cannot run the model with this tp, or there is no such rank.
    """
    one = replace(layout or GeneratorLayout(tp=tp), replicas=1)
    if not 0 <= tp_rank < one.ranks_per_replica:
        raise PlanError(
            f"generator rank {tp_rank} is not one of the replica's {one.ranks_per_replica} ranks"
        )
    manifest = vllm_side(spec, one).manifest(tp_rank)
    return replace(manifest, rank=global_rank)
