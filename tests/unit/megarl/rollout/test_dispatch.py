"""Who samples what: no request is lost, given twice or answered twice, whoever reports when."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import ChannelError
from megarl.rollout.dispatch import Dispatcher
from megarl.rollout.engine import Sample, SampleRequest
from megarl.rollout.messages import State

DRAWS = int(os.environ.get("MEGARL_DRAWS", "200"))


def _make_group(first: int, size: int = 2, max_tokens: int = 8) -> list[SampleRequest]:
    """Build requests of one prompt, numbered from ``first``; the prompt's token is that number."""
    return [
        SampleRequest(
            request_id=request_id,
            prompt=(first,),
            max_tokens=max_tokens,
            temperature=1.0,
            seed=0,
            eos_token_id=2,
        )
        for request_id in range(first, first + size)
    ]


def _make_dispatcher(num_replicas: int, slots: int) -> Dispatcher:
    """Build one whose answers never wait: nobody submits beside them."""
    return Dispatcher(num_replicas, slots, idle_seconds=0.0)


def _make_sample(request_id: int, *, finished: bool = True) -> Sample:
    return Sample(
        request_id=request_id, tokens=(5,), logprobs=(-1.0,), versions=(0,), finished=finished
    )


def _ids(requests: object) -> list[int]:
    return [request.request_id for request in requests]  # type: ignore[attr-defined]


def _taken(dispatcher: Dispatcher) -> list[int]:
    return sorted(sample.request_id for sample in dispatcher.take())


# --- Where requests go ------------------------------------------------------------------------


def test_a_prompt_goes_to_one_replica_and_the_next_one_to_the_less_loaded() -> None:
    dispatcher = _make_dispatcher(num_replicas=2, slots=8)
    for first in (0, 2, 4):
        dispatcher.submit(_make_group(first))
    first = _ids(dispatcher.answer(0, ()).requests)
    second = _ids(dispatcher.answer(1, ()).requests)
    assert (first, second) == ([0, 1], [2, 3, 4, 5])
    dispatcher.submit(_make_group(6))
    dispatcher.submit(_make_group(8))
    assert dispatcher.answer(1, ()).requests == []  # twice as much as replica 0 has
    assert _ids(dispatcher.answer(0, ()).requests) == [6, 7, 8, 9]


def test_load_is_what_is_left_to_compute_and_not_a_number_of_requests() -> None:
    dispatcher = _make_dispatcher(num_replicas=2, slots=8)
    dispatcher.submit(_make_group(0, size=1, max_tokens=100))
    dispatcher.submit(_make_group(10, size=2, max_tokens=8))
    assert _ids(dispatcher.answer(0, ()).requests) == [0]
    assert _ids(dispatcher.answer(1, ()).requests) == [10, 11]
    dispatcher.submit(_make_group(20))
    assert dispatcher.answer(0, ()).requests == []  # 101 tokens against 18
    assert _ids(dispatcher.answer(1, ()).requests) == [20, 21]


def test_no_replica_is_given_more_than_its_slots_unless_it_is_idle() -> None:
    dispatcher = _make_dispatcher(num_replicas=1, slots=5)
    for first in (0, 2, 4):
        dispatcher.submit(_make_group(first))
    assert _ids(dispatcher.answer(0, ()).requests) == [0, 1, 2, 3]
    assert dispatcher.answer(0, [_make_sample(0)]).requests == [*_make_group(4)]
    many = _make_dispatcher(num_replicas=1, slots=2)
    many.submit(_make_group(0, size=4))
    many.submit(_make_group(4, size=4))
    assert _ids(many.answer(0, ()).requests) == [0, 1, 2, 3]  # a group is never torn
    assert many.answer(0, [_make_sample(i) for i in range(3)]).requests == []
    assert _ids(many.answer(0, [_make_sample(3)]).requests) == [4, 5, 6, 7]


