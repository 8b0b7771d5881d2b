"""FP8 (e4m3) for weights: quantisation in blocks of 128 x 128, or with one scale for a tensor.

`megarl.ddma` calls it, before a transfer or after, whichever end the plan says, and `convert` for
each window of a file. Scales are those of DeepSeek's checkpoints and of vLLM (`weight_scale_inv`,
`weight_scale`): w is about q * scale, with scale = largest |w| / 448. A block's bits depend on that
block alone, so that any block-aligned region of a weight gives the bits of the same region of the
quantised whole, on either end, at any chunking, from bfloat16 or from the same values in float32.

A weight is read in tiles of whole blocks; temporary memory is a few tiles in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_bridge.errors import QuantizationError
from megatron_bridge.operations import BLOCK

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# the same bits as an integer, and its bits without the sign: they order as magnitudes do
_MAGNITUDES = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}
_TILE_NUMEL = {"cpu": 1 << 19, "cuda": 1 << 24}  # stays in a core's cache; hides kernel launches


@torch.no_grad()
def quantize_blockwise(weight: Tensor, out: Tensor, scales: Tensor) -> None:
    """Write a weight's FP8 values and its blocks' scales into the given tensors.

    Rounds to the nearest, ties to even; no value exceeds 448, since its block's largest is 448.
    A block of zeros gets scale 1: its product is 0 under any scale (vLLM's own quantiser writes
    1e-4 / 448). A scale is at least float32's smallest normal number, so that it keeps its
    precision, and survives kernels that flush denormal numbers.

    Args:
        weight: [R, C] bfloat16, float16 or float32; a block-aligned region of the whole
        out: [R, C] float8_e4m3fn
        scales: [ceil(R / 128), ceil(C / 128)] float32

    Raises:
        QuantizationError: shapes or dtypes do not fit, or a value is not finite; the outputs are
            garbage then. Looking for such values waits for the device once.
    """
    _check(weight, out, scales, _num_blocks(weight))
    divisor = _divisor(weight)
    for tile, blocks in _tiles(weight):
        values = _whole_blocks(weight[tile])
        largest = _magnitudes(values).unflatten(0, (-1, BLOCK)).amax(1)
        largest = largest.unflatten(1, (-1, BLOCK)).amax(2)
        scale = _scale(largest.view(weight.dtype), divisor)
        scales[blocks] = scale
        _divide(values, scale, out[tile])
    if not scales.isfinite().all():
        _refuse(weight, f"block {(~scales.isfinite()).nonzero()[0].tolist()}")


@torch.no_grad()
def dequantize_blockwise(quantized: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write quantized: [R, C] times its scales: [ceil(R / 128), ceil(C / 128)] into out: [R, C].

    Products are rounded to float32, then to the dtype of `out`.
    """
    _check(out, quantized, scales, _num_blocks(out))
    for tile, blocks in _tiles(out):
        target = out[tile]
        values = _whole_blocks(quantized[tile].float())
        _blocks(values).mul_(scales[blocks][:, None, :, None])
        target.copy_(values[: target.shape[0], : target.shape[1]])


@torch.no_grad()
def quantize_per_tensor(weight: Tensor, out: Tensor, scale: Tensor) -> None:
    """Write a weight's FP8 values and its one scale; else like `quantize_blockwise`.

    Args:
        weight: [R, C] the whole weight: the scale of a part of it would be another
        out: [R, C] float8_e4m3fn
        scale: [1] float32
    """
    _check(weight, out, scale, (1,))
    divisor = _divisor(weight)
    largest = torch.zeros((), device=weight.device, dtype=weight.dtype)
    for tile, _ in _tiles(weight):
        bits = _magnitudes(weight[tile]).amax()
        largest = torch.maximum(_magnitudes(largest), bits).view(weight.dtype)
    scale.copy_(_scale(largest, divisor))
    for tile, _ in _tiles(weight):
        out[tile].copy_(weight[tile].to(torch.float32, copy=True).div_(scale))
    if not scale.isfinite().all():
        _refuse(weight, "the tensor")


@torch.no_grad()
def dequantize_per_tensor(quantized: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write quantized: [R, C] times scale: [1] into out: [R, C]."""
    _check(out, quantized, scale, (1,))
    for tile, _ in _tiles(out):
        out[tile].copy_(quantized[tile].float().mul_(scale))


def _tiles(weight: Tensor) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Yield each tile of whole blocks: where it lies in the weight, and in the scales."""
    numel = _TILE_NUMEL[weight.device.type]
    num_rows, num_columns = weight.shape
    width = max(BLOCK, min(num_columns + -num_columns % BLOCK, numel // BLOCK))
    height = numel // width // BLOCK * BLOCK
    for row in range(0, num_rows, height):
        for column in range(0, num_columns, width):
            tile = slice(row, row + height), slice(column, column + width)
            first, second = (slice(part.start // BLOCK, part.stop // BLOCK) for part in tile)
            yield tile, (first, second)


def _num_blocks(weight: Tensor) -> tuple[int, ...]:
    return tuple(-(-size // BLOCK) for size in weight.shape)


def _whole_blocks(tile: Tensor) -> Tensor:
    """Fill a tile up with zeros, which change no block's largest magnitude."""
    rows, columns = (-size % BLOCK for size in tile.shape)
    return pad(tile, (0, columns, 0, rows)) if rows or columns else tile


def _blocks(values: Tensor) -> Tensor:
    return values.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def _magnitudes(values: Tensor) -> Tensor:
    """Return |values| as integers of the same order; infinity, then NaN, are the largest."""
    integer, mask = _MAGNITUDES[values.itemsize]
    return values.view(integer) & mask


def _divisor(weight: Tensor) -> Tensor:
    # a tensor: CUDA divides by a Python number as a product with its reciprocal, other bits
    return torch.full((), _FP8_MAX, device=weight.device)


def _scale(largest: Tensor, divisor: Tensor) -> Tensor:
    scale = (largest.float() / divisor).clamp_(min=torch.finfo(torch.float32).tiny)
    return scale.masked_fill_(largest == 0, 1.0)


def _divide(values: Tensor, scale: Tensor, out: Tensor) -> None:
    quotient = values.to(torch.float32, copy=True)
    _blocks(quotient).div_(scale[:, None, :, None])
    out.copy_(quotient[: out.shape[0], : out.shape[1]])


def _check(weight: Tensor, quantized: Tensor, scales: Tensor, num_scales: tuple[int, ...]) -> None:
    if weight.dim() != 2 or weight.dtype not in _FLOATS:
        raise QuantizationError(
            f"FP8: a weight is {list(weight.shape)} of {weight.dtype}, expected a matrix of "
            "bfloat16, float16 or float32"
        )
    if quantized.shape != weight.shape or quantized.dtype != FP8:
        raise QuantizationError(
            f"FP8: quantised values are {list(quantized.shape)} of {quantized.dtype}, expected "
            f"{list(weight.shape)} of {FP8}"
        )
    if scales.shape != num_scales or scales.dtype != torch.float32:
        raise QuantizationError(
            f"FP8: scales are {list(scales.shape)} of {scales.dtype}, expected {list(num_scales)} "
            f"of torch.float32 for a weight {list(weight.shape)}"
        )


def _refuse(weight: Tensor, where: str) -> NoReturn:
    raise QuantizationError(
        f"FP8: {where} of a weight {list(weight.shape)} of {weight.dtype} holds a value that is "
        "not finite, expected finite values"
    )
