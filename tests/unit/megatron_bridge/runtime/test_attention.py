"""Packed attention against attention of each sequence alone."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge.runtime.attention import PackedAttention, pack, padded_batches

HEADS, GROUPS, SIZE = 4, 2, 8


def _frequencies() -> torch.Tensor:
    return 1.0 / 100.0 ** (torch.arange(0, SIZE, 2) / SIZE)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate [n, heads, d] by complex numbers: pairs are (x[i], x[i + d/2])."""
    half = SIZE // 2
    angles = torch.outer(torch.arange(len(x)).double(), _frequencies().double())[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([turned.real, turned.imag], dim=-1)


def _alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key = _rotated(query), _rotated(key)
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / SIZE**0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    table = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", table, value).flatten(1)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 100))
def test_packed_attention_equals_each_sequence_alone(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    inputs = [
        torch.randn(total, heads, SIZE, generator=generator).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    upstream = torch.randn(total, HEADS * SIZE, generator=generator)
    attention = PackedAttention(SimpleNamespace(multi_latent_attention=False))  # pyright: ignore
    packed = pack(torch.tensor(lengths), _frequencies(), torch.float32)
    found = attention(*inputs, None, packed_seq_params=packed)

    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = torch.cat(
        [_alone(*parts) for parts in zip(*(x.split(lengths) for x in doubles), strict=True)]
    )
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-4)
    found.backward(upstream)
    expected.backward(upstream.double())
    for ours, theirs in zip(inputs, doubles, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad.float(), atol=1e-5, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(5, 40), min_size=2, max_size=5), st.integers(1, 5))
def test_shared_places_serve_each_of_their_sequences(lengths: list[int], common: int) -> None:
    generator = torch.Generator().manual_seed(0)
    own = [length - common for length in lengths]
    shared = torch.arange(common)
    starts = common + torch.tensor([0, *own[:-1]]).cumsum(0)
    places = [
        torch.cat([shared, torch.arange(start, start + size)])
        for start, size in zip(starts.tolist(), own, strict=True)
    ]
    total = common + sum(own)
    inputs = [
        torch.randn(total, heads, SIZE, generator=generator).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    upstream = torch.randn(total, HEADS * SIZE, generator=generator)
    attention = PackedAttention(SimpleNamespace(multi_latent_attention=False))  # pyright: ignore
    packed = pack(torch.tensor(lengths), _frequencies(), torch.float32, torch.cat(places))
    found = attention(*inputs, None, packed_seq_params=packed)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = torch.empty(total, HEADS * SIZE, dtype=torch.float64)
    for place in places:
        expected = expected.index_copy(0, place, _alone(*(x[place] for x in doubles)))
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-4)
    found.backward(upstream)
    expected.backward(upstream.double())
    for ours, theirs in zip(inputs, doubles, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad.float(), atol=1e-5, rtol=1e-4)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_padding_is_bounded_and_every_token_has_its_slot(lengths: list[int]) -> None:
    batches, slots = padded_batches(torch.tensor(lengths))
    positions = torch.cat([batch.flatten() for batch in batches])
    assert torch.equal(positions[slots], torch.arange(sum(lengths)))
    # under 2x of the tokens, plus what rounding a batch's width up to 8 adds to each sequence
    assert len(positions) < 2 * sum(lengths) + 8 * len(lengths)


def test_the_description_names_the_bounds_of_the_sequences() -> None:
    packed = pack(torch.tensor([3, 1, 4]), _frequencies(), torch.bfloat16)
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == [0, 3, 4, 8]
    assert packed.cu_seqlens_q.dtype == torch.int32
    assert packed.max_seqlen_q == 4
    assert packed.cosines is not None
    assert packed.cosines.dtype == torch.bfloat16
