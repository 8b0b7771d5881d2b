"""Trainer and engine on one GPU, in turns: the start-up contract and two optimizer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import Task
from tests.jobs import ROOT, read_rows, run_command

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def test_one_gpu_trains_and_samples_in_turns(tmp_path: Path) -> None:
    task = Task(folder=tmp_path / "task")
    run_command("data", str(task.folder), "--num-train", "64")
    overrides = task.overrides(
        tmp_path,
        "name=one",
        "placement=colocated",
        "mode=sync",
        "max_steps=2",
        "trainer.layout.tp=1",
        "model.dtype=bfloat16",
        "data.eval_path=",
    )
    run_command("train", str(ROOT / "configs" / "quickstart.yaml"), *overrides)
    rows = read_rows(tmp_path / "one")
    assert sorted(rows) == [1, 2]
    for row in rows.values():
        assert row["staleness/max"] == 0
        assert row["rollout_corr/importance_ratio_mean"] == pytest.approx(1, abs=0.05)
