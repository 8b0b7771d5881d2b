"""Which replica samples what: requests wait here until a replica has room.

Held by the reward executor, whose threads (one for each replica) and main thread call it at the same
time. The requests of one prompt go to one replica together, which computes their common prefix once;
the replica with the fewest outstanding tokens comes first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from megarl.errors import ChannelError
from megarl.rollout.engine import Sample, SampleRequest
from megarl.rollout.messages import State, Work

_IDLE_SECONDS = 1.0  # longest time for which an idle replica's report waits for its answer


class Dispatcher:
    """Requests in, samples out; `answer` is one exchange with a replica."""

    def __init__(self, num_replicas: int, slots: int, idle_seconds: float = _IDLE_SECONDS):
        """Keep at most about ``slots`` requests at each replica."""
        self._slots, self._idle_seconds = slots, idle_seconds
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for replicas that have nothing to do
        self._arrived = threading.Event()
        self._queue: deque[list[SampleRequest]] = deque()
        self._running: list[dict[int, SampleRequest]] = [{} for _ in range(num_replicas)]
        self._aborts: list[list[int]] = [[] for _ in range(num_replicas)]
        self._handing_over = [False] * num_replicas
        self._state = State.GO
        self._finished: list[Sample] = []
        self._partial: dict[int, Sample] = {}

    def submit(self, group: Sequence[SampleRequest], *, first: bool = False) -> None:
        """Queue the requests of one prompt; ``first``: before those that wait."""
        with self._lock:
            (self._queue.appendleft if first else self._queue.append)(list(group))
            self._changed.notify_all()

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Forget requests, wherever they are."""
        gone = set(request_ids)
        with self._lock:
            kept = ([r for r in group if r.request_id not in gone] for group in self._queue)
            self._queue = deque(group for group in kept if group)
            self._finished = [s for s in self._finished if s.request_id not in gone]
            for running, aborts in zip(self._running, self._aborts, strict=True):
                mine = gone & running.keys()
                aborts += sorted(mine)
                for request_id in mine:
                    del running[request_id]

    def open(self) -> None:
        """Begin a tick: replicas decode until `close`."""
        with self._lock:
            self._state = State.GO
            self._partial.clear()

    def close(self, *, hand_over: bool) -> None:
        """Tell each replica at its next report that the tick ends."""
        with self._lock:
            self._state = State.HAND_OVER if hand_over else State.BOUNDARY
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Return when samples have arrived, at the latest after ``seconds``."""
        self._arrived.wait(seconds)

    def take(self) -> list[Sample]:
        """Return the finished samples that arrived since the last call."""
        with self._lock:
            found, self._finished = self._finished, []
            self._arrived.clear()
        return found

    @property
    def outstanding(self) -> int:
        """Requests that wait or run."""
        with self._lock:
            return sum(map(len, self._queue)) + sum(map(len, self._running))

    def unfinished(self) -> list[tuple[SampleRequest, Sample | None]]:
        """Return every outstanding request with what its replica handed over of it."""
        with self._lock:
            waiting = [request for group in self._queue for request in group]
            running = [r for requests in self._running for r in requests.values()]
            return [(request, self._partial.get(request.request_id)) for request in running] + [
                (request, None) for request in waiting
            ]

    def answer(self, replica: int, samples: Sequence[Sample]) -> Work:
        """Take a replica's report and return its orders; with nothing to do, wait for some.

        Raises:
            ChannelError: it reports what it was not asked for.
        """
        with self._lock:
            if self._handing_over[replica]:
                self._handing_over[replica] = False
                self._partial.update({sample.request_id: sample for sample in samples})
                return Work(state=State.BOUNDARY)
            self._keep(replica, samples)
            aborts, self._aborts[replica] = self._aborts[replica], []
            if not (samples or aborts or self._running[replica]):
                self._changed.wait_for(lambda: self._queue or self._state, self._idle_seconds)
            if self._state is State.GO:
                return Work(state=State.GO, requests=self._assign(replica), aborts=aborts)
            self._handing_over[replica] = self._state is State.HAND_OVER
            return Work(state=self._state, aborts=aborts)

    def _keep(self, replica: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.request_id in self._aborts[replica]:  # it ended before it heard of that
                self._aborts[replica].remove(sample.request_id)
            elif self._running[replica].pop(sample.request_id, None) is None:
                raise ChannelError(
                    f"replica {replica} reports request {sample.request_id}, which is not its own"
                )
            else:
                self._finished.append(sample)
        if samples:
            self._arrived.set()

    def _assign(self, replica: int) -> list[SampleRequest]:
        running = self._running[replica]
        loads = [_tokens(requests.values()) for requests in self._running]
        added: list[SampleRequest] = []
        while self._queue and (
            not running
            or (loads[replica] <= min(loads) and len(running) + len(self._queue[0]) <= self._slots)
        ):
            group = self._queue.popleft()
            added += group
            running.update({request.request_id: request for request in group})
            loads[replica] += _tokens(group)
        return added


def _tokens(requests: Iterable[SampleRequest]) -> int:
    """Return the most tokens that are still to be computed for requests."""
    return sum(len(r.prompt) + r.max_tokens - len(r.generated) for r in requests)
