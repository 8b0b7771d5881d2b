"""What a weight-quantised generator holds instead of plain weights: FP8 elements and their scales.

Called by the vLLM layout only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_bridge.errors import PlanError
from megatron_bridge.operations import BLOCK
from megatron_bridge.parallel import Quantization
from megatron_bridge.side import Variant
from megatron_bridge.spec import LocalParam

FP8 = "float8_e4m3fn"


def quantized(params: Iterable[LocalParam], how: Quantization) -> Variant:
    """Return ``params`` as the generator holds them: matrices of linear layers are quantised.

    Raises:
        PlanError: a stacked part or a rank's share is no multiple of a block, as vLLM requires.
    """
    return tuple(part for param in params for part in _one(param, how))


def _one(param: LocalParam, how: Quantization) -> Iterator[LocalParam]:
    if how is Quantization.NONE or len(param.shape) < 2:
        yield param
        return
    per_block = how in (Quantization.FP8_BLOCK, Quantization.FAKE_FP8_BLOCK)
    kind = "block" if per_block else "tensor"
    if per_block:
        _check_blocks(param)
    elif "experts." in param.name:
        raise PlanError(f"{param.name} stacks experts, which {how.value} would give one scale")
    if how in (Quantization.FAKE_FP8_BLOCK, Quantization.FAKE_FP8_TENSOR):
        yield replace(param, quantization=kind)
        return
    scales = f"{param.name}_scale_inv" if per_block else f"{param.name}_scale"
    rows, columns = param.shape
    shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if per_block else (1,)
    yield replace(param, dtype=FP8, quantization=kind, scales=scales)
    yield LocalParam(name=scales, shape=shape, shards=(), dtype="float32", derived=True)


def _check_blocks(param: LocalParam) -> None:
    """Refuse parts that share a block: their scale would mix two weights."""
    for shard in param.shards:
        for dim in range(2):
            low, high = shard.local.start[dim], shard.local.stop[dim]
            if low % BLOCK or (high % BLOCK and high != param.shape[dim]):
                raise PlanError(
                    f"{param.name} holds {shard.tensor} at {shard.local}, expected multiples of "
                    f"{BLOCK}: blocks of one scale would lie across two weights or two ranks"
                )
