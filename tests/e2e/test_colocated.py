"""Trainer and generators on the same ranks compute what they do on ranks of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.executors.base import Executor
from tests.e2e.conftest import Task
from tests.jobs import ROOT, read_rows, run_job

pytestmark = pytest.mark.e2e

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def executor_name(executor: Executor) -> str:
    return executor.name


def test_a_colocated_run_resumed_in_another_layout_trains_as_a_separate_one_does(
    task: Task, tmp_path: Path
) -> None:
    overrides = task.overrides(
        tmp_path,
        "mode=sync",
        "trainer.lr=1e-3",
        "trainer.layout.tp=1",
        "rollout.max_response_length=12",
        "checkpoint.export_hf=false",
        "eval.n=1",
        f"reward.path={Path(__file__).with_name('odd_length.py')}:score",
    )
    run_job(QUICKSTART, (*overrides, "name=separate", "max_steps=2"), executor_name)
    colocated = (*overrides, "name=colocated", "placement=colocated", "resume=auto")
    replicas = ("max_steps=1", "trainer.layout.dp=2", "generator.layout.replicas=2")
    tensors = ("max_steps=2", "trainer.layout.tp=2", "generator.layout.tp=2")
    for layout in (replicas, tensors):
        seen = run_job(QUICKSTART, (*colocated, *layout), executor_name)
        assert [names[-1] for names in seen] == ["generator", "generator", "reward"]

    expected, got = read_rows(tmp_path / "separate"), read_rows(tmp_path / "colocated")
    assert sorted(got) == sorted(expected) == [1, 2]
    for step, row in expected.items():
        for name in ("rollout/reward", "rollout/response_length_mean", "perf/total_tokens"):
            assert got[step][name] == row[name], (step, name)
        assert row["actor/grad_norm"] > 0.1
        for name in ("actor/loss", "actor/grad_norm"):
            assert got[step][name] == pytest.approx(row[name], abs=1e-4), (step, name)
        assert got[step]["staleness/max"] == 0
        # Each executor counts its own waits: together they are no more than the time there is.
        assert 0 < got[step]["trainer/idle_ratio"] + got[step]["generator/idle_ratio"] < 1
    lines = (tmp_path / "colocated" / "metrics.jsonl").read_text().splitlines()
    evaluated = [row["step"] for row in map(json.loads, lines) if "val/accuracy" in row]
    assert evaluated == [0, 1, 2]
