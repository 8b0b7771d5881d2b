"""The buffer under adversarial completion orders, against books kept in plain sets."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.config import StalePolicy
from megarl.errors import ChannelError, ConfigError
from megarl.rollout.buffer import BufferPolicy, RolloutBuffer

DRAWS = int(os.environ.get("MEGARL_DRAWS", "200"))  # of the long properties
EVENTS = 500  # of one draw: samples, admissions, batches
Sample = tuple[int, int]  # prompt, sample id


def _make_policy(**changes: object) -> BufferPolicy:
    values: dict = {"batch_groups": 2, "group_size": 2, "max_staleness": 1, **changes}
    return BufferPolicy(**values)


# --- Who finishes next ------------------------------------------------------------------------


def _random(pending: list[Sample], dice: random.Random) -> Sample:
    return dice.choice(pending)


def _stragglers_last(pending: list[Sample], dice: random.Random) -> Sample:
    return max(pending)


def _stragglers_first(pending: list[Sample], dice: random.Random) -> Sample:
    return min(pending)


def _last_sample_starves(pending: list[Sample], dice: random.Random) -> Sample:
    """Finish a prompt's sample 0 only when nothing else is left."""
    return dice.choice([each for each in pending if each[1] != 0] or pending)


def _every_third_prompt_starves(pending: list[Sample], dice: random.Random) -> Sample:
    return dice.choice([each for each in pending if each[0] % 3] or pending)


ORDERS = (
    _random,
    _stragglers_last,
    _stragglers_first,
    _last_sample_starves,
    _every_third_prompt_starves,
)
Order = Callable[[list[Sample], random.Random], Sample]


# --- The books --------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Books:
    """What must be true of a buffer, kept beside it from its answers and the rewards alone."""

    policy: BufferPolicy
    uniform: Callable[[int], bool]  # whether a prompt's rewards are all equal
    admitted: dict[int, int] = field(default_factory=dict)  # alive: prompt -> version
    finished: dict[int, set[int]] = field(default_factory=dict)  # alive: prompt -> samples
    skippable: set[int] = field(default_factory=set)  # within the cap when they were admitted
    consumed: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    regenerated: int = 0
    num_started: int = 0
    first: int = 0  # num_started when the last batch was taken

    def reward(self, prompt: int, sample: int) -> float:
        return 1.0 if self.uniform(prompt) else float(sample % 2)

    def admit(self, prompts: list[int], version: int) -> None:
        """Prompts come in order, as many as the bound leaves room for."""
        policy = self.policy
        assert prompts == list(range(self.num_started, self.num_started + len(prompts)))
        self.num_started += len(prompts)
        self.admitted |= dict.fromkeys(prompts, version)
        self.finished |= {prompt: set() for prompt in prompts}
        cap = self.first + int(policy.max_oversample * policy.batch_groups)
        self.skippable |= {each for each in prompts if policy.skip_uniform and each < cap}
        batches = min(version + policy.max_staleness + 1, policy.last_version)
        used = len(self.admitted) + len(self.consumed)
        assert used == batches * policy.batch_groups if prompts else used >= batches

    def finish(self, prompt: int, sample: int) -> bool:
        """Note a sample; return whether its group is still kept."""
        self.finished[prompt].add(sample)
        if prompt in self.complete() & self.skippable and self.uniform(prompt):
            self.forget(prompt)
            self.skipped.add(prompt)
            return False
        return True

    def consume(self, prompts: list[int], version: int) -> None:
        """A batch is full, complete, fresh and new, and leaves nobody behind."""
        assert len(prompts) == self.policy.batch_groups
        assert prompts == sorted(set(prompts))
        assert set(prompts) <= self.complete()
        ages = [version - self.admitted[prompt] for prompt in prompts]
        assert min(ages) >= 0
        assert max(ages) <= self.policy.max_staleness
        for prompt in prompts:
            self.forget(prompt)
        self.consumed |= set(prompts)
        self.first = self.num_started
        ages = [version + 1 - admitted for admitted in self.admitted.values()]
        assert max(ages, default=0) <= self.policy.max_staleness  # each can still be in time

    def expire(self, prompt: int, again: bool, version: int, generator_version: int) -> None:
        """Only unfinished groups are given up, that a full batch of others leaves no room for."""
        assert self.policy.stale_policy is not StalePolicy.WAIT
        assert again is (self.policy.stale_policy is StalePolicy.REGENERATE)
        assert prompt not in self.complete()
        assert any(
            self.left_over(version, deadline)
            for deadline in range(self.deadline(prompt), version + self.policy.max_staleness + 1)
        )
        assert len(self.complete()) >= self.policy.batch_groups
        if again:
            assert generator_version > self.admitted[prompt]
            self.admitted[prompt], self.finished[prompt] = generator_version, set()
            self.regenerated += 1
        else:
            self.forget(prompt)
            self.dropped.add(prompt)

    def deadline(self, prompt: int) -> int:
        return self.admitted[prompt] + self.policy.max_staleness

    def left_over(self, version: int, deadline: int) -> bool:
        """Whether some groups would miss a deadline if a batch took what is complete now."""
        urgent = {each for each in self.admitted if self.deadline(each) <= deadline}
        size = self.policy.batch_groups
        taken = min(size, len(urgent & self.complete()))
        return len(urgent) - taken > (deadline - version) * size

    def forget(self, prompt: int) -> None:
        del self.admitted[prompt], self.finished[prompt]

    def complete(self) -> set[int]:
        size = self.policy.group_size
        return {prompt for prompt, samples in self.finished.items() if len(samples) == size}

    def pending(self) -> list[Sample]:
        return [
            (prompt, sample)
            for prompt, samples in self.finished.items()
            for sample in range(self.policy.group_size)
            if sample not in samples
        ]

    def compare(self, buffer: RolloutBuffer[Sample]) -> None:
        """Every prompt that was started is in exactly one place, and the buffer knows which."""
        places = [set(self.admitted), self.consumed, self.skipped, self.dropped]
        assert sum(map(len, places)) == self.num_started == buffer.next_prompt_id
        assert set().union(*places) == set(range(self.num_started))
        assert {group.prompt_id: group.admitted for group in buffer.groups()} == self.admitted
        assert sorted(buffer.missing()) == sorted(self.pending())
        assert (len(buffer), buffer.num_complete) == (len(self.admitted), len(self.complete()))
        counters = buffer.counters
        assert counters.consumed == len(self.consumed)
        assert counters.skipped == len(self.skipped)
        assert counters.dropped == len(self.dropped)
        assert counters.regenerated == self.regenerated


