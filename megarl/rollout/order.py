"""order.jsonl of a run folder: which prompts each batch consumed, one line a step.

Written by the reward executor when it makes a batch; a resumed run forgets the lines after the step
from which it goes on. So the file names every consumed prompt once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.observe.files import replacing
from megarl.rollout.buffer import Group

ORDER_FILE = "order.jsonl"


class OrderLog:
    """Appends a line a batch."""

    def __init__(self, folder: Path, start_step: int):
        """Open the file and keep its lines up to ``start_step``."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ORDER_FILE
        kept = read_order(path)
        with replacing(path) as text:
            text.writelines(json.dumps(row) + "\n" for row in kept if row["step"] <= start_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Note that optimizer step ``step`` consumes ``groups``."""
        row = {
            "step": step,
            "prompts": [group.prompt_id for group in groups],
            "admitted": [group.admitted for group in groups],
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_order(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the file, without a last line that a kill tore; none where it is missing."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
