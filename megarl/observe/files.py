"""Owns how a finished file of a run appears: whole or not at all, whatever ends the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def replacing(target: Path) -> Iterator[TextIO]:
    """Open a new text for ``target``: it takes the old one's place only when the block succeeds."""
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as text:
            yield text
            text.flush()
            os.fsync(text.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
