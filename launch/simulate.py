"""A run in simulated time: step time, idle ratios and staleness that a configuration will have.

Called by `advise` for the layouts that it proposes and by planning tools. Lengths are drawn, responses
are decoded by `decoding`, and who may start and what a batch is made of is decided by the buffer that
real runs have. Consumes a `Pipeline`, produces one `SimulatedStep` a step; waits for nothing.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from launch.decoding import Finished, Replica, Response, StepSeconds
from launch.lengths import Lengths
from megarl.errors import ConfigError
from megarl.rollout.buffer import BufferPolicy, RolloutBuffer

STEPS_TO_FILL = 4  # not counted, unless said: the first batches meet empty generators


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What is simulated; with ``max_staleness=0`` trainer and generators take turns."""

    batch_groups: int  # prompts of a step
    group_size: int  # samples of a prompt
    max_staleness: int
    replicas: int
    slots: int  # of a replica: responses decoded together
    lengths: Lengths  # of responses
    step_seconds: StepSeconds  # one decoding step of a replica
    train_seconds: Callable[[Sequence[int]], float]  # of a batch, by its sequences' lengths
    sync_seconds: float = 0.0  # weights from trainer to generators, for both of them
    prefill_seconds: float = 0.0  # of a token
    recompute: bool = False  # unfinished responses are prefilled again under new weights
    prompt_length: int = 0
    group_seconds: float = 0.0  # of a replica, around a group: its requests, prompts and reports
    known_lengths: tuple[int, ...] = ()  # in place of drawn ones: by prompt and sample, in a ring
    colocated: bool = False  # on the same ranks, which are not idle while the other engine works
    # Times as long that training and decoding take while the other works, where they share a machine.
    beside: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        for name in ("batch_groups", "group_size", "replicas", "slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"pipeline: {name} is {getattr(self, name)}, expected at least 1")
        if self.colocated and self.max_staleness:
            raise ConfigError(
                f"pipeline: colocated with max_staleness {self.max_staleness}, expected 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step, or the mean of several; seconds from one arrival of the trainer to the next."""

    step_seconds: float
    train_seconds: float
    wait_seconds: float  # until the batch was complete
    sync_seconds: float
    trainer_idle_seconds: float  # all but training, unless the trainer's ranks decoded meanwhile
    generator_idle_seconds: float  # of a replica, with nothing to decode and no training to do
    staleness_mean: float  # versions between a token and the version that it trains
    staleness_max: float
    tokens: float  # of responses

    @property
    def trainer_idle_ratio(self) -> float:
        return self.trainer_idle_seconds / self.step_seconds

    @property
    def generator_idle_ratio(self) -> float:
        return self.generator_idle_seconds / self.step_seconds


class _Run:
    """The state of one simulation; `steps` is its only entry."""

    def __init__(self, pipeline: Pipeline, num_steps: int, seed: int):
        self._pipeline = pipeline
        self._random = random.Random(seed)
        self._now = 0.0
        self._replicas = [
            Replica(pipeline.slots, pipeline.step_seconds) for _ in range(pipeline.replicas)
        ]
        self._buffer: RolloutBuffer[Finished] = RolloutBuffer(
            BufferPolicy(
                batch_groups=pipeline.batch_groups,
                group_size=pipeline.group_size,
                max_staleness=pipeline.max_staleness,
                last_version=num_steps,
            )
        )
        self._num_steps = num_steps
        self._queue: deque[list[Response]] = deque()
        self._samples: dict[int, int] = {}  # so far, of each group
        self._num_complete = 0  # groups that no batch has taken
        self._asked = -1  # how many they were when the buffer was last asked
        self._admitted: dict[int, int] = {}  # version at each group's admission
        self._unfinished: Counter[int] = Counter()  # groups, by that version
        # Changes to come; an entry counts only while it says what `_due` says of its replica.
        self._changes: list[tuple[float, int]] = []
        self._due = [float("inf")] * pipeline.replicas

    def steps(self) -> list[SimulatedStep]:
        return [self._step(version) for version in range(self._num_steps)]

    def _step(self, version: int) -> SimulatedStep:
        begin, idle = self._now, self._idle_seconds()
        self._exchange_weights(version)
        arrived, self._asked = self._now, -1
        while not self._is_ready(version):
            self._change()
        self._advance_to(self._now)
        collected, idle = self._now, self._idle_seconds() - idle
        found = [
            sample for group in self._buffer.take(version) for sample in group.samples.values()
        ]
        self._num_complete -= self._pipeline.batch_groups
        lengths = [f.response.prompt_length + f.response.length for f in found]
        idle += self._train(self._pipeline.train_seconds(lengths))
        tokens = sum(f.response.length for f in found)
        return SimulatedStep(
            step_seconds=self._now - begin,
            train_seconds=self._now - collected,
            wait_seconds=collected - arrived,
            sync_seconds=arrived - begin,
            trainer_idle_seconds=0.0 if self._pipeline.colocated else collected - begin,
            generator_idle_seconds=idle / len(self._replicas),
            staleness_mean=version - sum(f.version_sum for f in found) / tokens,
            staleness_max=version - min(f.first_version for f in found),
            tokens=tokens,
        )

    def _train(self, seconds: float) -> float:
        """Pass the time of training, ``seconds`` were nothing decoded; return the replicas' idle time."""
        idle, (slower, slower_decoding) = self._idle_seconds(), self._pipeline.beside
        self._set_slow_down(slower_decoding)
        while seconds > 0:
            pace = slower if any(replica.is_busy for replica in self._replicas) else 1.0
            until = min(self._now + seconds * pace, self._next_change())
            seconds -= max(until - self._now, 1e-9) / pace
            self._advance_to(until)
        self._set_slow_down(1.0)
        return 0.0 if self._pipeline.colocated else self._idle_seconds() - idle

    def _set_slow_down(self, slow_down: float) -> None:
        """Change the pace of all replicas, which have come as far as the clock."""
        for index, replica in enumerate(self._replicas):
            replica.slow_down = slow_down
            self._expect(index)

    def _is_ready(self, version: int) -> bool:
        """Ask the buffer, which looks at all its groups, only where it may say yes anew."""
        due = version - self._pipeline.max_staleness
        news = self._num_complete != self._asked
        if not news or self._num_complete < self._pipeline.batch_groups or self._unfinished[due]:
            return False
        self._asked = self._num_complete
        return self._buffer.is_ready(version)

    def _idle_seconds(self) -> float:
        return sum(replica.idle_seconds for replica in self._replicas)

    def _exchange_weights(self, version: int) -> None:
        pipeline = self._pipeline
        for index, replica in enumerate(self._replicas):
            replica.version = version
            replica.stall(pipeline.sync_seconds)
            if pipeline.recompute:
                replica.stall(replica.held_tokens * pipeline.prefill_seconds)
            self._expect(index)
        for group in self._buffer.admit(version):
            self._samples[group] = 0
            self._admitted[group] = version
            self._unfinished[version] += 1
            self._queue.append(
                [
                    Response(
                        group=group,
                        length=self._length(group, sample),
                        prompt_length=pipeline.prompt_length,
                    )
                    for sample in range(pipeline.group_size)
                ]
            )
        self._dispatch()
        self._advance_to(self._now + pipeline.sync_seconds)

    def _length(self, group: int, sample: int) -> int:
        known = self._pipeline.known_lengths
        if not known:
            return self._pipeline.lengths.draw(self._random)
        return known[(group * self._pipeline.group_size + sample) % len(known)]

    def _next_change(self) -> float:
        while self._changes and self._changes[0][0] != self._due[self._changes[0][1]]:
            heapq.heappop(self._changes)
        return self._changes[0][0] if self._changes else float("inf")

    def _change(self) -> None:
        """Move to the next change, of one replica."""
        self._now = self._next_change()
        self._advance(heapq.heappop(self._changes)[1])
        self._dispatch()

    def _advance_to(self, until: float) -> None:
        """Let the generators decode until then; all of them have come that far afterwards."""
        while self._next_change() <= until:
            self._change()
        self._now = until
        for index in range(len(self._replicas)):
            self._advance(index)

    def _advance(self, index: int) -> None:
        for finished in self._replicas[index].advance(self._now):
            group = finished.response.group
            self._buffer.put(group, self._samples[group], finished, 0.0)
            self._samples[group] += 1
            if self._samples[group] == self._pipeline.group_size:
                self._num_complete += 1
                self._unfinished[self._admitted[group]] -= 1
        self._expect(index)

    def _expect(self, index: int) -> None:
        self._due[index] = self._replicas[index].next_change()
        if self._due[index] < float("inf"):
            heapq.heappush(self._changes, (self._due[index], index))

    def _dispatch(self) -> None:
        """Give each waiting group to the replica with least to do, while one has room."""
        while self._queue:
            index = min(
                range(len(self._replicas)), key=lambda index: self._replicas[index].outstanding
            )
            if not self._replicas[index].has_room(self._pipeline.group_size):
                return
            self._advance(index)
            self._replicas[index].stall(
                self._pipeline.group_seconds
                + self._pipeline.prompt_length * self._pipeline.prefill_seconds
            )
            self._replicas[index].add(self._queue.popleft())
            self._expect(index)


def simulate(pipeline: Pipeline, num_steps: int, seed: int = 0) -> list[SimulatedStep]:
    """Return the steps of a run, in order."""
    return _Run(pipeline, num_steps, seed).steps()


def steady(
    steps: Sequence[SimulatedStep], last: int = 0, first: int = STEPS_TO_FILL
) -> SimulatedStep:
    """Return the mean of the steps that count: without the ``first``, that fill, and the ``last``.

    Raises:
        ConfigError: none count.
    """
    counted = steps[first : len(steps) - last]
    if not counted:
        raise ConfigError(f"{len(steps)} simulated steps, expected more than {first + last}")
    means = {
        item.name: sum(getattr(step, item.name) for step in counted) / len(counted)
        for item in fields(SimulatedStep)
    }
    return SimulatedStep(**{**means, "staleness_max": max(s.staleness_max for s in counted)})
