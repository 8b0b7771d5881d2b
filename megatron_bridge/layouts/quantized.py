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
    per_block = how is Quantization.FP8_BLOCK
    if per_block:
        _check_blocks(param)
    elif "experts." in param.name:
        raise PlanError(f"{param.name} stacks experts, which {how.value} would give one scale")
    scales = f"{param.name}_scale_inv" if per_block else f"{param.name}_scale"
    rows, columns = param.shape
    shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if per_block else (1,)
    kind = "block" if per_block else "tensor"
    yield replace(param, dtype=FP8, quantization=kind, scales=scales)
    yield LocalParam(name=scales, shape=shape, shards=(), dtype="float32", derived=True)


def _check_blocks(param: LocalParam) -> None:
    """Refuse parts that share a block, whose scale would mix two weights, and cuts of a block."""
    for shard in param.shards:
        for dim in range(2):
            low, high = shard.local.start[dim], shard.local.stop[dim]
            cut = low % BLOCK or shard.box.start[dim] % BLOCK
            if cut or (high % BLOCK and high != param.shape[dim]):
                raise PlanError(
                    f"{param.name} holds {shard.tensor}, {shard.box}, at {shard.local}, expected "
                    f"multiples of {BLOCK}: blocks of one scale would lie across two weights or "
                    "two ranks"
                )
