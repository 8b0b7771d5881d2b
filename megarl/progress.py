"""What every rank says of itself in the run's store: what it does, that it lives, why it ended.

`megarl.world` publishes (a thread beside the rank's work, so a span costs no message) and, where
no launcher of ours watches, writes down what it sees when it gives up; `launch` reads.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

STOP_KEY, FAILURE_KEY, OBSERVER_KEY = "stop", "failure", "observer"
RESTARTS_VARIABLE = "MEGARL_RESTARTS"  # of a rank's environment: how often its job started again
BEAT_SECONDS = 1.0
MISSED_SECONDS = 4 * BEAT_SECONDS  # no beat for so long: stopped, or in code that keeps the GIL
_LOOK_SECONDS = 0.2  # how old a published status may be


class Store(Protocol):
    """What megarl's ranks and launcher need of torch's store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a rank is doing."""

    label: str
    step: int  # -1 before the first tick
    what: str
    since: float  # seconds since the epoch
    waiting: bool = False  # for a peer: this rank itself could go on

    def describe(self, now: float) -> str:
        what = self.what or "between two spans"
        return f"{self.label}, tick {self.step}: {what} for {now - self.since:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A rank's last word: it counts ``beat`` up while its process runs."""

    beat: int
    status: Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended."""

    time: float
    message: str
    by_peer: bool  # it only noticed that a peer was gone or did not come
    by_user: bool = False  # a mistake in the configuration or the data: it would come again


def read_progress(store: Store, rank: int) -> Progress | None:
    """Return what ``rank`` last said of itself; None where it has not joined yet."""
    key = f"progress/{rank}"
    if not store.check([key]):
        return None
    fields = json.loads(store.get(key))
    return Progress(beat=fields["beat"], status=Status(**fields["status"]))


def write_failure(store: Store, rank: int, failure: Failure) -> None:
    store.set(f"{FAILURE_KEY}/{rank}", json.dumps(asdict(failure)))


def read_failure(store: Store, rank: int) -> Failure | None:
    """Return why ``rank`` ended; None where it runs or ended without a word."""
    key = f"{FAILURE_KEY}/{rank}"
    return Failure(**json.loads(store.get(key))) if store.check([key]) else None


class Heartbeat:
    """Publishes one rank's status: `start` once, `publish` for an exact last word, `stop`.

    Consumes ``status``; waits for the clock and is unblocked by `stop`. It beats as long as the
    process runs and the store is there: not while the process is stopped.
    """

    def __init__(self, store: Store, rank: int, status: Callable[[], Status]):
        """``store`` is a connection of its own: a blocked ``get`` must not hold back a beat."""
        self._store, self._key, self._status = store, f"progress/{rank}", status
        self._beat = 0
        self._said: Status | None = None
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.publish()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def publish(self) -> None:
        """Say now what this rank is doing."""
        with self._lock:
            self._beat += 1
            self._said = self._status()
            progress = Progress(beat=self._beat, status=self._said)
            self._store.set(self._key, json.dumps(asdict(progress)))

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(_LOOK_SECONDS):
            if self._status() is self._said and time.monotonic() - last < BEAT_SECONDS:
                continue
            last = time.monotonic()
            try:
                self.publish()
            except RuntimeError:  # the store's host has ended: the job is over, and others say why
                return


def write_account(path: Path, store: Store, labels: Mapping[int, str], reason: str) -> None:
    """Write what a rank that gives up knows: ``reason``, and what all ranks (by label) were doing.

    Takes some seconds: who lives shows only in beats that come.
    """
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), reason, "what all ranks were doing:"]
    try:
        before = {rank: read_progress(store, rank) for rank in labels}
        now = time.time()
        time.sleep(MISSED_SECONDS)
        lines += [
            f"  rank {rank} ({label}): {_account(before[rank], read_progress(store, rank), now)}"
            for rank, label in labels.items()
        ]
    except RuntimeError as error:
        lines.append(f"  not known: the host of the run's store has ended: {error}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _account(before: Progress | None, after: Progress | None, now: float) -> str:
    if before is None or after is None:
        return "never joined"
    silent = "" if after.beat > before.beat else "; NO HEARTBEAT: ended, stopped or cut off"
    return before.status.describe(now) + silent
