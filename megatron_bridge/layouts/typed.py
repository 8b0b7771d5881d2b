"""Sides whose parameters have the dtypes that a checkpoint gives them, one by one.

Called by the formats of `megatron_bridge.io`. Layers whose parameters are of the same dtypes go on
sharing their variants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from megatron_bridge.layouts.quantized import FP8
from megatron_bridge.operations import BLOCK
from megatron_bridge.side import Block, Side, Variant
from megatron_bridge.spec import LocalParam

SCALES_SUFFIX = (
    "_scale_inv"  # of the tensor of a weight's scales, in Hugging Face's FP8 checkpoints
)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight: one for each block of 128 x 128."""
    return tuple(-(-size // BLOCK) for size in shape)


def _held(param: LocalParam, dtype: str, default: str) -> tuple[LocalParam, ...]:
    if dtype != FP8:
        return (replace(param, dtype="" if dtype == default else dtype),)
    scales = param.name + SCALES_SUFFIX
    weight = replace(param, dtype=FP8, quantization="block", scales=scales)
    shape = scales_shape(param.shape)
    return (
        weight,
        LocalParam(name=scales, shape=shape, shards=(), dtype="float32", derived=True),
    )


def typed(side: Side, dtype_of: Callable[[int, LocalParam], str]) -> Side:
    """Return the side with the dtype of each parameter, given its rank and its full self.

    A float8_e4m3fn parameter is quantised in blocks, with its scales as a parameter beside it.
    """
    dtypes = [
        tuple(
            tuple(dtype_of(ranks[0], param) for param in block.expand(index))
            for index, ranks in enumerate(block.ranks)
        )
        for block in side.blocks
    ]
    counts = Counter(name for block in dtypes for variant in block for name in variant)
    default = max(counts, key=lambda name: (name != FP8, counts[name]))
    known: dict[tuple[object, ...], tuple[Variant, ...]] = {}
    blocks: list[Block] = []
    for block, found in zip(side.blocks, dtypes, strict=True):
        key = (id(block.variants), found)
        if key not in known:
            known[key] = tuple(
                tuple(
                    held
                    for param, dtype in zip(variant, names, strict=True)
                    for held in _held(param, dtype, default)
                )
                for variant, names in zip(block.variants, found, strict=True)
            )
        blocks.append(replace(block, variants=known[key]))
    return Side(tuple(blocks), default)
