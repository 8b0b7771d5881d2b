"""Where weights lie in a Hugging Face checkpoint: every tensor whole, under its own name."""

from __future__ import annotations

from megatron_bridge.layouts.kinds import Kind, kinds_of, layer_prefix
from megatron_bridge.layouts.segments import whole
from megatron_bridge.side import Block, Side
from megatron_bridge.spec import ModelSpec


def _block(kind: Kind, prefix: str, rank: int) -> Block:
    tensors = [
        *kind.parts.values(),
        *(t for parts in kind.experts.values() for t in parts.values()),
    ]
    variant = tuple(whole(tensor.name, tensor) for tensor in tensors)
    return Block(canonical=prefix, local=prefix, variants=(variant,), ranks=((rank,),))


def hf_side(spec: ModelSpec, rank: int, dtype: str = "float32") -> Side:
    """Return the side of one rank that holds the whole checkpoint."""
    outer, kinds = kinds_of(spec)
    layers = [_block(kind, layer_prefix(layer), rank) for layer, kind in enumerate(kinds)]
    return Side((_block(outer, "", rank), *layers), dtype)
