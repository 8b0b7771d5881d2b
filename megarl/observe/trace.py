"""Owns the timeline: what each rank did, for how long, and how much of it was waiting.

Every executor has a `Tracer` and puts its work and every wait into spans. The controller drains it
once a step for metrics; at the end each rank writes its fragment and the launcher merges them into
one `trace.json`, which opens in Perfetto (ui.perfetto.dev) and in chrome://tracing.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from megarl.errors import DataError
from megarl.observe.files import replacing

logger = logging.getLogger(__name__)

MAX_EVENTS = 200_000  # about 30 MB of a rank's memory; some thousand steps


class SpanKind(StrEnum):
    """compute: useful work; wait: for a peer; sync: moving weights."""

    COMPUTE = "compute"
    WAIT = "wait"
    SYNC = "sync"


# Colour names of the Chrome trace viewer; Perfetto colours by name and filters by category.
COLOURS = {
    SpanKind.COMPUTE: "thread_state_running",
    SpanKind.WAIT: "grey",
    SpanKind.SYNC: "thread_state_iowait",
}


@dataclass(frozen=True, slots=True)  # positional: one is made at each span
class _Span:
    name: str
    kind: SpanKind
    start: float


class Tracer:
    """Spans of one rank. One thread enters and leaves them, so they nest.

    Between two events the time that passed belongs to each open span's name once, and to the
    kind of the innermost span only: compute, wait and sync never count a second twice, however
    spans nest, and a span that is still open at a drain is split there.

    Example::

        with tracer.span("train"):                             # timing_s/train
            with tracer.span("wait_batch", SpanKind.WAIT): ... # timing_s/wait_batch, timing_s/wait
    """

    def __init__(
        self,
        executor: str,
        rank: int,
        on_enter: Callable[[str], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_events: int = MAX_EVENTS,
    ) -> None:
        self.executor = executor
        self.rank = rank
        self._on_enter = on_enter
        self._clock = clock
        self._max_events = max_events
        self._events: deque[tuple[_Span, float]] = deque(maxlen=max_events)
        self._capped = False
        self._stack: list[_Span] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._kind_seconds: dict[SpanKind, float] = defaultdict(float)
        self._period_start = self._charged_until = clock()
        # Durations come from the monotonic clock; the wall clock, read once, aligns the ranks.
        self._wall_offset = wall_clock() - self._charged_until

    @contextmanager
    def span(self, name: str, kind: SpanKind = SpanKind.COMPUTE) -> Iterator[None]:
        """Time the block as ``name``; tell ``on_enter`` the innermost open span on both ends.

        Raises:
            ValueError: ``name`` is "wait" or "sync": those metrics are the sums over a kind.
        """
        if name in (SpanKind.WAIT, SpanKind.SYNC):
            raise ValueError(f"span name {name!r} is taken by the sum timing_s/{name}: say of what")
        self._stack.append(_Span(name, kind, self._charge()))
        try:
            self._announce()
            yield
        finally:
            now = self._charge()
            self._record(self._stack.pop(), now)
            self._announce()

    def drain(self) -> dict[str, float]:
        """Return the seconds since the last drain and begin a new period.

        Keys: ``timing_s/<name>`` per span name; ``timing_s/wait`` and ``timing_s/sync``, the sums
        over these kinds; ``idle_ratio``, waiting over elapsed seconds (0 where no time passed).
        """
        now = self._charge()
        elapsed = now - self._period_start
        wait = self._kind_seconds[SpanKind.WAIT]
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["timing_s/wait"] = wait
        metrics["timing_s/sync"] = self._kind_seconds[SpanKind.SYNC]
        metrics["idle_ratio"] = wait / elapsed if elapsed > 0 else 0.0
        self._seconds.clear()
        self._kind_seconds.clear()
        self._period_start = now
        return metrics

    def write(self, path: Path) -> None:
        """Write the spans so far, open ones up to now, as a Chrome trace of this rank alone.

        `merge_traces` looks for ``trace.<executor>.<rank>.json``.
        """
        now = self._clock()
        spans = [*self._events, *((span, now) for span in self._stack)]
        labels: dict[str, dict] = {
            "process_name": {"name": f"{self.executor} {self.rank}"},
            "process_sort_index": {"sort_index": self.rank},
            "thread_name": {"name": self.executor},
        }
        events: list[dict] = [
            {"ph": "M", "name": label, "pid": self.rank, "tid": 0, "args": args}
            for label, args in labels.items()
        ]
        events += [self._chrome_event(span, end) for span, end in spans]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as text:
            json.dump({"traceEvents": events}, text)

    def _charge(self) -> float:
        now = self._clock()
        passed = now - self._charged_until
        for name in {span.name for span in self._stack}:
            self._seconds[name] += passed
        if self._stack:
            self._kind_seconds[self._stack[-1].kind] += passed
        self._charged_until = now
        return now

    def _record(self, span: _Span, end: float) -> None:
        if len(self._events) == self._max_events and not self._capped:
            self._capped = True
            logger.warning("trace holds %d spans: the oldest are dropped", self._max_events)
        self._events.append((span, end))

    def _announce(self) -> None:
        if self._on_enter is not None:
            self._on_enter(self._stack[-1].name if self._stack else "")

    def _chrome_event(self, span: _Span, end: float) -> dict:
        # Both ends are rounded, not the duration: rounding then keeps spans nested.
        start_us, end_us = (round((at + self._wall_offset) * 1e6) for at in (span.start, end))
        return {
            "ph": "X",
            "name": span.name,
            "cat": span.kind.value,
            "cname": COLOURS[span.kind],
            "pid": self.rank,
            "tid": 0,
            "ts": start_us,
            "dur": end_us - start_us,
        }


def merge_traces(folder: Path, target: Path) -> None:
    """Merge ``trace.<executor>.<rank>.json`` of ``folder`` into one timeline, ordered by rank.

    Each fragment becomes a process of its own; times are microseconds of the wall clock. One
    fragment is in memory at a time.

    Raises:
        DataError: no fragment, or one that is not a trace.
    """
    pattern = re.compile(r"trace\.(?P<executor>.+)\.(?P<rank>\d+)\.json")
    matches = [match for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    if not matches:
        raise DataError(f"no trace.<executor>.<rank>.json in {folder}: nothing to merge")
    matches.sort(key=lambda match: (int(match["rank"]), match["executor"]))
    with replacing(target) as text:
        text.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for process, match in enumerate(matches):
            _append_fragment(text, folder / match.string, process)
        text.write("\n]}\n")


def _append_fragment(text: TextIO, path: Path, process: int) -> None:
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a Chrome trace: {error!r}") from error
    for position, event in enumerate(events):
        event["pid"] = process
        if event["name"] == "process_sort_index":
            event["args"] = {"sort_index": process}
        separator = "\n" if process == position == 0 else ",\n"
        text.write(separator + json.dumps(event))
