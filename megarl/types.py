"""Messages between executors: frozen dataclasses of flat tensors, never pickled objects.

Shape legend, used in the whole project:

    T  packed tokens          B  sequences          G  samples of one prompt (group)
    P  prompts                V  vocabulary         H  hidden size

Sequences are packed back to back: ``tokens`` is [T] and ``lengths`` is [B] with sum T. Columns
named ``.._T`` in prose are aligned with ``tokens``: entry t belongs to token t itself (its
log-probability given the tokens before it), so entries of prompt tokens are 0.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of what a channel carries; every field is a tensor on the CPU."""


def _check_packed(lengths: Tensor, columns: dict[str, Tensor]) -> None:
    num_tokens = int(lengths.sum())
    for name, column in columns.items():
        if column.shape != (num_tokens,):
            raise ValueError(
                f"{name} has shape {tuple(column.shape)}, expected ({num_tokens},): "
                f"the sum of {len(lengths)} lengths"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts(Message):
    """Finished samples with their prompts, as the reward executor scores and batches them.

    Example: one prompt of 3 tokens, one response of 2 sampled with version 7::

        prompt_ids=[12] sample_ids=[0] prompt_lengths=[3] lengths=[5] finished=[1]
        tokens=[1, 5, 6, 9, 2] logprobs=[0, 0, 0, -.7, -.1] versions=[-1, -1, -1, 7, 7]
    """

    prompt_ids: Tensor  # [B] int64, position in the prompt stream
    sample_ids: Tensor  # [B] int64, 0..n-1 within the group
    prompt_lengths: Tensor  # [B] int64
    lengths: Tensor  # [B] int64, prompt and response
    finished: Tensor  # [B] int64, 1 where the response ended by itself (EOS), 0 where it was cut
    tokens: Tensor  # [T] int64
    logprobs: Tensor  # [T] float32, log mu at the sampling temperature; 0 for prompt tokens
    versions: Tensor  # [T] int64, policy version that sampled the token; -1 for prompt tokens

    def __post_init__(self) -> None:
        columns = {"tokens": self.tokens, "logprobs": self.logprobs, "versions": self.versions}
        _check_packed(self.lengths, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Message):
    """What one replica sampled since its last report; made by the generator."""

    request_ids: Tensor  # [B] int64
    lengths: Tensor  # [B] int64, of the responses
    finished: Tensor  # [B] int64, 1 where the response ended by itself (EOS)
    tokens: Tensor  # [T] int64, responses only
    logprobs: Tensor  # [T] float32, log mu at the sampling temperature
    versions: Tensor  # [T] int64, policy version that sampled the token

    def __post_init__(self) -> None:
        columns = {"tokens": self.tokens, "logprobs": self.logprobs, "versions": self.versions}
        _check_packed(self.lengths, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders(Message):
    """The answer to a report: what the replica is to do next; made by the reward executor."""

    state: Tensor  # [1] int64, a `megarl.rollout.messages.State`
    eos: Tensor  # [1] int64, token that ends a response
    aborts: Tensor  # [A] int64, requests to drop
    request_ids: Tensor  # [B] int64, requests to add
    prompt_lengths: Tensor  # [B] int64
    lengths: Tensor  # [B] int64, prompt and what was generated before
    max_tokens: Tensor  # [B] int64, of the whole response
    seeds: Tensor  # [B] int64
    temperatures: Tensor  # [B] float64
    tokens: Tensor  # [T] int64
    logprobs: Tensor  # [T] float32, log mu; 0 for prompt tokens
    versions: Tensor  # [T] int64; -1 for prompt tokens

    def __post_init__(self) -> None:
        columns = {"tokens": self.tokens, "logprobs": self.logprobs, "versions": self.versions}
        _check_packed(self.lengths, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch(Message):
    """One data-parallel rank's part of a batch, ready to train on; made by the reward executor."""

    prompt_ids: Tensor  # [B] int64, as of the rollouts: which sequence it is
    sample_ids: Tensor  # [B] int64
    lengths: Tensor  # [B] int64
    tokens: Tensor  # [T] int64
    loss_mask: Tensor  # [T] float32, 1 where the token enters the loss
    logprobs: Tensor  # [T] float32, log mu
    advantages: Tensor  # [T] float32
    versions: Tensor  # [T] int64, -1 where the token was not sampled
    micro_batches: Tensor  # [B] int64, the micro-batch that holds it, counted through all updates
    num_micro_batches: Tensor  # [U] int64, of each update in order, alike on data-parallel ranks

    def __post_init__(self) -> None:
        columns = {
            "tokens": self.tokens,
            "loss_mask": self.loss_mask,
            "logprobs": self.logprobs,
            "advantages": self.advantages,
            "versions": self.versions,
        }
        _check_packed(self.lengths, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValues(Message):
    """Named numbers of one executor for one step."""

    names: Tensor  # [..] uint8, a JSON list of names
    values: Tensor  # [M] float64

    @classmethod
    def from_dict(cls, metrics: dict[str, float]) -> MetricValues:
        names = json.dumps(list(metrics)).encode()
        return cls(
            names=torch.frombuffer(bytearray(names), dtype=torch.uint8),
            values=torch.tensor(list(metrics.values()), dtype=torch.float64),
        )

    def to_dict(self) -> dict[str, float]:
        names = json.loads(bytes(self.names.tolist()))
        return dict(zip(names, self.values.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(Message):
    """What every executor must decide alike at the head of a tick."""

    stop: Tensor  # [1] int64, 1: save and end after this tick


def field_names(kind: type[Message]) -> list[str]:
    """Return the names of a message's tensors in the order of its fields."""
    return [field.name for field in dataclasses.fields(kind)]


def field_tensors(message: Message) -> list[Tensor]:
    """Return the message's tensors in the order of its fields."""
    return [getattr(message, field.name) for field in dataclasses.fields(message)]
