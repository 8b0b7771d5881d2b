"""A run whose weights travel at every second batch, resumed between two transfers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.executors.base import Executor
from tests.e2e.conftest import Task
from tests.jobs import ROOT, read_rows, run_job

pytestmark = pytest.mark.e2e


def held_version(executor: Executor) -> tuple[str, int]:
    """Return (executor, version of its weights); -1 before there are any."""
    return executor.name, getattr(executor, "version", -1)


def test_generators_keep_their_version_between_transfers_and_no_token_is_too_old(
    task: Task, tmp_path: Path
) -> None:
    overrides = task.overrides(
        tmp_path,
        "name=seldom",
        "resume=auto",
        "max_staleness=2",
        "weights.sync_every=2",
        "trainer.updates_per_batch=2",
        "trainer.layout.tp=1",
        "trainer.lr=1e-3",
        "rollout.max_response_length=24",
        "eval.test_freq=2",
        "eval.n=1",
        "checkpoint.export_hf=false",
        f"reward.path={Path(__file__).with_name('odd_length.py')}:score",
    )
    held: list[list[int]] = []
    for max_steps in (3, 6):
        job = run_job(
            ROOT / "configs" / "quickstart.yaml",
            (*overrides, f"max_steps={max_steps}"),
            held_version,
        )
        versions = {str(ticks[0][0]): [tick[1] for tick in ticks] for ticks in job}  # type: ignore
        held.append(versions["generator"])
        assert versions["trainer"] == [*range(max_steps - 3, max_steps + 1), max_steps]
    # Before each tick and after the last: transfers at ticks 0, 2, 3, and 3, 4, 6.
    assert held == [[-1, 0, 0, 2, 3], [-1, 3, 4, 4, 6]]
    rows = read_rows(tmp_path / "seldom")
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    moved = [step for step, row in rows.items() if row["perf/weight_sync_bytes"] > 0]
    assert moved == [1, 3, 4, 5]  # tick t is step t + 1; the last tick has no step
    assert [step for step, row in rows.items() if "timing_s/update_weights" in row] == moved
    assert max(row["staleness/max"] for row in rows.values()) <= 2
    assert all(row["actor/grad_norm"] > 0 for row in rows.values())
