"""The unit of work of model and trainer, and what the model says of it; no Megatron in it.

Executors make `MicroBatch`es; loss functions receive them together with `TokenOutputs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences packed back to back without padding; a column's entry t belongs to token t.

    Raises:
        ValueError: lengths, tokens and columns do not fit together.
    """

    lengths: Tensor  # [B] int64
    tokens: Tensor  # [T] int64
    columns: dict[str, Tensor] = field(default_factory=dict)  # each [T]

    def __post_init__(self) -> None:
        if len(self.lengths) == 0 or int(self.lengths.min()) < 1:
            raise ValueError(f"a micro-batch needs sequences of 1 token or more: {self.lengths}")
        num_tokens = int(self.lengths.sum())
        for name, column in {"tokens": self.tokens, **self.columns}.items():
            if column.shape != (num_tokens,):
                raise ValueError(
                    f"{name} of a micro-batch has shape {tuple(column.shape)}, expected "
                    f"({num_tokens},): the sum of {len(self.lengths)} lengths"
                )

    def to(self, device: torch.device) -> MicroBatch:
        """Return it with all tensors on ``device``; loss functions get it where the model is."""
        if self.tokens.device == device:
            return self
        return MicroBatch(
            lengths=self.lengths.to(device),
            tokens=self.tokens.to(device),
            columns={name: column.to(device) for name, column in self.columns.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """What the model says of each token given those before it; 0 at a sequence's first token."""

    logprobs: Tensor  # [T] float32
    entropy: Tensor | None  # [T] float32, of the distribution that the token was drawn from