def test_an_idle_replica_is_given_work_that_another_would_have_taken_first() -> None:
    dispatcher = _make_dispatcher(num_replicas=3, slots=100)
    dispatcher.submit(_make_group(0))
    dispatcher.submit(_make_group(2))
    assert _ids(dispatcher.answer(2, ()).requests) == [0, 1]
    assert _ids(dispatcher.answer(1, ()).requests) == [2, 3]
    dispatcher.submit(_make_group(4), first=True)
    assert dispatcher.answer(1, ()).requests == []
    assert _ids(dispatcher.answer(0, ()).requests) == [4, 5]


def test_what_is_submitted_first_is_not_kept_waiting() -> None:
    dispatcher = _make_dispatcher(num_replicas=1, slots=2)
    dispatcher.submit(_make_group(0))
    dispatcher.submit(_make_group(2), first=True)
    assert _ids(dispatcher.answer(0, ()).requests) == [2, 3]
    assert dispatcher.outstanding == 4


# --- What is cancelled ------------------------------------------------------------------------


def test_what_is_cancelled_in_the_queue_is_never_given_out() -> None:
    dispatcher = _make_dispatcher(num_replicas=1, slots=8)
    dispatcher.submit(_make_group(0))
    dispatcher.submit(_make_group(2))
    dispatcher.cancel([0, 1, 3])
    work = dispatcher.answer(0, ())
    assert (_ids(work.requests), work.aborts) == ([2], [])


def test_what_is_cancelled_while_it_runs_is_aborted_once() -> None:
    dispatcher = _make_dispatcher(num_replicas=2, slots=8)
    dispatcher.submit(_make_group(0, size=3))
    dispatcher.answer(1, ())
    dispatcher.cancel([0, 2])
    assert dispatcher.outstanding == 1
    assert dispatcher.answer(0, ()).aborts == []
    assert dispatcher.answer(1, ()).aborts == [0, 2]
    assert dispatcher.answer(1, [_make_sample(1)]).aborts == []
    assert _taken(dispatcher) == [1]


def test_what_ends_before_its_replica_hears_that_it_is_cancelled_is_dropped() -> None:
    dispatcher = _make_dispatcher(num_replicas=1, slots=8)
    dispatcher.submit(_make_group(0, size=3))
    dispatcher.answer(0, ())
    dispatcher.cancel([0, 1])
    work = dispatcher.answer(0, [_make_sample(0), _make_sample(2)])
    assert work.aborts == [1]  # of 0 the engine knows nothing any more
    assert _taken(dispatcher) == [2]


def test_what_is_cancelled_after_it_came_and_before_it_was_taken_is_dropped() -> None:
    dispatcher = _make_dispatcher(num_replicas=1, slots=8)
    dispatcher.submit(_make_group(0, size=3))
    dispatcher.answer(0, ())
    dispatcher.answer(0, [_make_sample(0), _make_sample(1)])
    dispatcher.cancel([0, 2])
    assert _taken(dispatcher) == [1]
    assert dispatcher.answer(0, ()).aborts == [2]


@pytest.mark.parametrize("replica", [0, 1])
def test_a_report_of_what_a_replica_was_not_asked_for_is_refused(replica: int) -> None:
    dispatcher = _make_dispatcher(num_replicas=2, slots=8)
    dispatcher.submit(_make_group(0))
    dispatcher.answer(0, ())
    dispatcher.answer(0, [_make_sample(0)])
    with pytest.raises(ChannelError, match=f"replica {replica} reports request 0"):
        dispatcher.answer(replica, [_make_sample(0)])


# --- The end of a tick ------------------------------------------------------------------------


def test_a_tick_ends_at_each_replica_by_its_next_report() -> None:
    dispatcher = _make_dispatcher(num_replicas=2, slots=8)
    dispatcher.submit(_make_group(0))
    assert dispatcher.answer(0, ()).state is State.GO
    dispatcher.close(hand_over=False)
    dispatcher.submit(_make_group(2))
    for replica, samples in ((0, [_make_sample(1)]), (1, [])):
        work = dispatcher.answer(replica, samples)
        assert (work.state, list(work.requests)) == (State.BOUNDARY, [])
    assert _taken(dispatcher) == [1]
    dispatcher.open()
    assert _ids(dispatcher.answer(1, ()).requests) == [2, 3]


