"""Block-diagonal causal attention over packed sequences, without Transformer Engine.

Part of the local layer spec (`model`), which serves CPUs and GPUs without Transformer Engine.
Sequences of similar lengths are laid side by side in a padded batch and go through torch's
scaled-dot-product attention; no [T, T] mask is ever made. `PackedSequences` carries what all
layers of one micro-batch share. Rotary embedding happens here too: Megatron's own for packed input
loops over sequences in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed (THD) input, with the padded batches of its sequences."""

    batches: list[Tensor] = field(default_factory=list)  # [B_i, S_i] place of each slot
    slots: Tensor | None = None  # [P] a slot of each place in the concatenated batches
    cosines: Tensor | None = None  # [P, 1, d]
    sines: Tensor | None = None  # [P, 1, d], negative in the first half of d


def pack(
    lengths: Tensor,
    inverse_frequencies: Tensor,
    dtype: torch.dtype,
    places: Tensor | None = None,
) -> PackedSequences:
    """Describe sequences of these lengths [B] packed back to back.

    Args:
        lengths: [B] int64, on the CPU.
        inverse_frequencies: [d/2] float32, of the rotary embedding, on the model's device.
        dtype: of queries and keys.
        places: [T] int64, where each token is found, if sequences share some; then the bounds that
            Megatron's description holds say nothing of places.
    """
    device = inverse_frequencies.device
    ends = lengths.cumsum(0)
    bounds = torch.cat([ends.new_zeros(1), ends]).to(torch.int32).to(device)
    longest = int(lengths.max())
    batches, slots = padded_batches(lengths)
    positions = torch.arange(int(ends[-1])) - (ends - lengths).repeat_interleave(lengths)
    if places is not None:
        batches = [places[batch] for batch in batches]
        slots, positions = _smallest(places, slots), _smallest(places, positions)
    angles = torch.outer(positions.to(device).float(), inverse_frequencies)
    cosines, sines = angles.cos(), angles.sin()
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        batches=[batch.to(device) for batch in batches],
        slots=slots.to(device),
        cosines=torch.cat([cosines, cosines], dim=1)[:, None].to(dtype),
        sines=torch.cat([-sines, sines], dim=1)[:, None].to(dtype),
    )


def _smallest(places: Tensor, values: Tensor) -> Tensor:
    """Return for each place the smallest of its tokens' values [T]."""
    found = values.new_empty(int(places.max()) + 1)
    return found.scatter_reduce_(0, places, values, "amin", include_self=False)


def _rounded(size: int) -> int:
    """Return a size that torch's CPU attention likes: 40 takes about half the time of 39."""
    return -(-size // 8) * 8


def padded_batches(lengths: Tensor) -> tuple[list[Tensor], Tensor]:
    """Group sequences of similar lengths, so that padding stays below the number of tokens.

    One group where it stays under a half; else one per octave of lengths.

    Returns:
        Per group the packed position [B_i, S_i] of each slot (a slot past the end of its
        sequence repeats the last token: causally, no real query sees it), and the slot [T] of
        each token, counted over all groups.
    """
    starts = lengths.cumsum(0) - lengths
    num_tokens = int(lengths.sum())
    octaves = torch.log2(lengths.double()).floor().to(torch.int64)
    if len(lengths) * int(lengths.max()) <= 1.5 * num_tokens:
        octaves.zero_()
    slots = torch.empty(num_tokens, dtype=torch.int64)
    batches: list[Tensor] = []
    num_slots = 0
    for octave in octaves.unique().tolist():
        members = (octaves == octave).nonzero()[:, 0]
        sizes = lengths[members, None]
        steps = torch.arange(_rounded(int(sizes.max())))[None, :]
        batch = starts[members, None] + steps.minimum(sizes - 1)
        real = (steps < sizes).flatten()
        slots[batch.flatten()[real]] = num_slots + real.nonzero()[:, 0]
        num_slots += batch.numel()
        batches.append(batch)
    return batches, slots


class _Rotate(torch.autograd.Function):
    """x cos + swap(x) sin over the last dimension, where swap exchanges its halves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        swapped = (grads[0] * sines).roll(grads[0].shape[-1] // 2, -1)
        return swapped.addcmul_(grads[0], cosines), None, None


class PackedAttention(MegatronModule):
    """Core attention of the local spec: rotary, causal within each packed sequence, grouped queries.

    Takes query [T, h, d], key [T, g, d] and value [T, g, d'] before rotary embedding (latent
    attention: after it, since it rotates only a part of each head); returns [T, h * d'].
    """

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSequences,
        **kwargs: Any,
    ) -> Tensor:
        packed = packed_seq_params
        assert packed.slots is not None, "made by pack()"
        if not self.config.multi_latent_attention:
            rotation = packed.cosines, packed.sines
            query, key = (_Rotate.apply(x, *rotation) for x in (query, key))  # pyright: ignore
        outputs = [self._attend(query, key, value, batch) for batch in packed.batches]
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat.index_select(0, packed.slots)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, batch: Tensor) -> Tensor:
        def laid_out(tensor: Tensor) -> Tensor:  # [B_i, heads, S_i, size]
            chosen = tensor.index_select(0, batch.flatten())
            return chosen.view(*batch.shape, *tensor.shape[1:]).transpose(1, 2)

        context = torch.nn.functional.scaled_dot_product_attention(
            laid_out(query),
            laid_out(key),
            laid_out(value),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return context.transpose(1, 2).reshape(batch.numel(), -1)
