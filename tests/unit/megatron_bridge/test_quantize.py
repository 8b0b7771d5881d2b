"""FP8 against a slow oracle which knows the format from its definition, not from torch's cast."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_bridge import quantize
from megatron_bridge.errors import QuantizationError
from megatron_bridge.operations import is_block_aligned
from megatron_bridge.quantize import (
    BLOCK,
    FP8,
    dequantize_blockwise,
    dequantize_per_tensor,
    quantize_blockwise,
    quantize_per_tensor,
)

TINY = 2.0**-126


def _e4m3(code: int) -> float:
    """Decode a non-negative e4m3 number: 4 bits of exponent biased by 7, 3 of mantissa."""
    exponent, mantissa = code >> 3, code & 7
    return (mantissa / 8 * 2.0**-6) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


NUMBERS = np.array([_e4m3(code) for code in range(127)])  # 0 .. 448; code 127 is NaN


def _nearest(values: np.ndarray) -> np.ndarray:
    """Return the codes of the nearest e4m3 numbers, ties to the even code, saturated."""
    magnitudes = np.minimum(np.abs(values).astype(np.float64), 448.0)
    above = np.searchsorted(NUMBERS, magnitudes)
    below = np.maximum(above - 1, 0)
    up, down = NUMBERS[above] - magnitudes, magnitudes - NUMBERS[below]
    codes = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (codes | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def _oracle(weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Quantise block by block: codes [R, C] and scales."""
    values = weight.double().numpy().astype(np.float32)
    rows, columns = values.shape
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((-(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            largest = np.abs(values[place]).max()
            scale = max(largest / np.float32(448), np.float32(TINY)) if largest else 1.0
            scales[i, j] = scale
            codes[place] = _nearest(values[place] / np.float32(scale))
    return codes, scales


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    out = torch.full((rows, columns), torch.nan).to(FP8)
    scales = torch.full((-(-rows // BLOCK), -(-columns // BLOCK)), torch.nan)
    quantize_blockwise(weight, out, scales)
    return out.view(torch.uint8), scales


def _make_weight(rows: int, columns: int, seed: int, exponent: int = -6) -> Tensor:
    """Return bfloat16 values whose blocks' magnitudes differ."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= 2.0 ** torch.randint(-8, 8, (rows, columns), generator=generator)
    weight[:, : columns // 3] *= 0.01
    return (weight * 2.0**exponent).bfloat16()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    seed=st.integers(0, 99),
    exponent=st.sampled_from([-135, -128, -120, -6, 0, 90]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_codes_and_scales_are_the_oracles(
    rows: int, columns: int, seed: int, exponent: int, dtype: torch.dtype
) -> None:
    weight = _make_weight(rows, columns, seed, exponent).to(dtype)
    codes, scales = _quantize(weight)
    expected_codes, expected_scales = _oracle(weight)
    assert np.array_equal(scales.numpy(), expected_scales)
    assert np.array_equal(codes.numpy(), expected_codes)


def test_float16_with_its_denormals_is_the_oracles_too() -> None:
    weight = _make_weight(140, 260, 1, exponent=-16).half()
    codes, scales = _quantize(weight)
    expected_codes, expected_scales = _oracle(weight)
    assert np.array_equal(scales.numpy(), expected_scales)
    assert np.array_equal(codes.numpy(), expected_codes)


@settings(max_examples=25, deadline=None)
@given(
    edges=st.tuples(*[st.integers(0, 3)] * 4),
    seed=st.integers(0, 99),
    tile_blocks=st.sampled_from([1, 2, 5, 64]),
)
def test_an_aligned_region_has_the_bits_of_the_whole(
    edges: tuple[int, int, int, int], seed: int, tile_blocks: int
) -> None:
    weight = _make_weight(330, 401, seed)
    whole_codes, whole_scales = _quantize(weight)
    (top, bottom), (left, right) = sorted(edges[:2]), sorted(edges[2:])
    blocks = (slice(top, bottom), slice(left, right))
    place = tuple(slice(part.start * BLOCK, part.stop * BLOCK) for part in blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quantize._TILE_NUMEL, "cpu", tile_blocks * BLOCK * BLOCK)
        for region in (weight[place], weight.float()[place], weight.t().contiguous().t()[place]):
            codes, scales = _quantize(region)
            assert torch.equal(codes, whole_codes[place])
            assert torch.equal(scales, whole_scales[blocks])


def test_outputs_may_be_strided_views_and_nothing_beside_them_is_written() -> None:
    weight = _make_weight(200, 300, 3)
    codes, scales = _quantize(weight)
    around = torch.full((210, 400), 77, dtype=torch.uint8)
    scales_around = torch.full((4, 7), 5.0)
    quantize_blockwise(weight, around.view(FP8)[5:205, 50:350], scales_around[1:3, ::2][:, 1:])
    assert torch.equal(around[5:205, 50:350], codes)
    assert torch.equal(scales_around[1:3, 2::2], scales)
    around[5:205, 50:350] = 77
    scales_around[1:3, 2::2] = 5.0
    assert (around == 77).all()
    assert (scales_around == 5.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_zeros_and_of_one_value(dtype: torch.dtype) -> None:
    weight = torch.zeros(256, 256, dtype=dtype)
    weight[:128, 128:] = -0.375  # every element is the largest: saturates at 448, negative
    weight[200, 3] = 2.0**-130  # denormal: too small for its own scale to be a normal number
    codes, scales = _quantize(weight)
    assert scales.tolist() == [[1.0, float(np.float32(0.375) / np.float32(448))], [TINY, 1.0]]
    assert (codes[:128, 128:] == 0xFE).all()
    assert codes[:128, :128].max() == 0
    assert _e4m3(int(codes[200, 3])) == 2.0**-4
    restored = torch.empty_like(weight)
    dequantize_blockwise(codes.view(FP8), scales, restored)
    assert torch.equal(restored[128:], weight[128:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_errors_are_at_most_half_a_step_of_fp8(dtype: torch.dtype) -> None:
    weight = _make_weight(300, 500, 5).to(dtype)
    codes, scales = _quantize(weight)
    restored = torch.empty(300, 500)
    dequantize_blockwise(codes.view(FP8), scales, restored)
    scale = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:300, :500].double()
    exponent = torch.floor(torch.log2((weight.double() / scale).abs())).clamp(min=-6)
    half_step = 2.0 ** (exponent - 4) * scale
    assert ((restored.double() - weight.double()).abs() <= half_step * (1 + 1e-6)).all()


def test_one_scale_for_a_tensor() -> None:
    weight = _make_weight(200, 777, 7)
    out, scale, restored = torch.empty(200, 777).to(FP8), torch.empty(1), torch.empty(200, 777)
    quantize_per_tensor(weight, out, scale)
    largest = weight.float().abs().max().numpy()
    assert scale.item() == largest / np.float32(448)
    expected = _nearest(weight.float().numpy() / scale.numpy())
    assert np.array_equal(out.view(torch.uint8).numpy(), expected)
    dequantize_per_tensor(out, scale, restored)
    values = NUMBERS[expected & 127] * np.where(expected & 128, -1, 1)
    assert np.array_equal(restored.numpy(), values.astype(np.float32) * scale.numpy())
    quantize_per_tensor(torch.zeros(3, 5), out[:3, :5], scale)
    assert scale.item() == 1.0


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_that_are_not_finite_are_refused(value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(130, 300, dtype=dtype)
    weight[129, 299] = value
    with pytest.raises(QuantizationError, match=r"block \[1, 2\] of a weight \[130, 300\]"):
        _quantize(weight)
    with pytest.raises(QuantizationError, match="the tensor of a weight"):
        quantize_per_tensor(weight, torch.empty(130, 300).to(FP8), torch.empty(1))


@pytest.mark.parametrize(
    ("weight", "out", "scales"),
    [
        (torch.ones(4), torch.ones(4).to(FP8), torch.ones(1)),
        (torch.ones(4, 4).int(), torch.ones(4, 4).to(FP8), torch.ones(1, 1)),
        (torch.ones(4, 4), torch.ones(4, 5).to(FP8), torch.ones(1, 1)),
        (torch.ones(4, 4), torch.ones(4, 4), torch.ones(1, 1)),
        (torch.ones(4, 129), torch.ones(4, 129).to(FP8), torch.ones(1, 1)),
        (torch.ones(4, 4), torch.ones(4, 4).to(FP8), torch.ones(1, 1).bfloat16()),
    ],
)
def test_tensors_that_do_not_fit_are_refused(weight: Tensor, out: Tensor, scales: Tensor) -> None:
    with pytest.raises(QuantizationError, match="expected"):
        quantize_blockwise(weight, out, scales)


def test_alignment_is_to_blocks_or_the_end() -> None:
    aligned = [(0, 128), (128, 300), (0, 300), (256, 300), (128, 128)]
    assert all(is_block_aligned(start, stop, 300) for start, stop in aligned)
    assert not any(is_block_aligned(*bounds, 300) for bounds in [(0, 64), (64, 128), (0, 299)])
