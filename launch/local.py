"""Ranks of one machine as child processes: start, watch, report, end.

Called by `megarl.cli`. The launcher hosts the run's store, so it can still read what every rank
was doing after one of them died. Consumes the children's exit codes and ``metrics.jsonl``; waits
for children only, and is unblocked by their end: a rank that ends badly ends all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from torch.distributed import TCPStore

from megarl.observe.metrics import METRICS_FILE, MetricsTail
from megarl.observe.terminal import TerminalView
from megarl.topology import Topology
from megarl.world import FAILURE_KEY, STOP_KEY, Failure, read_status

_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 2.0  # after a death: time for peers to notice and say what they waited for
_TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL
_LOG_TAIL_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJob:
    """What to start."""

    command: str  # train, sft or eval
    arguments: tuple[str, ...]  # config file and overrides
    topology: Topology
    folder: Path  # of the run
    max_steps: int


class LocalLauncher:
    """Runs one job: `run` returns the exit code, and no child outlives it."""

    def __init__(self, job: LocalJob, console: Console):
        self._job, self._console = job, console
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._signals = 0

    def run(self) -> int:
        """Start all ranks and return 0 when all ended well, 1 when one did not."""
        handlers = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        view = TerminalView(self._console)
        try:
            ranks = ", ".join(f"{len(p.ranks)} {p.name}" for p in self._job.topology.places)
            self._say(f"starting {ranks} ranks; their logs are in {self._job.folder / 'logs'}")
            for rank in range(self._job.topology.size):
                self._children[rank] = self._start(rank)
            return self._watch(view, MetricsTail(self._job.folder / METRICS_FILE))
        finally:
            view.close()
            self._end_children()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        """Ask for a checkpoint and a clean end; the second time, end at once."""
        self._signals += 1
        self._store.set(STOP_KEY, "1")
        if self._signals > 1:
            raise KeyboardInterrupt
        self._say("stopping: saving a checkpoint; again to end at once", style="yellow")

    def _log_path(self, rank: int) -> Path:
        return self._job.folder / "logs" / f"{self._job.topology.label(rank)}.log"

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        path = self._log_path(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._job.topology.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours, not rank 0's
        }
        command = [sys.executable, "-m", "megarl.train", self._job.command, *self._job.arguments]
        with path.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal reaches only the launcher.
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _watch(self, view: TerminalView, tail: MetricsTail) -> int:
        while True:
            codes = {rank: child.poll() for rank, child in self._children.items()}
            rows = tail.poll()
            if rows:
                view.update(rows, self._job.max_steps)
            if any(code not in (None, 0) for code in codes.values()):
                view.close()
                self._report_failure()
                return 1
            if all(code == 0 for code in codes.values()):
                return 0
            time.sleep(_POLL_SECONDS)

    def _report_failure(self) -> None:
        """Say which rank ended first and why, and what every other rank was waiting for."""
        now = time.time()
        statuses = {rank: read_status(self._store, rank) for rank in self._children}
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline and None in [c.poll() for c in self._children.values()]:
            time.sleep(_POLL_SECONDS)
        failures = self._failures()
        culprit = self._culprit(failures)
        label = self._job.topology.label(culprit)
        self._say(f"rank {culprit} ({label}) {self._ending(culprit)}", style="bold red")
        if (status := statuses[culprit]) is not None:
            self._say(f"  it was in: {status.describe(now)}")
        if culprit in failures:
            self._say(f"  {failures[culprit].message}")
        self._say("what its peers waited for:")
        for rank, status in statuses.items():
            if rank == culprit:
                continue
            if rank in failures:
                self._say(f"  {failures[rank].message.splitlines()[0]}")
            else:
                doing = status.describe(now) if status else "starting"
                self._say(f"  rank {rank} ({self._job.topology.label(rank)}): {doing}")
        self._print_log_tail(culprit)

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _failures(self) -> dict[int, Failure]:
        keys = {rank: f"{FAILURE_KEY}/{rank}" for rank in self._children}
        return {
            rank: Failure(**json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _culprit(self, failures: dict[int, Failure]) -> int:
        """Return the rank that ended first of itself: one killed without a word, else the first
        that failed for another reason than a peer's end."""
        ended = [rank for rank, child in self._children.items() if child.poll() not in (None, 0)]
        silent = [rank for rank in ended if rank not in failures]
        if silent:
            return silent[0]
        return min(ended, key=lambda rank: (failures[rank].by_peer, failures[rank].time))

    def _ending(self, rank: int) -> str:
        code = self._children[rank].poll()
        if code is not None and code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"failed with exit code {code}"

    def _print_log_tail(self, rank: int) -> None:
        path = self._log_path(rank)
        lines = path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        self._say(f"last lines of {path}:")
        for line in lines:
            self._say(f"  {line}")

    def _end_children(self) -> None:
        """End what still runs: SIGTERM, then SIGKILL, to each child's whole session."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [child for child in self._children.values() if child.poll() is None]
            for child in running:
                os.killpg(child.pid, number)
            deadline = time.monotonic() + _TERM_SECONDS
            while running and time.monotonic() < deadline:
                running = [child for child in running if child.poll() is None]
                time.sleep(_POLL_SECONDS)
        for child in self._children.values():
            child.wait()


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
