"""A recorded asynchronous run and its replays: the same numbers without generators."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from megarl.executors.base import Executor
from tests.e2e.conftest import Task
from tests.jobs import ROOT, read_rows, run_job, run_replay

pytestmark = pytest.mark.e2e

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
STEPS = 3
# What training alone decides; the rest are times and memory.
TRAINED = ("actor/", "rollout_corr/", "training/", "rollout/reward", "staleness/mean", "perf/total")


def _look(executor: Executor) -> str:
    return executor.name


def _trained(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith(TRAINED)}


def _exported(run: Path) -> dict:
    return load_file(next((run / "hf").glob("*.safetensors")))


def test_a_replay_gives_the_losses_of_the_asynchronous_run_bit_for_bit_and_with_another_layout_nearly(
    task: Task, tmp_path: Path
) -> None:
    common = task.overrides(
        tmp_path,
        f"max_steps={STEPS}",
        "max_staleness=1",
        "trainer.lr=1e-3",
        "data.eval_path=",
        f"reward.path={Path(__file__).with_name('odd_length.py')}:score",
        "observe.tensorboard=false",
    )
    run_job(QUICKSTART, (*common, "name=recorded", "observe.record=true"), _look)
    recorded = read_rows(tmp_path / "recorded")
    assert sorted(recorded) == [1, 2, 3]
    # Its trainer moved, and was behind: otherwise the equalities below would say little.
    assert max(r["rollout_corr/importance_ratio_max"] for r in recorded.values()) > 1 + 1e-2
    assert max(row["staleness/max"] for row in recorded.values()) == 1

    again = (*common, f"replay_from={tmp_path / 'recorded'}")
    run_replay(QUICKSTART, (*again, "name=same"))
    same = read_rows(tmp_path / "same")
    assert sorted(same) == sorted(recorded)
    for step, row in same.items():
        assert _trained(row) == _trained(recorded[step]), step
        assert row["replay/loss_difference"] == 0
    expected, got = _exported(tmp_path / "recorded"), _exported(tmp_path / "same")
    assert expected.keys() == got.keys()
    assert all(expected[name].equal(got[name]) for name in expected)

    run_replay(QUICKSTART, (*again, "name=other", "trainer.layout.tp=1"))
    other = read_rows(tmp_path / "other")
    assert sorted(other) == sorted(recorded)
    for step, row in other.items():
        for name in ("actor/loss", "actor/grad_norm", "rollout_corr/importance_ratio_mean"):
            assert row[name] == pytest.approx(recorded[step][name], rel=1e-4, abs=1e-4), (
                step,
                name,
            )
        difference = abs(row["actor/loss"] - recorded[step]["actor/loss"])
        assert row["replay/loss_difference"] == difference
    assert (tmp_path / "other" / "checkpoints" / "latest").read_text() == "step_000003"
    assert (tmp_path / "other" / "summary.json").is_file()
