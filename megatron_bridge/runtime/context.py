"""How the tokens of a micro-batch are padded and divided over ranks; called by `model`.

Sequence parallelism needs a multiple of tp tokens: one more sequence fills up. Context parallelism
cuts each sequence into 2 cp chunks, of which a rank holds one from the front and its mirror from
the back, so that causal attention is balanced (Megatron-Core's and Transformer Engine's layout).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_bridge.parallel import TrainerLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """Where the tokens [T] of a micro-batch lie among padded places, and which this rank holds."""

    lengths: Tensor  # [B'] int64, padded sequences
    places: Tensor  # [T] int64, place of each token
    first: Tensor  # [T] bool, tokens without a predecessor
    held: Tensor | None  # places that this context-parallel rank holds, in its order; None: all

    def spread(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens in this rank's places and, for each, the token after it."""
        padded = tokens.new_zeros(int(self.lengths.sum()))
        padded[self.places] = tokens
        following = padded.roll(-1)
        if self.held is None:
            return padded, following
        return padded[self.held], following[self.held]

    def of_tokens(self, of_following: Tensor, cp_group: ProcessGroup) -> Tensor:
        """Move what this rank's places say of the token after each to that token: [T], all ranks.

        A first token has 0. The gradient of each rank is that of its own places.
        """
        if self.held is not None:
            everywhere = of_following.new_zeros(int(self.lengths.sum()))
            everywhere = everywhere.index_copy(0, self.held.to(of_following.device), of_following)
            of_following = reduce_from_tensor_model_parallel_region(everywhere, group=cp_group)
        before = (self.places - 1).clamp(min=0).to(of_following.device)
        return of_following.index_select(0, before).masked_fill(
            self.first.to(of_following.device), 0
        )


def lay_out(lengths: Tensor, layout: TrainerLayout, cp_rank: int) -> TokenLayout:
    """Pad and divide sequences of these lengths [B]."""
    multiple = layout.tp if layout.sequence_parallel else 1
    starts = lengths.cumsum(0) - lengths
    first = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    first[starts] = True
    places = torch.arange(len(first))
    if layout.cp == 1:
        missing = -len(first) % multiple
        padded = torch.cat([lengths, lengths.new_tensor([missing])]) if missing else lengths
        return TokenLayout(lengths=padded, places=places, first=first, held=None)
    num_chunks = 2 * layout.cp
    chunks = -(-lengths // (num_chunks * multiple)) * multiple
    padded = chunks * num_chunks
    padded_starts = padded.cumsum(0) - padded
    places += (padded_starts - starts).repeat_interleave(lengths)
    held = [
        torch.arange(chunk) + start + number * chunk
        for start, chunk in zip(padded_starts.tolist(), chunks.tolist(), strict=True)
        for number in (cp_rank, num_chunks - 1 - cp_rank)
    ]
    return TokenLayout(lengths=padded, places=places, first=first, held=torch.cat(held))