# --- A run ------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Run:
    """A trainer, generators whose version lags, and a buffer between them."""

    policy: BufferPolicy
    order: Order
    dice: random.Random
    books: _Books
    lag: float = 0.0  # how often the generators' weights stay behind
    sync_every: int = 0  # batches from one transfer of weights to the next; 0: as ``lag`` has it
    restart: float = 0.0  # how often the run begins anew from its checkpoint
    buffer: RolloutBuffer[Sample] = field(init=False)
    version: int = 0
    generator_version: int = 0
    batches: list[list[int]] = field(default_factory=list)
    num_events: int = 0

    def __post_init__(self) -> None:
        self.buffer = RolloutBuffer(self.policy)

    def go_on(self, num_batches: int) -> None:
        while len(self.batches) < num_batches:
            self.turn()
            if self.dice.random() < self.restart:
                self.begin_anew()
        self.books.compare(self.buffer)

    def turn(self) -> None:
        self.num_events += 1
        self.books.admit(self.buffer.admit(self.generator_version), self.generator_version)
        self.expire()
        if self.buffer.is_ready(self.version):
            return self.take()
        pending = self.books.pending()
        if pending:
            prompt, sample = self.order(pending, self.dice)
            reward = self.books.reward(prompt, sample)
            kept = self.buffer.put(prompt, sample, (prompt, sample), reward)
            assert kept == self.books.finish(prompt, sample)
            return None
        # All that was started has ended: only weights can be missing, or what they let start.
        assert self.generator_version < self.version, "deadlock"
        assert not self.sync_every, "deadlock until a transfer that does not come"
        self.generator_version = self.version
        return None

    def take(self) -> None:
        groups = self.buffer.take(self.version)
        for group in groups:
            size = self.policy.group_size
            assert group.samples == {s: (group.prompt_id, s) for s in range(size)}
            wanted = {s: self.books.reward(group.prompt_id, s) for s in range(size)}
            assert group.rewards == wanted
        prompts = [group.prompt_id for group in groups]
        self.books.consume(prompts, self.version)
        self.batches.append(prompts)
        self.version += 1
        if self.is_synced():
            self.generator_version = self.version
        self.books.compare(self.buffer)

    def is_synced(self) -> bool:
        if self.sync_every:
            return self.version % self.sync_every == 0
        return self.dice.random() >= self.lag

    def expire(self) -> None:
        for group in self.buffer.expire(self.version, self.generator_version):
            self.books.expire(group.prompt_id, group.again, self.version, self.generator_version)

    def begin_anew(self) -> None:
        """Go on in a new buffer; of unfinished groups some finished samples are lost."""
        before = self.buffer
        state = json.loads(json.dumps(before.state()))
        self.buffer = RolloutBuffer(self.policy)
        self.buffer.restore(state)
        for group in before.groups():
            complete = group.prompt_id in self.books.complete()
            for sample_id, sample in group.samples.items():
                if complete or self.dice.random() < 0.5:
                    self.buffer.put(group.prompt_id, sample_id, sample, group.rewards[sample_id])
                else:
                    self.books.finished[group.prompt_id].remove(sample_id)
        self.generator_version = self.version
        self.books.compare(self.buffer)


