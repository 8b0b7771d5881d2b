"""The loop: Algorithm 1 of the LlamaRL paper (section 5.1), the same program on every rank.

Consumes and produces nothing itself: in each tick it lets this rank's executor exchange messages
over the channels and do its step, in one order that `stages` fixes for all ranks. What a rank waits
for is therefore always the peer of the channel it stands in; the peer comes there after finite
work, or its end closes the connection and the wait raises.

* ``async``: weights, rollouts of the last tick and the batch made of them travel first; then all
  executors step at the same time. The trainer learns from rollouts one policy version old.
* ``sync``: the generator's step stands between the weights and the rollouts, so the batch is made
  of what the present weights sampled: on-policy, one side at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.channels.base import CommunicationChannel
from megarl.config import Mode
from megarl.executors.base import Executor
from megarl.topology import GENERATOR, REWARD, TRAINER

logger = logging.getLogger(__name__)

CONTROL_TRAINER, CONTROL_GENERATOR = "control/trainer", "control/generator"
WEIGHTS, ROLLOUTS, EVAL_ROLLOUTS, BATCH = "weights", "rollouts", "eval_rollouts", "batch"
TRAINER_METRICS, GENERATOR_METRICS = "metrics/trainer", "metrics/generator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One entry of a tick: a channel, or the executors that step."""

    channel: str = ""
    steps: tuple[str, ...] = ()


def stages(mode: Mode) -> tuple[Stage, ...]:
    """Return a tick's stages in their order, which is the same on every rank."""
    head = [CONTROL_TRAINER, CONTROL_GENERATOR, TRAINER_METRICS, WEIGHTS]
    exchange = [ROLLOUTS, EVAL_ROLLOUTS, GENERATOR_METRICS, BATCH]
    before = [Stage(channel=name) for name in head]
    between = [Stage(channel=name) for name in exchange]
    if mode is Mode.SYNC:
        return (*before, Stage(steps=(GENERATOR,)), *between, Stage(steps=(TRAINER, REWARD)))
    return (*before, *between, Stage(steps=(TRAINER, GENERATOR, REWARD)))


def ticks(mode: Mode, start_step: int, max_steps: int) -> range:
    """Return the ticks of a run that has ``start_step`` optimizer steps behind it.

    Tick t samples batch t. It is trained on in tick t (sync) or t + 1 (async). After the last
    training tick one more evaluates the last weights, and in async mode one more brings its result.
    """
    return range(start_step, max_steps + (1 if mode is Mode.SYNC else 3))


class ExecutorController:
    """One rank's controller; `run` once. ``on_step`` is told each tick before it begins."""

    def __init__(
        self,
        executor: Executor,
        channels: Mapping[str, CommunicationChannel],
        order: Sequence[Stage],
        all_ticks: range,
        on_step: Callable[[int], None],
    ):
        self._executor = executor
        self._channels = channels
        self._order = order
        self._ticks = all_ticks
        self._on_step = on_step

    def run(self) -> None:
        """Run all ticks; every rank of the global world enters."""
        executor = self._executor
        for tick in self._ticks:
            self._on_step(tick)
            executor.set_step(tick)
            for stage in self._order:
                if stage.channel:
                    self._channels[stage.channel].communicate()
                elif executor.name in stage.steps:
                    executor.step()
            executor.save_checkpoint()
            if executor.stopping:
                logger.info("stopped by request after tick %d", tick)
                self._report_last_step()
                return

    def _report_last_step(self) -> None:
        """Bring the metrics of the tick that ends the run to where they are written."""
        if TRAINER_METRICS in self._channels:
            self._channels[TRAINER_METRICS].communicate()
        if self._executor.name == REWARD:
            self._executor.step()
