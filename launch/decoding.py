"""One replica of a generator in simulated time: responses decoded together, one token each a step.

Called by the simulator, which moves its clock, and by the advisor, which lets it run empty. A step
takes as long as the number of running responses and the tokens that they hold say; between two
changes of those who run, time is computed at once, so that a response of any length costs the same.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

StepSeconds = Callable[[int, float], float]  # (running responses, tokens they hold) -> seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response that is to be sampled."""

    group: int
    length: int
    prompt_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One response that was sampled, and the policy versions that sampled it."""

    response: Response
    first_version: int
    version_sum: float  # over its tokens


class Replica:
    """An engine with ``slots``; owns who runs in it, who waits, and how far time has come.

    Example::

        replica.add(responses)
        replica.advance(min(replica.next_change(), boundary))   # -> what has finished by then
        replica.stall(sync_seconds)                             # decodes nothing so long
        replica.version = 3
    """

    def __init__(self, slots: int, step_seconds: StepSeconds):
        """Begin empty at time 0 with version 0."""
        self.version = 0
        self.now = 0.0
        self.idle_seconds = 0.0  # with nothing to decode
        self.slow_down = 1.0  # times as long that a step takes, for whoever works beside
        self._slots, self._step_seconds = slots, step_seconds
        self._paused_until = 0.0
        self._steps = 0.0  # decoded since the beginning
        self._versions = 0.0  # sum of the versions of these steps
        self._held_at_zero = 0.0  # tokens held by who runs, were no step decoded yet
        self._pace = 0.0  # seconds of a step, until somebody comes or goes
        self._waiting: deque[Response] = deque()
        self._count = 0  # of responses that started: the heap's order among equals
        # (step at which it ends, order, response, first version, self._versions at its start)
        self._running: list[tuple[float, int, Response, int, float]] = []

    @property
    def outstanding(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def has_room(self, count: int) -> bool:
        """Whether a prompt's ``count`` responses may come: they fit, or nothing else is there."""
        return not self.outstanding or self.outstanding + count <= self._slots

    @property
    def held_tokens(self) -> float:
        """Prompt and response tokens so far of all that runs."""
        return self._held_at_zero + len(self._running) * self._steps

    def add(self, responses: Sequence[Response]) -> None:
        """Queue responses; as many start now as there are slots."""
        self._waiting.extend(responses)
        self._start()

    def stall(self, seconds: float) -> None:
        """Decode nothing for ``seconds`` more: weights are written, a prompt is prefilled."""
        self._paused_until = max(self.now, self._paused_until) + seconds

    def next_change(self) -> float:
        """Return when the next response ends; infinity where none runs."""
        if not self._running:
            return float("inf")
        begin = max(self.now, self._paused_until)
        return begin + max(0.0, self._running[0][0] - self._steps) * self._pace * self.slow_down

    def advance(self, until: float) -> list[Finished]:
        """Move the clock to ``until``, at most the next change, and return what has ended."""
        begin = min(until, max(self.now, self._paused_until))
        if not self._running:
            self.idle_seconds += until - begin
        elif until >= self.next_change():
            self._move(self._running[0][0] - self._steps)
        elif self._pace:
            self._move((until - begin) / (self._pace * self.slow_down))
        self.now = until
        return self._finish()

    def _move(self, steps: float) -> None:
        self._steps += steps
        self._versions += steps * self.version

    def _finish(self) -> list[Finished]:
        found: list[Finished] = []
        while self._running and self._running[0][0] <= self._steps + 1e-9:
            end, _, response, first, versions = heapq.heappop(self._running)
            self._held_at_zero -= response.prompt_length + response.length - end
            found.append(
                Finished(
                    response=response, first_version=first, version_sum=self._versions - versions
                )
            )
        if found:
            self._start()
        return found

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            response = self._waiting.popleft()
            end = self._steps + response.length
            self._held_at_zero += response.prompt_length - self._steps
            entry = (end, self._count, response, self.version, self._versions)
            heapq.heappush(self._running, entry)
            self._count += 1
        if self._running:
            # Contexts grow while nobody comes or goes: the middle of that time stands for it.
            ahead = (self._running[0][0] - self._steps) * len(self._running) / 2
            self._pace = self._step_seconds(len(self._running), self.held_tokens + ahead)


def seconds_to_empty(replica: Replica) -> float:
    """Decode all that a replica has and return how long that took."""
    begin = replica.now
    while replica.outstanding:
        replica.advance(replica.next_change())
    return replica.now - begin