def _uniform(seed: int, share: float, group_size: int) -> Callable[[int], bool]:
    """Return whether a prompt's rewards are all equal: for a share of them, or in groups of one."""
    return functools.cache(
        lambda prompt: group_size == 1 or random.Random(f"{seed}/{prompt}").random() < share
    )


policies = st.builds(
    BufferPolicy,
    batch_groups=st.integers(1, 4),
    group_size=st.integers(1, 3),
    max_staleness=st.integers(0, 4),
    stale_policy=st.sampled_from(StalePolicy),
    skip_uniform=st.booleans(),
    max_oversample=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
)
long = settings(
    max_examples=DRAWS, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


@long
@given(
    policy=policies,
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 1 << 32),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    lag=st.sampled_from([0.0, 0.5, 0.9]),
    restart=st.sampled_from([0.0, 0.02]),
)
def test_any_order_of_completion_keeps_the_bound_and_loses_no_prompt(
    policy: BufferPolicy, order: Order, seed: int, share: float, lag: float, restart: float
) -> None:
    num_batches = EVENTS // (policy.batch_groups * policy.group_size + 1)
    policy = replace(policy, last_version=num_batches)
    run = _Run(
        policy=policy,
        order=order,
        dice=random.Random(seed),
        books=_Books(policy=policy, uniform=_uniform(seed, share, policy.group_size)),
        lag=lag,
        restart=restart,
    )
    run.go_on(num_batches)
    assert run.num_events >= EVENTS - policy.batch_groups * policy.group_size
    assert run.version == num_batches
    if policy.stale_policy is StalePolicy.WAIT and not run.books.skipped:
        assert run.books.num_started == num_batches * policy.batch_groups  # nothing left over


@long
@given(
    policy=policies,
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 1 << 32),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    sync_every=st.integers(1, 4),
    more=st.integers(0, 3),
    restart=st.sampled_from([0.0, 0.02]),
)
def test_with_weights_at_every_kth_batch_a_staleness_of_k_minus_1_never_stops_a_run(
    policy: BufferPolicy,
    order: Order,
    seed: int,
    share: float,
    sync_every: int,
    more: int,
    restart: float,
) -> None:
    num_batches = EVENTS // (policy.batch_groups * policy.group_size + 1)
    policy = replace(policy, max_staleness=sync_every - 1 + more, last_version=num_batches)
    run = _Run(
        policy=policy,
        order=order,
        dice=random.Random(seed),
        books=_Books(policy=policy, uniform=_uniform(seed, share, policy.group_size)),
        sync_every=sync_every,
        restart=restart,
    )
    run.go_on(num_batches)  # the books hold every batch against the versions that sampled it
    assert run.version == num_batches


