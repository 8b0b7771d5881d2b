"""Where weights lie in Meta's original Llama checkpoints, merged over their model-parallel files.

Meta's rotary embedding turns neighbouring rows of a head, (2i, 2i + 1), Hugging Face's turns rows
(i, i + d/2). As bytes a pair of neighbours is one row of twice the width: queries and keys are taken
as matrices of pairs here, whose left halves are the first half of a Hugging Face head's rows, and
whose right halves are the second. Called by `megatron_bridge.io.meta` only.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bridge.box import Box
from megatron_bridge.layouts.kinds import Kind, kinds_of, layer_prefix
from megatron_bridge.layouts.segments import whole
from megatron_bridge.side import Block, Side
from megatron_bridge.spec import CanonicalTensor, LocalParam, ModelSpec, Part, Shard


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's name in a file, and the axis along which the files divide it; None: not divided."""

    name: str
    axis: int | None


PLACES = {
    Part.FINAL_NORM: Place("norm.weight", None),
    Part.HEAD: Place("output.weight", 0),
    Part.INPUT_NORM: Place("attention_norm.weight", None),
    Part.POST_ATTENTION_NORM: Place("ffn_norm.weight", None),
    Part.Q: Place("attention.wq.weight", 0),
    Part.K: Place("attention.wk.weight", 0),
    Part.V: Place("attention.wv.weight", 0),
    Part.O: Place("attention.wo.weight", 1),
    Part.GATE: Place("feed_forward.w1.weight", 0),
    Part.UP: Place("feed_forward.w3.weight", 0),
    Part.DOWN: Place("feed_forward.w2.weight", 1),
}
EMBEDDING = "tok_embeddings.weight"  # divided along either axis, by release
PAIRED = (Part.Q, Part.K)


def meta_side(spec: ModelSpec) -> Side:
    """Return the side of one rank that holds all files of a Llama checkpoint."""
    outer, kinds = kinds_of(spec)
    known = {id(kind): _variant(kind, spec.head_dim) for kind in kinds}
    blocks = [
        Block(
            canonical=layer_prefix(layer),
            local=f"layers.{layer}.",
            variants=(known[id(kind)],),
            ranks=((0,),),
        )
        for layer, kind in enumerate(kinds)
    ]
    variant = _variant(outer, spec.head_dim)
    return Side((Block(canonical="", local="", variants=(variant,), ranks=((0,),)), *blocks))


def _variant(kind: Kind, head_dim: int) -> tuple[LocalParam, ...]:
    params: list[LocalParam] = []
    for part, tensor in kind.parts.items():
        name = EMBEDDING if part is Part.EMBEDDING else PLACES[part].name
        params.append(_pairs(name, tensor, head_dim) if part in PAIRED else whole(name, tensor))
    return tuple(params)


def _pairs(name: str, tensor: CanonicalTensor, head_dim: int) -> LocalParam:
    rows, columns = tensor.shape
    half = head_dim // 2
    shards = tuple(
        Shard(
            tensor=tensor.name,
            box=Box((head + side * half, 0), (head + (side + 1) * half, columns)),
            param=name,
            local=Box((head // 2, side * columns), (head // 2 + half, (side + 1) * columns)),
        )
        for head in range(0, rows, head_dim)
        for side in range(2)
    )
    return LocalParam(name=name, shape=(rows // 2, 2 * columns), shards=shards)
