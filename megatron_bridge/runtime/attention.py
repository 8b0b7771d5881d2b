"""Block-diagonal causal attention over packed sequences, without Transformer Engine.

Part of the local layer spec (`model`), which serves CPUs and GPUs without Transformer Engine.
Sequences of similar lengths are laid side by side in a padded batch and go through torch's
scaled-dot-product attention; no [T, T] mask is ever made. `PackedSequences` carries what all
layers of one micro-batch share.
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

    batches: list[Tensor] = field(default_factory=list)  # [B_i, S_i] packed position of each slot
    slots: Tensor | None = None  # [T] slot of each token in the concatenated batches


def pack(lengths: Tensor, device: torch.device) -> PackedSequences:
    """Describe sequences of these lengths [B] packed back to back."""
    ends = lengths.cumsum(0)
    bounds = torch.cat([ends.new_zeros(1), ends]).to(torch.int32).to(device)
    longest = int(lengths.max())
    batches, slots = padded_batches(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        batches=[batch.to(device) for batch in batches],
        slots=slots.to(device),
    )


def padded_batches(lengths: Tensor) -> tuple[list[Tensor], Tensor]:
    """Group sequences whose lengths differ by less than 2x, so that padding is under a half.

    Returns:
        Per group the packed position [B_i, S_i] of each slot (a slot past the end of its
        sequence repeats the last token: causally, no real query sees it), and the slot [T] of
        each token, counted over all groups.
    """
    starts = lengths.cumsum(0) - lengths
    octaves = torch.log2(lengths.double()).floor().to(torch.int64)
    slots = torch.empty(int(lengths.sum()), dtype=torch.int64)
    batches: list[Tensor] = []
    num_slots = 0
    for octave in octaves.unique().tolist():
        members = (octaves == octave).nonzero()[:, 0]
        sizes = lengths[members, None]
        steps = torch.arange(int(sizes.max()))[None, :]
        batch = starts[members, None] + steps.minimum(sizes - 1)
        real = (steps < sizes).flatten()
        slots[batch.flatten()[real]] = num_slots + real.nonzero()[:, 0]
        num_slots += batch.numel()
        batches.append(batch)
    return batches, slots


class PackedAttention(MegatronModule):
    """Core attention of the local spec: causal within each packed sequence, grouped queries.

    Takes query [T, h, d], key and value [T, g, d] after rotary embedding; returns [T, h * d].
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
        outputs = [self._attend(query, key, value, batch) for batch in packed.batches]
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat.index_select(0, packed.slots)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, batch: Tensor) -> Tensor:
        num_sequences, size = batch.shape
        positions = batch.flatten()

        def laid_out(tensor: Tensor) -> Tensor:
            chosen = tensor.index_select(0, positions)
            return chosen.view(num_sequences, size, *tensor.shape[1:]).transpose(1, 2)

        context = torch.nn.functional.scaled_dot_product_attention(
            laid_out(query),
            laid_out(key),
            laid_out(value),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return context.transpose(1, 2).reshape(num_sequences * size, -1)