@pytest.mark.parametrize("sync_every", [2, 3, 4])
@pytest.mark.parametrize("stale_policy", StalePolicy)
def test_with_less_staleness_no_prompt_may_start_for_the_batch_before_a_transfer(
    sync_every: int, stale_policy: StalePolicy
) -> None:
    policy = _make_policy(max_staleness=sync_every - 2, stale_policy=stale_policy)
    run = _Run(
        policy=policy,
        order=_random,
        dice=random.Random(0),
        books=_Books(policy=policy, uniform=lambda prompt: False),
        sync_every=sync_every,
    )
    with pytest.raises(AssertionError, match="deadlock"):
        run.go_on(sync_every)
    assert (run.version, run.generator_version) == (sync_every - 1, 0)


def _on_policy_batches(policy: BufferPolicy, uniform: Callable[[int], bool], count: int) -> list:
    """Return the batches of a run at max_staleness 0 by walking over the prompts in their order."""
    batches, prompt = [], 0
    for _ in range(count):
        cap = prompt + policy.max_oversample * policy.batch_groups
        batch: list[int] = []
        while len(batch) < policy.batch_groups:
            if not (policy.skip_uniform and uniform(prompt) and prompt < int(cap)):
                batch.append(prompt)
            prompt += 1
        batches.append(batch)
    return batches


@long
@given(
    policy=policies,
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 1 << 32),
    share=st.sampled_from([0.3, 0.7, 1.0]),
    lag=st.sampled_from([0.0, 0.5]),
    restart=st.sampled_from([0.0, 0.05]),
)
def test_without_staleness_the_batches_do_not_depend_on_the_order(
    policy: BufferPolicy, order: Order, seed: int, share: float, lag: float, restart: float
) -> None:
    policy = replace(policy, max_staleness=0)
    uniform = _uniform(7, share, policy.group_size)
    run = _Run(
        policy=policy,
        order=order,
        dice=random.Random(seed),
        books=_Books(policy=policy, uniform=uniform),
        lag=lag,
        restart=restart,
    )
    run.go_on(8)
    assert run.batches == _on_policy_batches(policy, uniform, 8)


# --- Single answers ---------------------------------------------------------------------------


def _finish(buffer: RolloutBuffer[Sample], *prompts: int) -> None:
    for prompt in prompts:
        for sample in range(buffer.policy.group_size):
            buffer.put(prompt, sample, (prompt, sample), float(sample))


def test_groups_are_started_for_the_versions_that_may_still_use_them() -> None:
    buffer: RolloutBuffer[Sample] = RolloutBuffer(_make_policy(max_staleness=2, last_version=4))
    assert buffer.admit(0) == [0, 1, 2, 3, 4, 5]  # batches 0, 1 and 2
    assert buffer.admit(0) == []
    _finish(buffer, *range(6))
    assert [group.prompt_id for group in buffer.take(0)] == [0, 1]
    assert buffer.admit(1) == [6, 7]
    buffer.take(1)
    assert buffer.admit(2) == []  # there is no batch 4


def test_a_run_that_begins_later_begins_behind_its_prompts() -> None:
    buffer: RolloutBuffer[Sample] = RolloutBuffer(_make_policy(), first_version=5)
    assert buffer.admit(5) == [10, 11, 12, 13]
    assert buffer.take_metrics()["rollout/skipped_groups"] == 0


def test_a_batch_takes_the_groups_with_the_earliest_deadline() -> None:
    buffer: RolloutBuffer[Sample] = RolloutBuffer(_make_policy())
    assert buffer.admit(0) == [0, 1, 2, 3]
    _finish(buffer, 1, 3)
    assert [group.prompt_id for group in buffer.take(0)] == [1, 3]
    assert buffer.admit(1) == [4, 5]
    _finish(buffer, 4, 5, 2)
    assert not buffer.is_ready(1)  # two are complete, but prompt 0 is due
    _finish(buffer, 0)
    assert [group.prompt_id for group in buffer.take(1)] == [0, 2]


@pytest.mark.parametrize(
    ("prompt", "sample", "words"),
    [
        (0, 0, "sample 0 of prompt 0 came twice"),
        (9, 0, "sample 0 of prompt 9 came though it is not expected"),
        (1, 2, "sample 2 of prompt 1 came though it is not expected"),
    ],
)
def test_a_sample_that_nobody_waits_for_is_refused(prompt: int, sample: int, words: str) -> None:
    buffer: RolloutBuffer[Sample] = RolloutBuffer(_make_policy())
    buffer.admit(0)
    buffer.put(0, 0, (0, 0), 0.0)
    before = buffer.state(), buffer.missing()
    with pytest.raises(ChannelError, match=words):
        buffer.put(prompt, sample, (prompt, sample), 0.0)
    assert (buffer.state(), buffer.missing()) == before


