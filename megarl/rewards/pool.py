"""Score responses with a user's function in processes that can be killed; owned by the executor.

A thread or a signal handler cannot stop a reward function that is stuck inside C code (a regular
expression, a computer algebra system); killing its process can. So one response may cost its own
score, never the run.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import mmap
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.errors import ConfigError, RewardError
from megarl.rewards.loading import load_score_function
from megarl.rewards.worker import PROGRESS_BYTES, Result

logger = logging.getLogger(__name__)

STARTUP_SECONDS = 120.0  # to start Python and import the function's module
MAX_CHUNK = 64  # items sent at once
CHUNK_SECONDS = 0.005  # chunks grow while they take less than this


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One response to score."""

    prompt: str
    response: str
    answer: str
    extra: str = ""  # a JSON object, or empty
    finished: bool = True  # the response ended by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Scores in the order of the items, and what to report about them."""

    scores: list[float]
    metrics: dict[str, float]  # reward/<key>: mean of each extra number; reward/timeouts, ..
    timeouts: int  # calls that were killed: score 0
    errors: int  # calls that raised or returned no finite number: score 0
    crashes: int  # calls that took their process down: score 0


@dataclass(slots=True, eq=False)
class _Worker:
    """One process. starting -> idle <-> busy -> dead; `chunk` holds the unanswered items."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    progress: memoryview  # shared with the process: position in the chunk of the current item
    deadline: float  # of the start or of the item in progress; infinite when idle
    ready: bool = False
    chunk: list[int] = field(default_factory=list)
    num_answered: int = 0  # of the chunk as it was sent
    sent_at: float = 0.0
    received: bytes = b""

    def take_current(self) -> int:
        """Remove and return the item in progress; the others of the chunk stay."""
        # The process may be gone after its answer was sent and before it began the next item.
        return self.chunk.pop(max(0, self.progress[0] - self.num_answered))

    def kill(self) -> None:
        """End the process and all it started, and reap it."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):  # all of them are gone already
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(slots=True)
class _Batch:
    """The state of one `score` call."""

    items: Sequence[RewardItem]
    waiting: collections.deque[int]
    scores: dict[int, float] = field(default_factory=dict)
    extras: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    timeouts: int = 0
    errors: int = 0
    crashes: int = 0
    first_error: str = ""


