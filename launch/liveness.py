"""Who is silent: told from heartbeats and statuses, by the launcher's own clock.

Called by `launch.local` once a second. Consumes what `megarl.progress` publishes; waits for nothing.

A rank is *silent* when its heartbeat has not come, or when it does not wait for a peer and has been
doing the same thing, for longer than ``fault.timeout_seconds``. A rank that waits is never silent
while it beats: it could go on, and its own wait ends in an error. Before its first tick, where engines
start and code is compiled, a rank has at least ten minutes, unless a peer's wait ends before.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.ranks import LocalRanks
from megarl.progress import MISSED_SECONDS, Progress, Status

_START_SECONDS = 600.0  # loading and compiling are slow once, however short a step is
_DUMP_SECONDS = 3.0  # for a rank to write its stacks, once it runs
_DUMP_QUIET_SECONDS = 0.5  # without a further line, it has written them
_DUMP_BYTES = 16_000  # of each rank; the innermost frames come first
_STATE_FILES = ("wchan", "syscall", "stack")


@dataclass(slots=True)
class _Seen:
    """The last word of a rank and when, by this clock, it changed."""

    beat_at: float
    status_at: float
    beat: int = -1
    status: Status | None = None


class Watchdog:
    """Judges all ranks of one attempt: `look` about once a second, then `silent` or `suspects`."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        timeout_seconds: float,
        *,
        judge_busy: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Without ``judge_busy`` only heartbeats count: for work that may be one long step."""
        self._timeout, self._judge_busy, self._clock = timeout_seconds, judge_busy, clock
        now = clock()
        self._seen = {rank: _Seen(beat_at=now, status_at=now) for rank in ranks}

    def look(self, words: Mapping[int, Progress | None]) -> None:
        """Take in what the ranks that still run last said; the others are no longer watched."""
        now = self._clock()
        self._seen = {rank: seen for rank, seen in self._seen.items() if rank in words}
        for rank, seen in self._seen.items():
            word = words[rank]
            if word is None:
                continue
            if word.beat != seen.beat:
                seen.beat, seen.beat_at = word.beat, now
            if word.status != seen.status:
                seen.status, seen.status_at = word.status, now

    def silent(self) -> tuple[int, ...]:
        """Return the ranks whose silence has lasted too long; none where all is well."""
        overdue = any(self._silence(seen) > self._patience(seen) for seen in self._seen.values())
        return self.suspects() if overdue else ()

    def suspects(self) -> tuple[int, ...]:
        """Return whose fault it is that a wait ended without its peer, as far as silence tells.

        Ranks without a heartbeat; else those that neither wait nor have said anything new for most
        of the time that a wait may take.
        """
        now, missed = self._clock(), min(MISSED_SECONDS, self._timeout)
        stopped = [rank for rank, seen in self._seen.items() if now - seen.beat_at > missed]
        half = self._timeout / 2
        busy = [rank for rank, seen in self._seen.items() if self._silence(seen) > half]
        return tuple(stopped or busy)

    def describe(self, rank: int) -> str:
        """Return since when ``rank`` is silent, and in which way."""
        seen, now = self._seen[rank], self._clock()
        if seen.status is None:
            return f"has not joined after {now - seen.beat_at:.1f} s"
        if now - seen.beat_at > MISSED_SECONDS:
            return f"makes no progress: its heartbeat stopped {now - seen.beat_at:.1f} s ago"
        return f"makes no progress: it lives, and has said nothing new for {now - seen.status_at:.1f} s"

    def _silence(self, seen: _Seen) -> float:
        """Return for how long a rank has not beaten or, where it does not wait, said nothing new."""
        now = self._clock()
        if seen.status is None or seen.status.waiting or not self._judge_busy:
            return now - seen.beat_at
        return now - min(seen.beat_at, seen.status_at)

    def _patience(self, seen: _Seen) -> float:
        starting = seen.status is None or seen.status.step < 0
        return max(self._timeout, _START_SECONDS) if starting else self._timeout


def stacks(ranks: LocalRanks, rank: int) -> list[str]:
    """Make ``rank`` write the stacks of its threads into its log; return them, or why there are none.

    A stopped process is continued for that. One that cannot run shows what the kernel says of it.
    """
    process, log = ranks.process_id(rank), ranks.log_path(rank)
    state = _state(process)
    before = log.stat().st_size
    ranks.signal_main_thread(rank, signal.SIGUSR2)  # pending while it is stopped
    ranks.send_signal(rank, signal.SIGCONT)
    dumped = _appended(log, before)
    lines = [f"state of process {process} when found: {state[0]}", *dumped.splitlines()]
    return lines if dumped else [*lines, "it writes no stacks", *state[1:]]


def _appended(log: Path, before: int) -> str:
    """Return what is written behind position ``before``, when no more comes."""
    deadline, size = time.monotonic() + _DUMP_SECONDS, before
    while time.monotonic() < deadline:
        time.sleep(_DUMP_QUIET_SECONDS)
        grown = log.stat().st_size
        if grown == size > before:
            break
        size = grown
    with log.open("rb") as file:
        file.seek(before)
        return file.read(_DUMP_BYTES).decode(errors="replace")


def _state(process: int) -> list[str]:
    """Return the state of a process, then what it waits for in the kernel, as far as we may read."""
    folder = Path("/proc") / str(process)
    if not folder.is_dir():
        return ["unknown (no /proc here)"]
    status = (folder / "status").read_text()
    state = next(line for line in status.splitlines() if line.startswith("State:"))
    lines = [state.removeprefix("State:").strip()]
    for name in _STATE_FILES:
        try:
            lines.append(f"{name}: {(folder / name).read_text().strip()}")
        except (PermissionError, ProcessLookupError):
            lines.append(f"{name}: not ours to read")
    return lines