def test_before_a_checkpoint_every_replica_hands_over_what_it_has_begun() -> None:
    dispatcher = _make_dispatcher(num_replicas=2, slots=4)
    for first in (0, 2, 4, 6, 8):
        dispatcher.submit(_make_group(first))
    for replica in (0, 1, 0, 1):
        dispatcher.answer(replica, ())
    dispatcher.close(hand_over=True)
    for replica in (0, 1):
        assert dispatcher.answer(replica, ()).state is State.HAND_OVER
    parts = {request: _make_sample(request, finished=False) for request in (0, 1, 2)}
    assert dispatcher.answer(1, [parts[2]]).state is State.BOUNDARY
    assert dispatcher.answer(0, [parts[0], parts[1]]).state is State.BOUNDARY
    found = {request.request_id: sample for request, sample in dispatcher.unfinished()}
    assert found == {request: parts.get(request) for request in range(10)}
    assert dispatcher.take() == []  # partial samples are not results
    dispatcher.open()
    assert dispatcher.answer(0, [_make_sample(0)]).state is State.GO
    assert all(sample is None for _, sample in dispatcher.unfinished())


@pytest.mark.parametrize("ends", [False, True])
def test_an_idle_replica_is_answered_when_there_is_something_to_say(ends: bool) -> None:
    dispatcher = Dispatcher(num_replicas=1, slots=4, idle_seconds=30.0)

    def say() -> None:
        dispatcher.close(hand_over=False) if ends else dispatcher.submit(_make_group(0))

    began = time.monotonic()
    timer = threading.Timer(0.05, say)
    timer.start()
    work = dispatcher.answer(0, ())
    assert time.monotonic() - began < 20.0
    assert (work.state, len(work.requests)) == ((State.BOUNDARY, 0) if ends else (State.GO, 2))
    timer.join()


def test_waiting_ends_when_a_sample_comes() -> None:
    dispatcher = _make_dispatcher(num_replicas=1, slots=4)
    dispatcher.submit(_make_group(0))
    dispatcher.answer(0, ())
    began = time.monotonic()
    timer = threading.Timer(0.05, dispatcher.answer, (0, [_make_sample(0)]))
    timer.start()
    dispatcher.wait(30.0)
    assert time.monotonic() - began < 20.0
    assert _taken(dispatcher) == [0]
    timer.join()


# --- Nothing is lost --------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _FakeReplica:
    """An engine without tokens: it refuses what an engine refuses, in any order of steps."""

    index: int
    running: set[int] = field(default_factory=set)
    state: State = State.BOUNDARY
    given: set[int] = field(default_factory=set)

    def report(self, dispatcher: Dispatcher, ended: set[int]) -> None:
        if self.state is State.HAND_OVER:
            samples = [_make_sample(request, finished=False) for request in self.running]
        else:
            self.running -= ended
            samples = [_make_sample(request) for request in sorted(ended)]
        work = dispatcher.answer(self.index, samples)
        assert self.state is not State.HAND_OVER or work.state is State.BOUNDARY
        assert set(work.aborts) <= self.running, "the engine has no such request"
        self.running -= set(work.aborts)
        added = set(_ids(work.requests))
        assert not added & self.given, "given twice"
        assert not added or work.state is State.GO
        self.given |= added
        self.running |= added
        self.state = work.state


