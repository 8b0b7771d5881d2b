"""The reward executor with replicas that need no engine: batches, staleness, resuming, metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

import pytest

from megarl import checkpoint
from megarl.checkpoint import StartPoint
from megarl.config import (
    CheckpointConfig,
    DataConfig,
    FaultConfig,
    Mode,
    ModelConfig,
    ObserveConfig,
    Resume,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    WeightsConfig,
)
from megarl.data.starting_model import write_starting_model
from megarl.errors import ChannelTimeout
from megarl.executors.reward import MetricSink, RewardExecutor, Surroundings
from megarl.observe.trace import Tracer
from megarl.recording import recorded_steps
from megarl.rollout.batch import split_batch
from megarl.rollout.engine import Sample, SampleRequest
from megarl.rollout.messages import State, Work, pack_samples, unpack_work
from megarl.rollout.recorded import read_batch
from megarl.rollout.saved import read_rollouts
from megarl.types import MetricValues, Orders, Report, TrainBatch, field_tensors

Answer = Callable[[int, Report], tuple[Orders, bool]]
BATCH, N, REPLICAS = 2, 2, 2


@dataclass(slots=True, kw_only=True)
class _FakeReplicas:
    """Replicas of tokens 5, in threads: each report ends at most one response, the newest first.

    Responses have one to three tokens; those to the prompts in ``slow`` never end.
    """

    slow: frozenset[int] = frozenset()
    version: int = 0
    running: list[dict[int, SampleRequest]] = field(
        default_factory=lambda: [{} for _ in range(REPLICAS)]
    )
    asked: list[SampleRequest] = field(default_factory=list)

    def serve(self, answer: Answer) -> _FakeReplicas:
        self._answer = answer
        return self

    _answer: Answer | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def open(self) -> None:
        self._threads = [
            threading.Thread(target=self._tick, args=(index,)) for index in range(REPLICAS)
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        assert all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _tick(self, index: int) -> None:
        running, state = self.running[index], State.GO
        ended: list[Sample] = []
        while state is not State.BOUNDARY:
            if state is State.HAND_OVER:
                ended = [self._sample(r, 1, finished=False) for r in running.values()]
            work = self._exchange(index, ended)
            state, ended = work.state, []
            for request_id in work.aborts:
                del running[request_id]
            running |= {request.request_id: request for request in work.requests}
            self.asked += work.requests
            quick = [r for r in running.values() if r.prompt not in self._slow_prompts()]
            if state is State.GO and quick:
                request = running.pop(quick[-1].request_id)
                ended = [self._sample(request, 1 + request.seed % 3, finished=True)]

    def _slow_prompts(self) -> set[tuple[int, ...]]:
        return {(1, 3 + prompt, 13, 4, 15, 18) for prompt in self.slow}

    def hold_the_slow(self) -> bool:
        held = [r for running in self.running for r in list(running.values())]
        return sum(r.prompt in self._slow_prompts() for r in held) == N * len(self.slow)

    def _sample(self, request: SampleRequest, length: int, *, finished: bool) -> Sample:
        new = max(1, length - len(request.generated))
        return Sample(
            request_id=request.request_id,
            tokens=(*request.generated, *(5,) * new),
            logprobs=(*request.logprobs, *(-1.0,) * new),
            versions=(*request.versions, *(self.version,) * new),
            finished=finished,
        )

    def _exchange(self, index: int, samples: list[Sample]) -> Work:
        assert self._answer is not None
        orders, is_last = self._answer(index, pack_samples(samples))
        work = unpack_work(orders)
        assert is_last is (work.state is State.BOUNDARY)
        return work


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    write_starting_model(folder, 0)
    return folder


def _make_config(folder: Path, model: Path, **changes: object) -> RunConfig:
    rows = [{"prompt": f"{row}+1=?", "answer": str(row)} for row in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict = {
        "run_dir": str(folder),
        "name": "r",
        "max_steps": 6,
        "max_staleness": 1,
        "model": ModelConfig(path=str(model)),
        "data": DataConfig(
            train_path=str(folder / "train.jsonl"), train_batch_size=BATCH, shuffle=False
        ),
        "rollout": RolloutConfig(n=N, max_response_length=8),
        "reward": RewardConfig(path="megarl.rewards.arithmetic:score", num_processes=1),
        "checkpoint": CheckpointConfig(save_freq=2),
        **changes,
    }
    return RunConfig(**values)


def _make_surroundings(replicas: _FakeReplicas, sink: MetricSink) -> Surroundings:
    return Surroundings(
        sink=sink,
        stop_requested=lambda: False,
        has_arrived=lambda tick: tick == 1 or replicas.hold_the_slow(),
        say=lambda what: None,
        serve=replicas.serve,
        num_replicas=REPLICAS,
        closes_before_batch=False,
    )


@contextmanager
def _executor(
    config: RunConfig,
    replicas: _FakeReplicas,
    start: StartPoint | None = None,
    sink: MetricSink = lambda step, metrics: None,
) -> Iterator[RewardExecutor]:
    around = _make_surroundings(replicas, sink)
    executor = RewardExecutor(config, start or StartPoint(), around, Tracer("reward", 0))
    executor.init()
    try:
        yield executor
    finally:
        executor.close()


def _tick(executor: RewardExecutor, replicas: _FakeReplicas, version: int) -> list[int]:
    """Run tick ``version``; return the prompts of its batch, checked for freshness."""
    replicas.version = version
    executor.set_step(version)
    executor.prepare()
    (batch,) = executor.get_output("batch")
    assert isinstance(batch, TrainBatch)
    sampled = batch.versions[batch.versions >= 0]
    assert version - 1 <= int(sampled.min()) <= int(sampled.max()) <= version
    executor.step()
    return sorted(set(batch.prompt_ids.tolist()))


def test_every_tick_has_a_full_fresh_batch_and_each_prompt_is_trained_once(
    tmp_path: Path, model_folder: Path
) -> None:
    replicas = _FakeReplicas()
    with _executor(_make_config(tmp_path, model_folder), replicas) as executor:
        batches = [_tick(executor, replicas, version) for version in range(6)]
    assert [len(batch) for batch in batches] == [BATCH] * 6
    assert sorted(prompt for batch in batches for prompt in batch) == list(range(12))
    assert len({request.request_id for request in replicas.asked}) == 12 * N


def test_replicas_that_lag_are_given_only_what_the_bound_has_room_for(
    tmp_path: Path, model_folder: Path
) -> None:
    weights = WeightsConfig(sync_every=3)
    config = _make_config(tmp_path, model_folder, max_staleness=2, weights=weights)
    replicas, looks = _FakeReplicas(), cycle((False, True))  # so that each tick serves, then ends
    around = replace(
        _make_surroundings(replicas, lambda step, metrics: None),
        has_arrived=lambda tick: next(looks),
    )
    executor = RewardExecutor(config, StartPoint(step=1), around, Tracer("reward", 0))
    executor.init()
    with closing(executor):
        for version, held in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 3)):
            executor.set_step(version)
            replicas.version = held
            executor.prepare()
            (batch,) = executor.get_output("batch")
            assert isinstance(batch, TrainBatch)
            assert int(batch.versions[batch.versions >= 0].min()) >= version - 2
            executor.step()
            # Prompts are numbered from the run's begin: those of held + 2 + 1 batches have started.
            assert executor._buffer.next_prompt_id == (held + 3) * BATCH
    assert len({request.request_id for request in replicas.asked}) == 5 * BATCH * N


def test_a_resumed_run_trains_on_what_was_finished_and_goes_on_with_what_was_begun(
    tmp_path: Path, model_folder: Path
) -> None:
    config = _make_config(tmp_path, model_folder)
    first = _FakeReplicas(slow=frozenset({4}))
    with _executor(config, first) as executor:
        done = _tick(executor, first, 0)
        executor.save_checkpoint()  # not due
        checkpoint.begin(config.folder, 2)
        done += _tick(executor, first, 1)
        executor.save_checkpoint()
    start = checkpoint.find_start(replace(config, resume=Resume.AUTO))
    assert (start.step, len(done)) == (2, 2 * BATCH)
    assert start.rollout_file is not None
    saved = read_rollouts(start.rollout_file)
    assert {row[0] for row in saved.partial} == {4}
    begun = {(row[0], row[1]): row[2].tokens for row in saved.partial}

    second = _FakeReplicas()
    with _executor(config, second, start) as executor:
        for version in range(2, 6):
            done += _tick(executor, second, version)
    assert sorted(done) == list(range(12))  # also those that were complete when it was saved
    continued = [request for request in second.asked if request.generated]
    assert sorted(request.generated for request in continued) == sorted(begun.values())
    assert len(continued) == N
    assert all(request.versions == (1,) for request in continued)


def test_what_is_recorded_is_what_the_trainer_is_given_and_a_resumed_run_records_its_own(
    tmp_path: Path, model_folder: Path
) -> None:
    config = _make_config(tmp_path, model_folder, observe=ObserveConfig(record=True))
    replicas = _FakeReplicas()
    with _executor(config, replicas) as executor:
        trained = [_tick(executor, replicas, version) for version in range(3)]
        (given,) = executor.get_output("batch")
    assert recorded_steps(config.folder) == [1, 2, 3]
    for step, prompts in enumerate(trained, start=1):
        rollouts = read_batch(config.folder, step).rollouts
        assert rollouts.prompt_ids.tolist() == [p for p in prompts for _ in range(N)]
        assert rollouts.sample_ids.tolist() == list(range(N)) * BATCH
    (again,) = split_batch(read_batch(config.folder, 3), config)
    pairs = zip(field_tensors(again), field_tensors(given), strict=True)
    assert all(ours.equal(theirs) for ours, theirs in pairs)
    with _executor(config, _FakeReplicas(), StartPoint(step=1)):
        assert recorded_steps(config.folder) == [1]


def test_a_run_without_rollouts_in_flight_begins_behind_the_prompts_it_has_trained_on(
    tmp_path: Path, model_folder: Path
) -> None:
    config = _make_config(tmp_path, model_folder, mode=Mode.SYNC)
    replicas = _FakeReplicas()
    with _executor(config, replicas, StartPoint(step=3)) as executor:
        assert _tick(executor, replicas, 3) == [6, 7]
    assert len(replicas.asked) == BATCH * N


def test_where_the_trainer_needs_the_replicas_ranks_they_are_done_before_it_gets_the_batch(
    tmp_path: Path, model_folder: Path
) -> None:
    config = _make_config(
        tmp_path, model_folder, mode=Mode.SYNC, fault=FaultConfig(timeout_seconds=0.1)
    )
    replicas, arrived = _FakeReplicas(), {1}
    around = replace(
        _make_surroundings(replicas, lambda step, metrics: None),
        closes_before_batch=True,
        has_arrived=arrived.__contains__,
    )
    executor = RewardExecutor(config, StartPoint(), around, Tracer("reward", 0))
    executor.init()
    try:
        for version in range(2):
            replicas.version = version
            executor.set_step(version)
            executor.prepare()
            assert not any(thread.is_alive() for thread in replicas._threads)
            (batch,) = executor.get_output("batch")
            assert isinstance(batch, TrainBatch)
            assert len(batch.lengths) == BATCH * N
            if version + 1 in arrived:
                executor.step()
        with pytest.raises(ChannelTimeout, match=r"has not ended step 2 for 0\.1 s"):
            executor.step()
    finally:
        executor.close()


def test_a_batch_that_never_completes_ends_the_run_and_says_what_it_waits_for(
    tmp_path: Path, model_folder: Path
) -> None:
    config = _make_config(
        tmp_path, model_folder, mode=Mode.SYNC, fault=FaultConfig(timeout_seconds=1.0)
    )
    replicas = _FakeReplicas(slow=frozenset({1}))
    with _executor(config, replicas) as executor:
        executor.set_step(0)
        waits = (
            rf"step 1 waits for the batch, and no sample has arrived for 1 s: "
            rf"{BATCH - 1} of {BATCH} groups are complete, {BATCH} admitted, .* in the way: \[1\]"
        )
        with pytest.raises(ChannelTimeout, match=waits):
            executor.prepare()
        executor._dispatcher.close(hand_over=False)
        replicas.close()


def test_numbers_of_three_replicas_are_reported_as_their_mean() -> None:
    emitted: dict[int, dict[str, float]] = {}
    around = _make_surroundings(_FakeReplicas(), emitted.__setitem__)
    executor = RewardExecutor(RunConfig(), StartPoint(), around, Tracer("reward", 0))
    idle = [{"step": 1.0, "generator/idle_ratio": value} for value in (0.1, 0.2, 0.6)]
    executor.put_input("metrics/generator", [MetricValues.from_dict(each) for each in idle])
    trainer = {"step": 1.0, "actor/loss": 2.0, "rollout/reward": 0.5}
    known = {"timing_s/step": 4.0, "perf/total_tokens": 8.0}
    executor.put_input("metrics/trainer", [MetricValues.from_dict(trainer | known)])
    executor._emit()
    assert emitted[1]["generator/idle_ratio"] == pytest.approx(0.3)
    assert emitted[1]["perf/tokens_per_second"] == 2.0
