"""The loop on fakes: who talks and steps when, in both modes."""

from collections.abc import Sequence

import pytest

from megarl.channels.base import CommunicationChannel, CommunicationType
from megarl.config import Mode
from megarl.controller import (
    BATCH,
    ROLLOUTS,
    TRAINER_METRICS,
    WEIGHTS,
    ExecutorController,
    stages,
    ticks,
)
from megarl.executors.base import Executor
from megarl.types import Message


class _FakeExecutor(Executor):
    def __init__(self, name: str, events: list[str], stop_at: int = -1) -> None:
        self.name, self._events, self._stop_at = name, events, stop_at

    def init(self) -> None: ...

    def set_step(self, step: int) -> None:
        self._events.append(f"tick {step}")
        self.stopping = step == self._stop_at

    def step(self) -> None:
        self._events.append("step")

    def get_output(self, channel: str) -> Sequence[Message]:
        return ()

    def put_input(self, channel: str, messages: Sequence[Message]) -> None: ...

    def save_checkpoint(self) -> None:
        self._events.append("save")


class _FakeChannel(CommunicationChannel):
    communication_type = CommunicationType.GATHER

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self._events = name, events

    def communicate(self) -> None:
        self._events.append(self.name)


def _run(mode: Mode, name: str, all_ticks: range, stop_at: int = -1) -> list[str]:
    events: list[str] = []
    order = stages(mode)
    channels = {s.channel: _FakeChannel(s.channel, events) for s in order if s.channel}
    executor = _FakeExecutor(name, events, stop_at)
    ExecutorController(executor, channels, order, all_ticks, lambda tick: None).run()
    return events


def test_async_exchanges_everything_before_anyone_steps() -> None:
    for name in ("trainer", "generator", "reward"):
        events = _run(Mode.ASYNC, name, range(1))
        assert events.index(WEIGHTS) < events.index(ROLLOUTS) < events.index(BATCH)
        assert events[-2:] == ["step", "save"]


def test_sync_lets_the_generator_step_between_weights_and_rollouts() -> None:
    generator = _run(Mode.SYNC, "generator", range(1))
    assert generator.index(WEIGHTS) < generator.index("step") < generator.index(ROLLOUTS)
    trainer = _run(Mode.SYNC, "trainer", range(1))
    assert trainer.index(BATCH) < trainer.index("step")


@pytest.mark.parametrize("mode", list(Mode))
def test_all_ranks_meet_the_channels_in_one_order(mode: Mode) -> None:
    orders = [
        [event for event in _run(mode, name, range(2)) if event not in ("step", "save")]
        for name in ("trainer", "generator", "reward")
    ]
    assert orders[0] == orders[1] == orders[2]


def test_a_stop_ends_the_run_after_the_tick_is_saved() -> None:
    events = _run(Mode.ASYNC, "trainer", range(9), stop_at=1)
    assert events[-2:] == ["save", TRAINER_METRICS]  # the last step's metrics are not lost
    assert [event for event in events if event.startswith("tick")] == ["tick 0", "tick 1"]


def test_the_last_weights_are_evaluated_after_the_last_step() -> None:
    # sync trains batch t in tick t; async in tick t + 1, and an evaluation's result needs a tick.
    assert list(ticks(Mode.SYNC, 0, 2)) == [0, 1, 2]
    assert list(ticks(Mode.ASYNC, 0, 2)) == [0, 1, 2, 3, 4]
    assert list(ticks(Mode.SYNC, 5, 6)) == [5, 6]
