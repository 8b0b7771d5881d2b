"""The loop on fakes: who talks and steps when, with executors apart and colocated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from megarl.channels.base import CommunicationChannel, CommunicationType
from megarl.config import Placement, RunConfig, WeightsConfig
from megarl.controller import (
    BATCH,
    COLOCATED_STAGES,
    STAGES,
    TRAINER_METRICS,
    WEIGHTS,
    ExecutorController,
    Stage,
    tick_order,
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

    def prepare(self) -> None:
        self._events.append("prepare")

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


def _run(
    order: Sequence[Stage], *names: str, all_ticks: range = range(1), stop_at: int = -1
) -> list[str]:
    """Return what happens on a rank that holds the executors ``names``, in its order."""
    events: list[str] = []

    @contextmanager
    def inside(name: str) -> Iterator[None]:
        events.append(f"in {name}")
        yield

    channels = {s.channel: _FakeChannel(s.channel, events) for s in order if s.channel}
    executors = [_FakeExecutor(name, events, stop_at) for name in names]
    ExecutorController(executors, channels, order, all_ticks, lambda tick: None, inside).run()
    return events


@pytest.mark.parametrize("name", ["trainer", "generator", "reward"])
def test_executors_work_at_the_same_time_once_weights_and_batch_have_come(name: str) -> None:
    events = _run(STAGES, name)
    assert events.index(WEIGHTS) < events.index(BATCH) < events.index("step")
    assert events.index("step") < events.index("save") == len(events) - 1
    # Only who makes the batch has work before it, and under the new weights.
    prepares = "prepare" in events
    assert prepares == (name == "reward")
    assert not prepares or events.index(WEIGHTS) < events.index("prepare") < events.index(BATCH)


def test_colocated_generators_step_before_the_batch_and_the_trainer_after_it() -> None:
    events = _run(COLOCATED_STAGES, "trainer", "generator")
    steps = [events[i - 1] for i, event in enumerate(events) if event == "step"]
    assert steps == ["in generator", "in trainer"]  # each in its own world
    first, second = (i for i, event in enumerate(events) if event == "step")
    assert events.index(WEIGHTS) < first < events.index(BATCH) < second
    reward = _run(COLOCATED_STAGES, "reward")
    assert reward.index("prepare") < reward.index(BATCH) < reward.index("step")


@pytest.mark.parametrize("order", [STAGES, COLOCATED_STAGES], ids=["apart", "colocated"])
def test_all_ranks_meet_the_channels_in_one_order(order: Sequence[Stage]) -> None:
    names = {stage.channel for stage in order if stage.channel}
    met = [
        [event for event in _run(order, name, all_ticks=range(2)) if event in names]
        for name in ("trainer", "generator", "reward")
    ]
    assert met[0] == met[1] == met[2]
    assert len(met[0]) == 2 * len(names)


@pytest.mark.parametrize(
    ("every", "all_ticks", "synced"),
    [
        (1, range(3), [0, 1, 2]),
        (2, range(6), [0, 2, 4, 5]),
        (3, range(5, 9), [5, 6, 8]),  # resumed between two transfers
        (4, range(1, 3), [1, 2]),
        (4, range(7, 8), [7]),
    ],
)
@pytest.mark.parametrize("placement", list(Placement))
def test_weights_travel_at_the_same_ticks_on_every_rank(
    every: int, all_ticks: range, synced: list[int], placement: Placement
) -> None:
    order = tick_order(RunConfig(placement=placement, weights=WeightsConfig(sync_every=every)))
    assert len(order) == len(STAGES)
    for name in ("trainer", "generator", "reward"):
        events = _run(order, name, all_ticks=all_ticks)
        seen = [event for event in events if event == WEIGHTS or event.startswith("tick ")]
        before = [seen[i - 1] for i, event in enumerate(seen) if event == WEIGHTS]
        assert before == [f"tick {tick}" for tick in synced]
        assert events.count("step") == events.count(BATCH) == len(all_ticks)


def test_a_stop_ends_the_run_after_the_tick_is_saved() -> None:
    events = _run(STAGES, "trainer", all_ticks=range(9), stop_at=1)
    assert events[-1] == "save"
    assert [event for event in events if event.startswith("tick")] == ["tick 0", "tick 1"]
    assert events.count(TRAINER_METRICS) == 2  # the last step's metrics are not lost


def test_the_last_weights_are_evaluated_after_the_last_step() -> None:
    assert list(ticks(0, 2)) == [0, 1, 2]  # tick t trains batch t, the last one trains none
    assert list(ticks(5, 6)) == [5, 6]
