"""A job on one machine: start its ranks, show its progress, report a failure, start it again.

Called by `megarl.cli`. Consumes the children's exit codes, what they say of themselves in the store
(`launch.liveness`) and ``metrics.jsonl``; waits for children only, and is unblocked by their end:
a rank that ends badly, or is silent for too long, ends all.
"""

from __future__ import annotations

import signal
import time

from rich.console import Console

from launch.liveness import Watchdog
from launch.ranks import LocalJob, LocalRanks
from launch.report import Report, report
from megarl.check import Command
from megarl.observe.metrics import METRICS_FILE, MetricsTail
from megarl.observe.terminal import TerminalView

FAILURE_FILE = "failure.txt"
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0  # between two looks at heartbeats
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class LocalLauncher:
    """Runs one job: `run` returns the exit code, and no child outlives it."""

    def __init__(self, job: LocalJob, console: Console):
        self._job, self._console = job, console
        self._view = TerminalView(console)
        self._tail = MetricsTail(job.folder / METRICS_FILE)
        self._ranks: LocalRanks | None = None
        self._signals = 0
        self._attempts = 0

    def run(self) -> int:
        """Start all ranks and return 0 when all ended well, 1 when one did not.

        After a failure the job starts again from its newest checkpoint, at most
        ``fault.max_restarts`` times in a row without a newer one.
        """
        handlers = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        at_launch = newest = self._newest_checkpoint()
        restarts, began, arguments = 0, False, self._job.arguments
        try:
            while (failed := self._attempt(arguments)) is not None:
                began |= failed.began
                last, newest = newest, self._newest_checkpoint()
                restarts = restarts + 1 if newest == last else 1
                if not began or failed.by_user or self._signals:
                    return 1
                if restarts > self._job.fault.max_restarts:
                    return 1
                # A run that may not resume must not go on from what lay in its folder before.
                start = "its start"
                if newest != at_launch and newest is not None:
                    arguments = (*self._job.arguments, "resume=auto")
                    start = newest[0]
                self._record(
                    f"starting again from {start}: "
                    f"{restarts} of {self._job.fault.max_restarts} without a newer checkpoint"
                )
            return 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        """Ask for a checkpoint and a clean end; the second time, end at once."""
        self._signals += 1
        if self._signals > 1:
            raise KeyboardInterrupt
        if self._ranks is not None:
            self._ranks.request_stop()
        self._say("stopping: saving a checkpoint; again to end at once", style="yellow")

    def _newest_checkpoint(self) -> tuple[str, int] | None:
        """Return the name that ``checkpoints/latest`` holds and when it was written."""
        latest = self._job.folder / "checkpoints" / "latest"
        if not latest.is_file():
            return None
        return latest.read_text().strip(), latest.stat().st_mtime_ns

    def _attempt(self, arguments: tuple[str, ...]) -> Report | None:
        """Run all ranks to their end; return why, where it is a bad one."""
        ranks = self._ranks = LocalRanks(self._job, restarts=self._attempts)
        self._attempts += 1
        if self._signals:
            ranks.request_stop()
        topology = self._job.topology
        places = ", ".join(f"{len(place.ranks)} {place.name}" for place in topology.places)
        self._say(
            f"starting {topology.size} ranks ({places}); their logs are in {self._job.folder / 'logs'}"
        )
        try:
            ranks.start(arguments)
            failed = self._watch(ranks)
            if failed is not None:
                self._view.close()
                self._record(*failed.details, headlines=failed.headlines)
            return failed
        finally:
            self._view.close()
            for rank in ranks.end():
                process = ranks.process_id(rank)
                self._say(f"{ranks.name(rank)}, process {process}, cannot be ended", "bold red")

    def _watch(self, ranks: LocalRanks) -> Report | None:
        watchdog = Watchdog(
            ranks.numbers,
            self._job.fault.timeout_seconds,
            judge_busy=self._job.command != Command.EVAL,  # it may be one long step
        )
        next_look = time.monotonic()
        while True:
            rows = self._tail.poll()
            if rows:
                self._view.update(rows, self._job.max_steps)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                watchdog.look({rank: ranks.progress(rank) for rank in ranks.running()})
            if (ranks.failed() or watchdog.silent()) and (found := report(ranks, watchdog)):
                return found
            if not ranks.running():
                return None
            time.sleep(_POLL_SECONDS)

    def _record(self, *lines: str, headlines: tuple[str, ...] = ()) -> None:
        """Say it on the terminal and add it to the run's account of its failures."""
        for line in headlines:
            self._say(line, style="bold red")
        for line in lines:
            self._say(line)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with (self._job.folder / FAILURE_FILE).open("a", encoding="utf-8") as file:
            file.write("\n".join([stamp, *headlines, *lines]) + "\n\n")

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
