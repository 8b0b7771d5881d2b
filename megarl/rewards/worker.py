"""The process that calls a reward function; started and killed by `megarl.rewards.pool`.

Wire format, over one socket which the process gets as its standard input, one JSON value a line:

    pool -> worker   a chunk: [[prompt, response, answer, extra, finished], ..]
    worker -> pool   "ready" once, after importing the function; then, for each chunk, lists of
                     results in order: 1.0, or {"score": 1.0, "format": 0.5}, or a traceback

Results of cheap items are sent together, FLUSH_SECONDS apart. So that the pool still knows which
item hangs or crashes, the position in the chunk of the item in progress stands in shared memory.

The function's own output goes to the pool's standard output and error; its standard input is empty.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import mmap
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from typing import NoReturn

from megarl.rewards.loading import ScoreFunction, load_score_function

FLUSH_SECONDS = 0.001
PROGRESS_BYTES = 8  # one uint64
Result = float | dict[str, float] | str  # score, or score among other numbers, or traceback
RESERVED_KEYS = frozenset({"timeouts", "errors", "crashes"})  # the pool's own metrics


def main(path: str, timeout_seconds: float, progress_fd: int) -> NoReturn:
    """Score chunks until the pool goes away.

    Consumes chunks, produces results. Waits for the next chunk without a limit; unblocked by
    the end of the stream, which also comes when the pool's process dies in any way.
    """
    # Slurm sends the wish to save and end to all processes of a job; it is meant for the ranks. What
    # the function starts would inherit that a signal is ignored, but not a handler.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _pass_over)
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    progress = memoryview(mmap.mmap(progress_fd, PROGRESS_BYTES)).cast("Q")
    os.close(progress_fd)
    function = load_score_function(path)
    chunks: queue.SimpleQueue[list] = queue.SimpleQueue()
    threading.Thread(target=_read_chunks, args=(connection, chunks), daemon=True).start()
    _send(connection, "ready")
    while True:
        chunk = chunks.get()
        # The pool kills a late process. Should the pool be dead too and the function never give
        # way to the reader thread, this watchdog, which needs no interpreter, ends the process.
        faulthandler.dump_traceback_later(len(chunk) * timeout_seconds + 60.0, exit=True, file=2)
        _score_chunk(function, chunk, connection, progress)
        faulthandler.cancel_dump_traceback_later()


def _pass_over(number: int, frame: object) -> None:
    """Do nothing."""


def _score_chunk(
    function: ScoreFunction, chunk: list, connection: socket.socket, progress: memoryview
) -> None:
    results: list[Result] = []
    flushed = time.monotonic()
    for position, item in enumerate(chunk):
        progress[0] = position
        results.append(_score(function, item))
        now = time.monotonic()
        if now - flushed > FLUSH_SECONDS or position == len(chunk) - 1:
            _send(connection, results)
            results, flushed = [], now


def _send(connection: socket.socket, value: object) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _read_chunks(connection: socket.socket, chunks: queue.SimpleQueue[list]) -> None:
    # A parent that is killed with answers unread resets the connection instead of closing it.
    with connection.makefile("rb") as stream, contextlib.suppress(ConnectionResetError):
        for line in stream:
            chunks.put(json.loads(line))
    # This process leads its own group: what the reward function started ends with it.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _score(function: ScoreFunction, item: list) -> Result:
    prompt, response, answer, extra, finished = item
    try:
        given = json.loads(extra) if extra else {}
        return _checked(function(prompt, response, answer, given | {"finished": finished}))
    except Exception:  # noqa: BLE001 - user code may raise anything; the pool counts and reports it
        return traceback.format_exc()


def _checked(returned: object) -> Result:
    """Return the result of a reward function's value, or raise what is wrong with it."""
    if not isinstance(returned, Mapping):
        return _number("score", returned)
    if "score" not in returned:
        raise ValueError(f"expected a number or a dict with 'score', got {returned!r}")
    if taken := RESERVED_KEYS & returned.keys():
        raise ValueError(f"the keys {sorted(taken)} are taken by the pool's own metrics")
    return {str(key): _number(key, value) for key, value in returned.items()}


def _number(key: object, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # numpy scalars and bools are welcome
    except (TypeError, ValueError) as error:
        raise TypeError(f"{key!r} must be a number, got {value!r}") from error
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"{key!r} must be a finite number, got {value!r}")
    return number
