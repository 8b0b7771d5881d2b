"""The loop: Algorithm 1 of the LlamaRL paper (section 5.1), the same program on every rank.

Consumes and produces nothing itself: in each tick it lets this rank's executors exchange messages
over the channels and do their steps, in one order of stages for all ranks. What a rank waits
for is therefore always the peer of the channel it stands in; the peer comes there after finite
work, or its end closes the connection and the wait raises.

The weights travel first. From then on the generators decode, and the reward executor serves them,
until the trainer has trained on the tick's batch and stands at the head of the next tick. Which samples
the batch is made of, and so how stale it is, the reward executor decides: with max_staleness 0 it has
only what the present weights sampled, and one side works at a time. Where weights do not travel at
every tick, all ranks pass over that stage alike. Where both sides have the same
ranks, they must: the generators are done with the batch before the trainer takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from megarl.channels.base import CommunicationChannel
from megarl.config import RunConfig
from megarl.executors.base import Executor
from megarl.topology import GENERATOR, REWARD, TRAINER
from megarl.weights import sync_due

logger = logging.getLogger(__name__)

CONTROL_TRAINER, CONTROL_GENERATOR = "control/trainer", "control/generator"
WEIGHTS, BATCH = "weights", "batch"
TRAINER_METRICS, GENERATOR_METRICS = "metrics/trainer", "metrics/generator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One entry of a tick: a channel, the executors that prepare, or those that step."""

    channel: str = ""
    prepares: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    every: int = 1  # passed over at ticks that are no multiple of it, first and last excepted


# Of a tick, in its order, which is the same on every rank.
_HEAD = (Stage(channel=CONTROL_TRAINER), Stage(channel=CONTROL_GENERATOR), Stage(channel=WEIGHTS))
_TAIL = (Stage(channel=TRAINER_METRICS), Stage(channel=GENERATOR_METRICS))
STAGES = (
    *_HEAD,
    Stage(prepares=(REWARD,)),
    Stage(channel=BATCH),
    Stage(steps=(TRAINER, GENERATOR, REWARD)),
    *_TAIL,
)
COLOCATED_STAGES = (
    *_HEAD,
    Stage(prepares=(REWARD,), steps=(GENERATOR,)),
    Stage(channel=BATCH),
    Stage(steps=(TRAINER, REWARD)),
    *_TAIL,
)


def tick_order(config: RunConfig) -> tuple[Stage, ...]:
    """Return the stages of a training run's ticks."""
    order = COLOCATED_STAGES if config.is_colocated else STAGES
    every = config.weights.sync_every
    return tuple(replace(s, every=every) if s.channel == WEIGHTS else s for s in order)


def ticks(start_step: int, max_steps: int) -> range:
    """Return the ticks of a run that has ``start_step`` batches behind it.

    Tick t trains on batch t; after the last training tick one more evaluates the last weights.
    """
    return range(start_step, max_steps + 1)


class ExecutorController:
    """One rank's controller; `run` once.

    Args:
        executors: this rank's, mostly one.
        on_step: is told each tick before it begins.
        inside: makes the world of an executor torch's default one, while its engine works.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        channels: Mapping[str, CommunicationChannel],
        order: Sequence[Stage],
        all_ticks: range,
        on_step: Callable[[int], None],
        inside: Callable[[str], AbstractContextManager[None]],
    ):
        self._executors = executors
        self._channels = channels
        self._order = order
        self._ticks = all_ticks
        self._on_step = on_step
        self._inside = inside

    def run(self) -> None:
        """Run all ticks; every rank of the global world enters."""
        for tick in self._ticks:
            self._on_step(tick)
            for executor in self._executors:
                executor.set_step(tick)
            for stage in self._order:
                if not sync_due(tick, self._ticks[0], self._ticks[-1], stage.every):
                    continue
                if stage.channel:
                    self._channels[stage.channel].communicate()
                self._each(lambda executor: executor.prepare(), stage.prepares)
                self._each(lambda executor: executor.step(), stage.steps)
            self._each(lambda executor: executor.save_checkpoint(), (TRAINER, GENERATOR, REWARD))
            if any(executor.stopping for executor in self._executors):
                logger.info("stopped by request after tick %d", tick)
                return

    def _each(self, work: Callable[[Executor], None], names: Sequence[str]) -> None:
        for executor in self._executors:
            if executor.name in names:
                with self._inside(executor.name):
                    work(executor)