class RewardPool:
    """Processes that call one reward function; one owner, one thread.

    Example::

        pool = RewardPool("megarl.rewards.arithmetic:score", num_processes=2, timeout_seconds=10)
        result = pool.score([RewardItem(prompt="1+1=?", response="#2", answer="2")])
        pool.close()
    """

    def __init__(
        self, path: str, num_processes: int, timeout_seconds: float, give_up_after: int = 1
    ) -> None:
        """Start the processes; they import the function while the caller goes on.

        Args:
            give_up_after: failures one after another that mean the function does not work.

        Raises:
            ConfigError: `path` does not name a usable function; no process was started.
        """
        load_score_function(path)
        if num_processes < 1 or timeout_seconds <= 0:
            raise ConfigError(
                "reward.num_processes must be at least 1 and reward.timeout_seconds above 0, "
                f"got {num_processes} and {timeout_seconds}"
            )
        self._path = path
        self._timeout_seconds = timeout_seconds
        self._chunk_size = 1
        self._give_up_after = give_up_after
        self._failures = 0  # one after another, until now
        self._error_logged = False
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        for _ in range(num_processes):
            self._start_worker()

    def score(self, items: Sequence[RewardItem]) -> RewardResult:
        """Score every item; waits for the processes, at most `timeout_seconds` an item.

        Raises:
            RewardError: the function failed ``give_up_after`` times and more, never scoring an item
                in between, or its processes do not start.
        """
        if not self._workers:
            raise RewardError(f"reward pool of {self._path} is closed")
        batch = _Batch(items=items, waiting=collections.deque(range(len(items))))
        try:
            self._run(batch)
        except BaseException:
            self.close()  # processes still hold items of this batch, which no later one may see
            raise
        return self._result(batch)

    def close(self) -> None:
        """End every process and what it started."""
        for worker in self._workers:
            self._selector.unregister(worker.connection)
            worker.kill()
        self._workers = []
        self._selector.close()

    def _run(self, batch: _Batch) -> None:
        for worker in list(self._workers):
            if worker.process.poll() is not None:  # died between two batches: nobody's item
                self._replace(worker, batch)
        while len(batch.scores) < len(batch.items):
            self._dispatch(batch)
            now = time.monotonic()
            nearest = min(w.deadline for w in self._workers if w.chunk or not w.ready)
            for key, _ in self._selector.select(max(0.0, nearest - now)):
                self._receive(key.data, batch)
            now = time.monotonic()
            for worker in [w for w in self._workers if w.deadline < now]:
                self._expire(worker, batch)

    def _start_worker(self) -> None:
        ours, theirs = socket.socketpair()
        progress_fd = os.memfd_create("reward_progress")
        os.ftruncate(progress_fd, PROGRESS_BYTES)
        # Not `multiprocessing`: its spawn imports the parent's main module again, torch and all.
        command = (
            f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; from megarl.rewards.worker import main; "
            f"main({self._path!r}, {self._timeout_seconds!r}, {progress_fd})"
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=theirs.fileno(),
                pass_fds=[progress_fd],
                start_new_session=True,  # a process group of its own, to be killed as one
            )
        progress = memoryview(mmap.mmap(progress_fd, PROGRESS_BYTES)).cast("Q")
        os.close(progress_fd)
        ours.settimeout(self._timeout_seconds)  # for sending; received only what select announced
        worker = _Worker(process, ours, progress, deadline=time.monotonic() + STARTUP_SECONDS)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._workers.append(worker)

    def _replace(self, worker: _Worker, batch: _Batch) -> None:
        """Kill a worker, give its unanswered items back and start another."""
        self._selector.unregister(worker.connection)
        worker.kill()
        self._workers.remove(worker)
        batch.waiting.extendleft(reversed(worker.chunk))
        self._chunk_size = 1
        self._start_worker()

    def _dispatch(self, batch: _Batch) -> None:
        for worker in list(self._workers):
            if not batch.waiting:
                return
            if not worker.ready or worker.chunk:
                continue
            share = -(-len(batch.waiting) // len(self._workers))
            size = min(self._chunk_size, share)
            worker.chunk = [batch.waiting.popleft() for _ in range(size)]
            worker.num_answered = worker.progress[0] = 0
            worker.sent_at = time.monotonic()
            worker.deadline = worker.sent_at + self._timeout_seconds
            chunk = [
                [item.prompt, item.response, item.answer, item.extra, item.finished]
                for item in (batch.items[index] for index in worker.chunk)
            ]
            try:
                worker.connection.sendall(json.dumps(chunk).encode() + b"\n")
            except OSError:
                self._crash(worker, batch)

    def _receive(self, worker: _Worker, batch: _Batch) -> None:
        try:
            received = worker.connection.recv(1 << 20)
        except OSError:
            received = b""
        if not received:
            self._crash(worker, batch)
            return
        *lines, worker.received = (worker.received + received).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if answer == "ready":
                worker.ready = True
                continue
            for index, result in zip(worker.chunk, answer, strict=False):
                self._record(batch, index, result)
            worker.num_answered += len(answer)
            del worker.chunk[: len(answer)]
        now = time.monotonic()
        worker.deadline = now + self._timeout_seconds if worker.chunk else float("inf")
        if not worker.chunk and worker.sent_at:
            quick = now - worker.sent_at < CHUNK_SECONDS
            self._chunk_size = min(MAX_CHUNK, self._chunk_size * 2) if quick else 1

    def _record(self, batch: _Batch, index: int, result: Result) -> None:
        match result:
            case str(error):
                batch.errors += 1
                batch.scores[index] = 0.0
                self._note_error(batch, f"raised on one item:\n{error}")
            case dict(numbers):
                batch.scores[index] = numbers.pop("score")
                for key, value in numbers.items():
                    batch.extras[key].append(value)
            case score:
                batch.scores[index] = score

    def _note_error(self, batch: _Batch, message: str) -> None:
        batch.first_error = batch.first_error or message
        if not self._error_logged:
            self._error_logged = True
            logger.warning(
                "reward function %s %s (score 0; later failures are only counted)",
                self._path,
                message,
            )

    def _crash(self, worker: _Worker, batch: _Batch) -> None:
        """The process is gone: blame the item it was working on."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it closed its end, yet lives on
            worker.process.wait(timeout=5.0)
        if not worker.ready:
            raise RewardError(
                f"a process of reward function {self._path} died while importing it, exit code "
                f"{worker.process.returncode}; its output is on standard error"
            )
        if worker.chunk:
            batch.crashes += 1
            batch.scores[worker.take_current()] = 0.0
            code = worker.process.returncode
            self._note_error(batch, f"took its process down, exit code {code}")
        self._replace(worker, batch)

    def _expire(self, worker: _Worker, batch: _Batch) -> None:
        """The process is late: the item in progress scores 0."""
        if not worker.ready:
            raise RewardError(
                f"a process of reward function {self._path} did not start in {STARTUP_SECONDS} s"
            )
        index = worker.take_current()
        batch.timeouts += 1
        batch.scores[index] = 0.0
        logger.debug("scoring timed out: prompt %r", batch.items[index].prompt)
        self._replace(worker, batch)

    def _result(self, batch: _Batch) -> RewardResult:
        failed = batch.errors + batch.crashes
        self._failures = self._failures + failed if failed == len(batch.items) else 0
        if self._failures >= self._give_up_after:
            raise RewardError(
                f"reward function {self._path} failed on all of {self._failures} items; it "
                f"{batch.first_error}"
            )
        metrics = {f"reward/{key}": sum(v) / len(v) for key, v in sorted(batch.extras.items())}
        metrics |= {
            "reward/timeouts": float(batch.timeouts),
            "reward/errors": float(batch.errors),
            "reward/crashes": float(batch.crashes),
        }
        return RewardResult(
            scores=[batch.scores[i] for i in range(len(batch.items))],
            metrics=metrics,
            timeouts=batch.timeouts,
            errors=batch.errors,
            crashes=batch.crashes,
        )
