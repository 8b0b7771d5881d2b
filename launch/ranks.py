"""The processes of one attempt at a job, and the store at which they meet: start, look, end.

Called by `launch.local`. The launcher hosts the store, so it can still read what every rank was
doing after one of them died. It imports torch for that while the ranks import their engines.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from megarl.config import FaultConfig
from megarl.progress import (
    OBSERVER_KEY,
    RESTARTS_VARIABLE,
    STOP_KEY,
    Failure,
    Progress,
    Store,
    read_failure,
    read_progress,
)
from megarl.topology import Topology

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 0.5  # between a rank's end and that of what it started, which may still clean up
# glibc keeps freed memory for the next tensor, in huge pages: without this page faults take
# about a tenth of a CPU generator's time.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_REAP_SECONDS = 10.0  # a process in an uninterruptible wait (a driver, a file server) may never end


def common_environment() -> dict[str, str]:
    """Return what all ranks on this machine have in their environment."""
    return {"OMP_NUM_THREADS": "1", **_ALLOCATOR, **os.environ}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJob:
    """What to start."""

    command: str  # train, sft, replay, eval or doctor
    arguments: tuple[str, ...]  # config file and overrides
    topology: Topology
    folder: Path  # of the run
    max_steps: int
    fault: FaultConfig


class LocalRanks:
    """All ranks of a job as child processes: `start`, look at them, `end`; then none is left."""

    def __init__(self, job: LocalJob, restarts: int = 0):
        self._job, self._restarts = job, restarts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self._hosted: Store | None = None  # there once `start` has returned
        self._stop_asked = False
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._log_starts: dict[int, int] = {}  # bytes that earlier attempts have left in the logs

    def start(self, arguments: tuple[str, ...]) -> None:
        for rank in range(self._job.topology.size):
            self._children[rank] = self._start(rank, arguments)
        self._hosted = self._host()
        self._hosted.set(OBSERVER_KEY, "1")
        if self._stop_asked:
            self.request_stop()

    def _host(self) -> Store:
        """Return the store; a rank that called already has waited at the socket."""
        from torch.distributed import TCPStore

        return TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
            master_listen_fd=self._listener.detach(),
        )

    @property
    def _store(self) -> Store:
        assert self._hosted is not None, "before `start`"
        return self._hosted

    def _start(self, rank: int, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
        path = self.log_path(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **common_environment(),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            RESTARTS_VARIABLE: str(self._restarts),
            "WORLD_SIZE": str(self._job.topology.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours, not rank 0's
        }
        with path.open("ab") as log:
            self._log_starts[rank] = log.tell()
            # A session of its own: Ctrl-C in the terminal reaches only the launcher.
            return subprocess.Popen(
                [sys.executable, "-m", "megarl.train", self._job.command, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self._children)

    def label(self, rank: int) -> str:
        return self._job.topology.label(rank)

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.label(rank)})"

    def log_path(self, rank: int) -> Path:
        return self._job.folder / "logs" / f"{self.label(rank)}.log"

    def log_text(self, rank: int) -> str:
        """Return what this attempt has written into the rank's log."""
        with self.log_path(rank).open("rb") as log:
            log.seek(self._log_starts[rank])
            return log.read().decode(errors="replace")

    def process_id(self, rank: int) -> int:
        return self._children[rank].pid

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        """Send ``rank`` a signal; nothing where it has ended."""
        self._children[rank].send_signal(number)

    def signal_main_thread(self, rank: int, number: signal.Signals) -> None:
        """Send ``rank`` a signal that no other of its threads may take, where the C library can.

        One sent to a stopped process is taken by whichever thread wakes first: a dump of stacks
        by another thread reads the main thread's while it runs on.
        """
        library, process = ctypes.CDLL(None), self._children[rank].pid
        if not hasattr(library, "tgkill"):  # glibc before 2.30, musl
            self.send_signal(rank, number)
        elif self.exit_code(rank) is None:
            library.tgkill(process, process, int(number))

    def exit_code(self, rank: int) -> int | None:
        """Return how ``rank`` ended; None while it runs."""
        return self._children[rank].poll()

    def running(self) -> tuple[int, ...]:
        return tuple(rank for rank in self._children if self.exit_code(rank) is None)

    def failed(self) -> tuple[int, ...]:
        return tuple(rank for rank in self._children if self.exit_code(rank) not in (None, 0))

    def settle(self, seconds: float) -> None:
        """Give peers of a rank that failed time to notice it and to say what they waited for."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.running():
            time.sleep(_POLL_SECONDS)

    def progress(self, rank: int) -> Progress | None:
        return read_progress(self._store, rank)

    def failure(self, rank: int) -> Failure | None:
        return read_failure(self._store, rank)

    def request_stop(self) -> None:
        """Ask all ranks to save and end; may come from a signal handler, before and during `start`."""
        self._stop_asked = True
        if self._hosted is not None:
            self._hosted.set(STOP_KEY, "1")

    def end(self) -> tuple[int, ...]:
        """End what still runs, and what it started; return the ranks that cannot be ended.

        SIGKILL: a rank takes SIGTERM for the wish to save first, and a stopped one takes nothing else.
        """
        running = [self._children[rank] for rank in self.running()]
        for child in running:
            os.kill(child.pid, signal.SIGKILL)
        if running:
            time.sleep(_GRACE_SECONDS)
        for child in running:  # not yet reaped, so the number of its group is still its own
            os.killpg(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + _REAP_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self.running()