@dataclass(slots=True, kw_only=True)
class _Job:
    """A coordinator and replicas in one random interleaving."""

    dispatcher: Dispatcher
    replicas: list[_FakeReplica]
    dice: random.Random
    num_submitted: int = 0
    cancelled: set[int] = field(default_factory=set)
    taken: list[int] = field(default_factory=list)

    def submit(self) -> None:
        size = self.dice.randint(1, 3)
        group = _make_group(self.num_submitted, size=size, max_tokens=self.dice.randint(1, 9))
        self.dispatcher.submit(group, first=self.dice.random() < 0.3)
        self.num_submitted += size

    def cancel(self) -> None:
        open_requests = set(range(self.num_submitted)) - set(self.taken) - self.cancelled
        gone = {request for request in open_requests if self.dice.random() < 0.2}
        self.dispatcher.cancel(sorted(gone))
        self.cancelled |= gone

    def take(self) -> None:
        self.taken += _taken(self.dispatcher)

    def report(self) -> None:
        replica = self.dice.choice(self.replicas)
        if replica.state is not State.BOUNDARY:
            ended = {each for each in replica.running if self.dice.random() < 0.4}
            replica.report(self.dispatcher, ended)

    def tick(self, num_events: int) -> None:
        self.dispatcher.open()
        for replica in self.replicas:
            replica.state = State.GO
        actions = [self.submit, self.cancel, self.take, self.report, self.report, self.report]
        for _ in range(num_events):
            self.dice.choice(actions)()
        hand_over = self.dice.random() < 0.5
        self.dispatcher.close(hand_over=hand_over)
        while any(replica.state is not State.BOUNDARY for replica in self.replicas):
            self.report()
        if hand_over:
            partial = {r.request_id for r, sample in self.dispatcher.unfinished() if sample}
            running = set().union(*(replica.running for replica in self.replicas))
            assert partial == running - self.cancelled

    def drain(self) -> None:
        self.dispatcher.open()
        for replica in self.replicas:
            replica.state = State.GO
        for _ in range(self.num_submitted + 1):
            for replica in self.replicas:
                replica.report(self.dispatcher, set(replica.running))
        self.take()


@settings(max_examples=DRAWS, deadline=None)
@given(
    num_replicas=st.integers(1, 4),
    slots=st.integers(1, 6),
    seed=st.integers(0, 1 << 32),
    num_ticks=st.integers(1, 4),
)
def test_every_request_is_answered_once_or_cancelled(
    num_replicas: int, slots: int, seed: int, num_ticks: int
) -> None:
    job = _Job(
        dispatcher=_make_dispatcher(num_replicas=num_replicas, slots=slots),
        replicas=[_FakeReplica(index=index) for index in range(num_replicas)],
        dice=random.Random(seed),
    )
    for _ in range(num_ticks):
        job.tick(40)
    job.drain()
    assert len(job.taken) == len(set(job.taken))
    assert not set(job.taken) & job.cancelled
    assert set(job.taken) | job.cancelled == set(range(job.num_submitted))
    assert (job.dispatcher.outstanding, job.dispatcher.unfinished()) == (0, [])
    given = [request for replica in job.replicas for request in replica.given]
    assert len(given) == len(set(given))


def test_replicas_may_report_all_at_once() -> None:
    dispatcher = Dispatcher(num_replicas=4, slots=6)
    failures: list[BaseException] = []

    def serve(index: int) -> None:
        replica, dice = _FakeReplica(index=index, state=State.GO), random.Random(index)
        try:
            while replica.state is not State.BOUNDARY:
                ended = {each for each in replica.running if dice.random() < 0.5}
                replica.report(dispatcher, ended)
        except (AssertionError, ChannelError) as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    taken: list[int] = []
    deadline = time.monotonic() + 60
    for first in range(0, 1200, 3):
        dispatcher.submit(_make_group(first, size=3))
        taken += _taken(dispatcher)
    while len(taken) < 1200 and not failures and time.monotonic() < deadline:
        dispatcher.wait(0.05)
        taken += _taken(dispatcher)
    dispatcher.close(hand_over=False)
    for thread in threads:
        thread.join(60)
    assert not failures
    assert sorted(taken) == list(range(1200))
