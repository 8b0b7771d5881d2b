"""Owns the process's log: one format, set up once by the main function of each process.

A line reads ``2025-01-31 12:00:00 trainer/3 step 17 INFO megarl.controller: ...``. The controller
calls `set_step` at the head of each tick; all other modules use ``logging.getLogger(__name__)``.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

OWN_PACKAGES = ("megarl", "megatron_bridge", "launch")
FORMAT = (
    "%(asctime)s %(executor)s/%(executor_rank)s step %(step)s %(levelname)s %(name)s: %(message)s"
)


class _Origin(logging.Filter):
    """Stamps each record with who wrote it and at which step."""

    def __init__(self, executor: str, rank: int) -> None:
        super().__init__()
        self.executor = executor
        self.rank = rank
        self.step = 0

    def filter(self, record: logging.LogRecord) -> bool:
        record.executor = self.executor
        record.executor_rank = self.rank
        record.step = self.step
        return True


def setup_logging(executor: str, rank: int, file: Path | None) -> None:
    """Send the process's records to ``file`` (appended) or, without one, to standard error.

    With a file, warnings and errors go to standard error too. Our packages log from INFO, other
    libraries from WARNING. A second call replaces the handlers of the first.
    """
    root = logging.getLogger()
    for handler in _own_handlers():
        root.removeHandler(handler)
        handler.close()
    console = logging.StreamHandler(sys.stderr)
    handlers: list[logging.Handler] = [console]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
        console.setLevel(logging.WARNING)
    origin = _Origin(executor, rank)
    for handler in handlers:
        handler.addFilter(origin)
        handler.setFormatter(logging.Formatter(FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for package in OWN_PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)


def set_step(step: int) -> None:
    """Make the records written from now on carry ``step``; no effect before `setup_logging`."""
    for handler in _own_handlers():
        for origin in handler.filters:
            if isinstance(origin, _Origin):
                origin.step = step


def _own_handlers() -> list[logging.Handler]:
    handlers = logging.getLogger().handlers
    return [h for h in handlers if any(isinstance(f, _Origin) for f in h.filters)]
