"""How the tokens of a micro-batch are shared, padded and divided over ranks; called by `model`.

What two neighbours have in common at their beginning, such as the prompt of several samples, has
the same hidden states in both: it is computed once.
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
    places: Tensor  # [T] int64, place of each token; tokens of several sequences may share one
    num_places: int  # of all ranks
    first: Tensor  # [T] bool, tokens without a predecessor
    held: Tensor | None  # places that this context-parallel rank holds, in its order; None: all

    def spread(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens in this rank's places and, for each not shared, the token after it."""
        padded = tokens.new_zeros(self.num_places)
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
            everywhere = of_following.new_zeros(self.num_places)
            everywhere = everywhere.index_copy(0, self.held.to(of_following.device), of_following)
            of_following = reduce_from_tensor_model_parallel_region(everywhere, group=cp_group)
        before = (self.places - 1).clamp(min=0).to(of_following.device)
        return of_following.index_select(0, before).masked_fill(
            self.first.to(of_following.device), 0
        )


def share(lengths: Tensor, tokens: Tensor) -> TokenLayout:
    """Let each sequence have what it has in common with the one before it, from the first token on.

    Args:
        lengths: [B] int64, on the CPU like ``tokens`` [T] int64.
    """
    ends = lengths.cumsum(0)
    starts = ends - lengths
    steps = torch.arange(int(lengths.max()))
    inside = steps < lengths[:, None]
    padded = torch.full(inside.shape, -1).masked_scatter(inside, tokens)
    same = (padded[1:] == padded[:-1]) & inside[1:]
    common = torch.cat([lengths.new_zeros(1), same.to(torch.int64).cumprod(1).sum(1)])
    own = lengths - common
    own_starts = own.cumsum(0) - own
    places = torch.arange(len(tokens)) + (own_starts - common - starts).repeat_interleave(lengths)
    before = 0
    for start, size in zip(starts.tolist(), common.tolist(), strict=True):
        places[start : start + size] = places[before : before + size]
        before = start
    return TokenLayout(
        lengths=lengths,
        places=places,
        num_places=int(own.sum()),
        first=_first(starts, len(tokens)),
        held=None,
    )


def lay_out(lengths: Tensor, layout: TrainerLayout, cp_rank: int) -> TokenLayout:
    """Pad and divide sequences of these lengths [B]."""
    multiple = layout.tp if layout.sequence_parallel else 1
    starts = lengths.cumsum(0) - lengths
    first = _first(starts, int(lengths.sum()))
    places = torch.arange(len(first))
    if layout.cp == 1:
        missing = -len(first) % multiple
        padded = torch.cat([lengths, lengths.new_tensor([missing])]) if missing else lengths
        return TokenLayout(
            lengths=padded, places=places, num_places=len(first) + missing, first=first, held=None
        )
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
    return TokenLayout(
        lengths=padded,
        places=places,
        num_places=int(padded.sum()),
        first=first,
        held=torch.cat(held),
    )


def _first(starts: Tensor, num_tokens: int) -> Tensor:
    first = torch.zeros(num_tokens, dtype=torch.bool)
    first[starts] = True
    return first
