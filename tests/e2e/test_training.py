"""Properties of whole runs on the real engines: exactness of weights, ratios and resuming."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megarl.executors.base import Executor
from megarl.topology import REWARD
from tests.e2e.conftest import Task
from tests.jobs import ROOT, read_rows, run_job

pytestmark = pytest.mark.e2e

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def digest_of_weights(executor: Executor) -> tuple[str, str]:
    """Return (executor, SHA-256 of all its live parameters)."""
    if executor.name == REWARD:
        return executor.name, ""
    sha = hashlib.sha256()
    for name, tensor in sorted(executor.get_model().items()):
        sha.update(name.encode())
        sha.update(tensor.detach().contiguous().numpy().tobytes())
    return executor.name, sha.hexdigest()


def test_without_a_learning_rate_three_async_steps_change_no_bit_and_ratios_stay_at_one(
    task: Task, tmp_path: Path
) -> None:
    overrides = task.overrides(tmp_path, "name=still", "trainer.lr=0", "max_steps=3")
    seen = run_job(QUICKSTART, overrides, digest_of_weights)
    for ticks in seen:
        # Before the first tick the generator holds vLLM's dummy weights, then always the same.
        assert len(set(ticks[1:])) == 1, ticks
    generator = next(ticks for ticks in seen if ticks[0][0] == "generator")  # type: ignore[index]
    assert generator[0] != generator[1]
    rows = read_rows(tmp_path / "still")
    assert sorted(rows) == [1, 2, 3]
    for row in rows.values():
        assert row["rollout_corr/importance_ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert row["rollout_corr/importance_ratio_max"] <= 1 + 2e-2
    before = load_file(task.folder / "model" / "model.safetensors")
    after = load_file(next((tmp_path / "still" / "hf").glob("*.safetensors")))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_a_run_that_stops_and_resumes_gives_the_metrics_of_an_unbroken_one(
    task: Task, tmp_path: Path
) -> None:
    common = ("mode=sync", "trainer.lr=1e-3", "trainer.lr_warmup_steps=2", "checkpoint.save_freq=2")
    whole = task.overrides(tmp_path, *common, "name=whole", "max_steps=4")
    run_job(QUICKSTART, whole, digest_of_weights)
    broken = task.overrides(tmp_path, *common, "name=broken", "checkpoint.resume=auto")
    run_job(QUICKSTART, (*broken, "max_steps=2"), digest_of_weights)
    run_job(QUICKSTART, (*broken, "max_steps=4"), digest_of_weights)
    expected, got = read_rows(tmp_path / "whole"), read_rows(tmp_path / "broken")
    assert sorted(got) == sorted(expected) == [1, 2, 3, 4]
    for step, row in expected.items():
        # The same prompts and samples: every statistic of the rollouts is equal to the last bit.
        for name in ("rollout/reward", "rollout/response_length_mean", "perf/total_tokens"):
            assert got[step][name] == row[name], (step, name)
        assert got[step]["actor/loss"] == pytest.approx(row["actor/loss"], rel=1e-6, abs=1e-9)
        assert got[step]["actor/grad_norm"] == pytest.approx(row["actor/grad_norm"], rel=1e-6)
