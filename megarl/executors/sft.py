"""Supervised fine-tuning with the trainer's own Megatron: an executor that needs no peer.

Each rank reads the demonstrations itself and takes its data-parallel part of every batch, so the
controller steps it without channels. Rank 0 gives metrics to the sink every `LOG_EVERY` steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.algorithms.losses import metrics_from_sums
from megarl.algorithms.sft import sft_loss
from megarl.checkpoint import StartPoint
from megarl.config import RunConfig
from megarl.data.demonstrations import Demonstration, DemonstrationDataset
from megarl.data.packing import split
from megarl.data.tokenizer import load_model_tokenizer
from megarl.errors import ChannelError
from megarl.executors.base import Executor
from megarl.executors.policy import ExportLink, Policy, peak_memory_gib
from megarl.observe.trace import Tracer
from megarl.topology import TRAINER
from megarl.types import Message
from megatron_bridge.runtime import setup
from megatron_bridge.runtime.batch import MicroBatch
from megatron_bridge.runtime.train import LossOutputs, StepResult, TokenOutputs

logger = logging.getLogger(__name__)

LOG_EVERY = 20  # steps between metric rows: a tiny model does thirty steps a second


def _loss(outputs: TokenOutputs, part: MicroBatch) -> LossOutputs:
    mask = part.columns["loss_mask"]
    loss, sums, maxima = sft_loss(outputs.logprobs, mask)
    return LossOutputs(loss_sum=loss, num_tokens=mask.sum(), sums=sums, maxima=maxima)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the executor needs of the run around it."""

    link: ExportLink
    sink: Callable[[int, dict[str, float]], None]  # takes (step, metrics)
    stop_requested: Callable[[], bool]


class SftExecutor(Executor):
    """One trainer rank that learns from demonstrations."""

    name = TRAINER

    def __init__(
        self,
        config: RunConfig,
        start: StartPoint,
        rank: int,
        surroundings: Surroundings,
        tracer: Tracer,
    ):
        self._config, self._start, self._rank = config, start, rank
        self._surroundings, self._tracer = surroundings, tracer
        self._tokens, self._steps, self._began = 0, 0, time.monotonic()

    def init(self) -> None:
        self.policy = Policy(self._config, self._start, self._rank)
        tokenizer = load_model_tokenizer(Path(self._config.model.path))
        path = Path(self._config.data.train_path)
        self._demonstrations = DemonstrationDataset(path, tokenizer, self._config.data)
        self._began = time.monotonic()

    def set_step(self, step: int) -> None:
        """Look now and then whether to stop; the ranks must agree at which step they do."""
        if step % LOG_EVERY == 0:
            self.stopping = setup.any_rank(self._surroundings.stop_requested())

    def get_output(self, channel: str) -> Sequence[Message]:
        raise ChannelError(f"supervised fine-tuning has no channel {channel!r}")

    def put_input(self, channel: str, messages: Sequence[Message]) -> None:
        raise ChannelError(f"supervised fine-tuning has no channel {channel!r}")

    def step(self) -> None:
        """Train on the batch that follows the last one."""
        parts = self._micro_batches()
        with self._tracer.span("train"):
            result = self.policy.trainer.train_step(parts, _loss, temperature=1.0, entropy=False)
        self.policy.version += 1
        self._tokens += result.num_tokens
        self._steps += 1
        if self.policy.version % LOG_EVERY == 0 or self.policy.version == self._config.max_steps:
            self._report(result)

    def _micro_batches(self) -> list[MicroBatch]:
        config, layout = self._config, self._config.trainer.layout
        data, index = config.data, self.policy.version
        batch = self._demonstrations.batch(index, data.train_batch_size, config.seed, data.shuffle)
        lengths = [len(row.tokens) for row in batch]
        budget = config.trainer.max_tokens_per_micro_batch
        parts = split(lengths, layout.dp, budget, layout.micro_batch_multiple)
        mine = parts[layout.coordinate(self._rank).dp]
        return [_micro_batch([batch[mine.rows[row]] for row in pack]) for pack in mine.packs]

    def _report(self, result: StepResult) -> None:
        seconds = time.monotonic() - self._began
        metrics = {
            **metrics_from_sums(result.sums, result.maxima, result.num_tokens),
            "actor/grad_norm": result.grad_norm,
            "actor/lr": result.lr,
            "perf/tokens_per_second": self._tokens / seconds,
            "perf/peak_memory_gib": peak_memory_gib(),
            "timing_s/step": self._tracer.drain()["timing_s/train"] / self._steps,
        }
        self._surroundings.sink(self.policy.version, metrics)
        self._tokens, self._steps, self._began = 0, 0, time.monotonic()

    def save_checkpoint(self) -> None:
        if not self.policy.save_due(stopping=self.stopping):
            return
        self.policy.save(commit=True)
        if self.policy.version == self._config.max_steps:
            self.policy.export(self._surroundings.link)

    def close(self) -> None:
        setup.destroy()


def _micro_batch(rows: Sequence[Demonstration]) -> MicroBatch:
    """Pack demonstrations; without any, one token that has no loss."""
    device = setup.device()
    tokens = [token for row in rows for token in row.tokens] or [0]
    mask = [value for row in rows for value in row.loss_mask] or [0]
    lengths = [len(row.tokens) for row in rows] or [1]
    return MicroBatch(
        lengths=torch.tensor(lengths, device=device),
        tokens=torch.tensor(tokens, device=device),
        columns={"loss_mask": torch.tensor(mask, dtype=torch.float32, device=device)},
    )
