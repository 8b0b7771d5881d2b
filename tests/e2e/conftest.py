"""What the end-to-end tests share: the built-in task and a small model, as Hugging Face folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.jobs import run_command

NUM_EVALUATED = 32  # prompts of the built-in task's 256: no test asks how many were right


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The built-in task on disk."""

    folder: Path

    def overrides(self, run_dir: Path, *more: str) -> tuple[str, ...]:
        """Return overrides for a small run of configs/quickstart.yaml in ``run_dir``."""
        return (
            f"run_dir={run_dir}",
            f"model.path={self.folder / 'model'}",
            f"data.train_path={self.folder / 'train.jsonl'}",
            f"data.eval_path={self.folder / 'eval.jsonl'}",
            "data.train_batch_size=8",
            "rollout.n=4",
            "fault.timeout_seconds=60",
            *more,
        )


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """The arithmetic task with its untrained starting model."""
    folder = tmp_path_factory.mktemp("task")
    run_command("data", str(folder), "--num-train", "512")
    evaluated = folder / "eval.jsonl"
    evaluated.write_text("".join(evaluated.read_text().splitlines(True)[:NUM_EVALUATED]))
    return Task(folder=folder)