def test_a_batch_that_is_not_ready_is_refused_and_nothing_is_consumed() -> None:
    buffer: RolloutBuffer[Sample] = RolloutBuffer(_make_policy(max_staleness=0))
    buffer.admit(0)
    _finish(buffer, 1)
    with pytest.raises(
        ChannelError,
        match=r"batch 0 is not ready: 1 of 2 groups are complete, 2 admitted, unfinished and in .*: \[0\]",
    ):
        buffer.take(0)
    assert (buffer.counters.consumed, len(buffer)) == (0, 2)
    _finish(buffer, 0)
    assert [group.prompt_id for group in buffer.take(0)] == [0, 1]
    with pytest.raises(ChannelError, match="batch 1 is not ready: 0 of 2"):
        buffer.take(1)


def test_a_batch_older_than_the_bound_is_refused_and_nothing_is_consumed() -> None:
    buffer: RolloutBuffer[Sample] = RolloutBuffer(_make_policy())
    buffer.admit(0)
    _finish(buffer, 0, 1, 2, 3)
    with pytest.raises(
        ChannelError, match=r"batch 2 breaks max_staleness=1: oldest group of v.* 0"
    ):
        buffer.take(2)
    assert (buffer.counters.consumed, len(buffer)) == (0, 4)


@pytest.mark.parametrize("stale_policy", [StalePolicy.DROP, StalePolicy.REGENERATE])
def test_a_group_whose_time_has_come_does_not_hold_up_a_full_batch(
    stale_policy: StalePolicy,
) -> None:
    buffer: RolloutBuffer[Sample] = RolloutBuffer(_make_policy(stale_policy=stale_policy))
    buffer.admit(0)
    _finish(buffer, 1, 2)
    buffer.take(0)
    buffer.put(0, 1, (0, 1), 0.0)
    assert buffer.admit(1) == [4, 5]
    assert buffer.expire(1, 1) == []  # no batch is complete
    _finish(buffer, 3, 4)
    (expired,) = buffer.expire(1, 1)
    again = stale_policy is StalePolicy.REGENERATE
    assert (expired.prompt_id, expired.again) == (0, again)
    assert buffer.expire(1, 1) == []
    assert [group.prompt_id for group in buffer.take(1)] == [3, 4]
    metrics = buffer.take_metrics()
    assert (metrics["staleness/regenerated"], metrics["staleness/dropped"]) == (again, not again)
    assert ((0, 1) in buffer.missing()) is again  # all of it is sampled anew
    assert set(buffer.take_metrics().values()) == {float(len(buffer)), 0.0}


def test_equal_rewards_are_taken_beyond_the_cap() -> None:
    policy = _make_policy(max_staleness=0, skip_uniform=True, max_oversample=1.5)
    buffer: RolloutBuffer[Sample] = RolloutBuffer(policy)
    kept = {}
    while not buffer.is_ready(0):
        for prompt in buffer.admit(0):
            kept[prompt] = [buffer.put(prompt, s, (prompt, s), 1.0) for s in range(2)]
    # One and a half batches may be started: after three prompts the next ones are taken as they are.
    assert kept == {p: [True, p > 2] for p in range(5)}
    assert [group.prompt_id for group in buffer.take(0)] == [3, 4]
    assert buffer.take_metrics()["rollout/skipped_groups"] == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 3}, "rollout.n=2 .* this run has rollout.n=3"),
        ({"max_staleness": 0}, "max_staleness=1; .* max_staleness=0"),
    ],
)
def test_groups_in_flight_that_another_policy_cannot_hold_are_refused(
    changes: dict, words: str
) -> None:
    before: RolloutBuffer[Sample] = RolloutBuffer(_make_policy())
    empty = before.state()
    before.admit(0)
    with pytest.raises(ConfigError, match=words):
        RolloutBuffer(_make_policy(**changes)).restore(before.state())
    RolloutBuffer(_make_policy(**changes)).restore(empty)
