"""A recorded run's trainer without its peers: the batches come from the disk.

Owns a `TrainerExecutor` and is to it what the channels are in a run: it gives it the control message
and this rank's part of each recorded batch, and takes its metrics. Every rank reads the files
itself, so the controller steps it without channels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl import checkpoint
from megarl.config import RunConfig
from megarl.errors import ChannelError
from megarl.executors.base import Executor
from megarl.executors.trainer import TrainerExecutor
from megarl.observe.metrics import METRICS_FILE, MetricsTail
from megarl.observe.trace import Tracer
from megarl.rollout.batch import rollout_metrics, split_batch
from megarl.rollout.recorded import read_batch
from megarl.topology import TRAINER
from megarl.types import Control, Message, MetricValues
from megatron_bridge.runtime import setup

logger = logging.getLogger(__name__)

LOSS_DIFFERENCE = "replay/loss_difference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the executor needs of the run around it."""

    sink: Callable[[int, dict[str, float]], None]  # takes (step, metrics)
    stop_requested: Callable[[], bool]


class ReplayExecutor(Executor):
    """One trainer rank that trains on the batches of ``replay_from``, in their order."""

    name = TRAINER

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        trainer: TrainerExecutor,
        surroundings: Surroundings,
        tracer: Tracer,
    ):
        self._config, self._rank, self._trainer = config, rank, trainer
        self._surroundings, self._tracer = surroundings, tracer
        self._recorded = Path(config.replay_from)
        self._known: dict[str, float] = {}  # of the tick's batch, before training

    def init(self) -> None:
        self._trainer.init()
        rows = MetricsTail(self._recorded / METRICS_FILE).poll()
        # Of the last batch there may be no row: its run may have ended before it was trained on.
        losses = {row["step"]: row.get("actor/loss") for row in rows if "actor/loss" in row}
        self._losses = {step: loss for step, loss in losses.items() if loss is not None}

    def set_step(self, step: int) -> None:
        """Begin the tick that trains on batch ``step`` + 1; the ranks agree whether to stop."""
        self.stopping = setup.any_rank(self._surroundings.stop_requested())
        self._step, self._known = step, {}
        self._trainer.set_step(step)
        control = Control(stop=torch.tensor([int(self.stopping)]))
        self._trainer.put_input("control/trainer", (control,))

    def get_output(self, channel: str) -> Sequence[Message]:
        raise ChannelError(f"a replay has no channel {channel!r}")

    def put_input(self, channel: str, messages: Sequence[Message]) -> None:
        raise ChannelError(f"a replay has no channel {channel!r}")

    def prepare(self) -> None:
        """Give the trainer its part of the batch; none where the run is to end."""
        if self.stopping:
            return
        with self._tracer.span("read_batch"):
            scored = read_batch(self._recorded, self._step + 1)
            parts = split_batch(scored, self._config)
        self._known = rollout_metrics(scored, self._step)
        mine = parts[self._config.trainer.layout.coordinate(self._rank).dp]
        self._trainer.put_input("batch", (mine,))

    def step(self) -> None:
        self._trainer.step()
        (message,) = self._trainer.get_output("metrics/trainer")
        assert isinstance(message, MetricValues)
        if metrics := message.to_dict():
            self._report(int(metrics.pop("step")), metrics)

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        if step in self._losses:
            difference = abs(metrics["actor/loss"] - self._losses[step])
            metrics[LOSS_DIFFERENCE] = difference
            logger.info(
                "step %d: recorded loss %.5f, difference %.2e", step, self._losses[step], difference
            )
        tokens_per_second = self._known["perf/total_tokens"] / metrics["timing_s/step"]
        metrics["perf/tokens_per_second"] = tokens_per_second
        self._surroundings.sink(step, {**self._known, **metrics})

    def save_checkpoint(self) -> None:
        """Remove old checkpoints; the trainer has saved within its step."""
        kept = self._config.checkpoint
        if kept.keep_last and self._rank == 0:
            checkpoint.prune(self._config.folder, kept.keep_last, ())

    def close(self) -> None:
        self._trainer.close()
