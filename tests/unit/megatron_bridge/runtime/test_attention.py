"""Packed attention against attention of each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge.runtime.attention import PackedAttention, PackedSequences, pack, padded_batches

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


def _compare_with_each_alone(
    packed: PackedSequences, sequences: Sequence[torch.Tensor], seed: int
) -> None:
    """Compare attention and its gradients with those of each sequence, given by its places, alone."""
    generator = torch.Generator().manual_seed(seed)
    total = int(torch.cat(list(sequences)).max()) + 1
    inputs = [
        torch.randn(total, heads, SIZE, generator=generator).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    upstream = torch.randn(total, HEADS * SIZE, generator=generator)
    attention = PackedAttention(SimpleNamespace(multi_latent_attention=False))  # pyright: ignore
    found = attention(*inputs, None, packed_seq_params=packed)

    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = torch.full((total, HEADS * SIZE), torch.nan, dtype=torch.float64)
    for places in sequences:
        expected = expected.index_copy(0, places, _alone(*(x[places] for x in doubles)))
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-4)
    found.backward(upstream)
    expected.backward(upstream.double())
    for ours, theirs in zip(inputs, doubles, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad.float(), atol=1e-5, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 100))
def test_packed_attention_equals_each_sequence_alone(lengths: list[int], seed: int) -> None:
    packed = pack(torch.tensor(lengths), _frequencies(), torch.float32)
    _compare_with_each_alone(packed, torch.arange(sum(lengths)).split(lengths), seed)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(5, 40), min_size=2, max_size=5), st.integers(1, 5))
def test_shared_places_serve_each_of_their_sequences(lengths: list[int], common: int) -> None:
    own = [length - common for length in lengths]
    ranges = torch.arange(common, common + sum(own)).split(own)
    sequences = [torch.cat([torch.arange(common), places]) for places in ranges]
    packed = pack(torch.tensor(lengths), _frequencies(), torch.float32, torch.cat(sequences))
    _compare_with_each_alone(packed, sequences, 0)


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
