"""What a person reads when an attempt fails: who, in what, since when, who waited for it, where.

Called by `launch.local`, while the ranks that did not end still stand where they stood.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Protocol

from launch.liveness import Watchdog, stacks
from launch.ranks import LocalRanks
from megarl.progress import Failure, Progress

_SETTLE_SECONDS = 2.0  # after a death: time for peers to notice and say what they waited for
_LOG_TAIL_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Why an attempt failed."""

    headlines: tuple[str, ...]
    details: tuple[str, ...]
    began: bool  # some rank had come to its first tick
    by_user: bool  # a mistake that a new start would meet again


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """What was to be seen when the failure was found."""

    now: float
    progress: dict[int, Progress | None]
    failures: dict[int, Failure]

    def doing(self, rank: int) -> str:
        word = self.progress[rank]
        return word.status.describe(self.now) if word else "has not joined"


def report(ranks: LocalRanks, watchdog: Watchdog) -> Report | None:
    """Find out why this attempt fails: a rank failed, or ``watchdog`` finds one silent.

    None where the silent one has just ended well.
    """
    now = time.time()
    progress = {rank: ranks.progress(rank) for rank in ranks.numbers}
    if ranks.failed():
        ranks.settle(_SETTLE_SECONDS)
    failures = {rank: word for rank in ranks.numbers if (word := ranks.failure(rank))}
    scene = _Scene(now=now, progress=progress, failures=failures)
    culprits = _first_failed(ranks, failures)
    # Who only noticed that a peer did not come is not the one to look at, where another is silent.
    if all(_gave_up(ranks, failures, rank) for rank in culprits):
        silent = tuple(rank for rank in watchdog.suspects() if rank in ranks.running())
        if silent:
            return _compose(ranks, scene, silent, _Silence(ranks, watchdog))
    return _compose(ranks, scene, culprits, _Death(ranks)) if culprits else None


def _first_failed(ranks: LocalRanks, failures: dict[int, Failure]) -> tuple[int, ...]:
    """Return the rank that ended first of itself: one killed without a word, else the first that
    failed for another reason than a peer's end; nobody where all still run."""
    failed = ranks.failed()
    wordless = [rank for rank in failed if rank not in failures]
    if wordless or not failed:
        return tuple(wordless[:1])
    return (min(failed, key=lambda rank: (failures[rank].by_peer, failures[rank].time)),)


def _gave_up(ranks: LocalRanks, failures: dict[int, Failure], rank: int) -> bool:
    """Whether ``rank`` may have ended because of a peer: NCCL's watchdog aborts without a word."""
    if rank in failures:
        return failures[rank].by_peer
    return ranks.exit_code(rank) == -signal.SIGABRT


class _Manner(Protocol):
    """How ranks failed: what to say of one, and what evidence there is."""

    def headline(self, rank: int) -> str: ...
    def evidence(self, rank: int) -> list[str]: ...


class _Death:
    def __init__(self, ranks: LocalRanks):
        self._ranks = ranks

    def headline(self, rank: int) -> str:
        code = self._ranks.exit_code(rank)
        if code is not None and code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"failed with exit code {code}"

    def evidence(self, rank: int) -> list[str]:
        return []


class _Silence:
    def __init__(self, ranks: LocalRanks, watchdog: Watchdog):
        self._ranks, self._watchdog = ranks, watchdog

    def headline(self, rank: int) -> str:
        return self._watchdog.describe(rank)

    def evidence(self, rank: int) -> list[str]:
        lines = stacks(self._ranks, rank)
        return [f"stacks of {self._ranks.name(rank)}:", *(f"  {line}" for line in lines)]


def _compose(
    ranks: LocalRanks, scene: _Scene, culprits: tuple[int, ...], manner: _Manner
) -> Report:
    headlines: list[str] = []
    details: list[str] = []
    for rank in culprits:
        headlines.append(f"{ranks.name(rank)} {manner.headline(rank)}")
        details.append(f"  {ranks.name(rank)} was in: {scene.doing(rank)}")
        if rank in scene.failures:
            details.append(f"  {scene.failures[rank].message}")
    details.append("what its peers waited for:")
    for rank in ranks.numbers:
        if rank in culprits:
            continue
        if rank in scene.failures:
            details.append(f"  {scene.failures[rank].message.splitlines()[0]}")
        else:
            details.append(f"  {ranks.name(rank)}: {scene.doing(rank)}")
    for rank in culprits:
        details += _log_tail(ranks, rank)
        details += manner.evidence(rank)
    words = [word for word in scene.progress.values() if word is not None]
    return Report(
        headlines=tuple(headlines),
        details=tuple(details),
        began=any(word.status.step >= 0 for word in words),
        by_user=any(failure.by_user for failure in scene.failures.values()),
    )


def _log_tail(ranks: LocalRanks, rank: int) -> list[str]:
    lines = ranks.log_text(rank).splitlines()[-_LOG_TAIL_LINES:]
    return [f"last lines of {ranks.log_path(rank)}:", *(f"  {line}" for line in lines)]
