"""What becomes of a job when a rank stands still or dies: a name, a reason, and a new start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megarl.observe.metrics import read_metrics
from tests.e2e.conftest import Task
from tests.jobs import ROOT, launched

pytestmark = pytest.mark.e2e


def _until(launcher: subprocess.Popen[str], reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 180
    while not reached():
        assert launcher.poll() is None, launcher.communicate()[0]
        assert time.monotonic() < deadline, f"the run did not get to {what}"
        time.sleep(0.1)


def _rank(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    for child in psutil.Process(launcher.pid).children():
        with contextlib.suppress(psutil.Error):  # one that is just ending
            if child.environ().get("RANK") == str(rank):
                return child
    raise AssertionError(f"no process of rank {rank}")


def _latest(folder: Path) -> int:
    path = folder / "checkpoints" / "latest"
    return int(path.read_text().removeprefix("step_")) if path.is_file() else 0


def test_a_generator_that_stands_still_is_named_with_its_waiters_and_its_stacks(
    task: Task, tmp_path: Path
) -> None:
    timeout = 50  # the generator may start later than its peers by half of that on a busy machine
    overrides = (
        *task.overrides(tmp_path, "name=still", "max_steps=100000", "data.eval_path="),
        f"fault.timeout_seconds={timeout}",
    )
    folder = tmp_path / "still"
    metrics = folder / "metrics.jsonl"
    with launched("train", str(ROOT / "configs" / "quickstart.yaml"), *overrides) as launcher:
        _until(
            launcher, lambda: metrics.is_file() and '"step": 2,' in metrics.read_text(), "step 2"
        )
        everything = psutil.Process(launcher.pid).children(recursive=True)
        os.kill(_rank(launcher, 2).pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        output, _ = launcher.communicate(timeout=timeout + 60)
        seconds = time.monotonic() - stopped_at
    assert launcher.returncode == 1, output
    assert seconds < timeout + 15, f"{seconds:.1f} s"
    account = (folder / "failure.txt").read_text()
    for text in (output, account):
        assert "rank 2 (generator.0) makes no progress: its heartbeat stopped" in text, text
        assert "rank 2 (generator.0) was in: generator.0, tick" in text
        peers = text.split("what its peers waited for:")[1].split("last lines of")[0]
        assert all(peer in peers for peer in ("rank 0 (trainer.0", "rank 3 (reward.0")), text
        assert "channel" in peers, text
        stacks = text.split("stacks of rank 2 (generator.0):")[1]
        assert "T (stopped)" in stacks
        assert "Current thread" in stacks, text  # the main thread wrote them itself
        assert "megarl/train.py" in stacks, text  # the foot of the main thread's stack
    _, alive = psutil.wait_procs(everything, timeout=10)
    assert not alive, "processes outlived the job"


def test_a_job_starts_again_from_its_newest_checkpoint_after_a_silence_and_a_death(
    task: Task, tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    with launched(
        "sft",
        str(ROOT / "configs" / "quickstart_sft.yaml"),
        f"run_dir={tmp_path}",
        "name=again",
        f"model.path={task.folder / 'model'}",
        f"data.train_path={task.folder / 'sft.jsonl'}",
        "max_steps=100000",
        "checkpoint.save_freq=20",
        "fault.timeout_seconds=20",
        "fault.max_restarts=1",
    ) as launcher:
        # One new start is allowed; the checkpoint between the faults gives it back.
        for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM):
            before = _latest(folder)
            _until(launcher, lambda: _latest(folder) > before, f"a checkpoint after {before}")  # noqa: B023 - called at once
            os.kill(_rank(launcher, 1).pid, number)
            if number is signal.SIGSTOP:
                stopped = _latest(folder)
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output  # SIGTERM to a rank: it saves and all end well
    assert "rank 1 (trainer.1) makes no progress: its heartbeat stopped" in output
    assert "rank 1 (trainer.1) was killed by signal 9 (SIGKILL)" in output
    assert output.count("1 of 1 without a newer checkpoint") == 2, output
    assert f"starting again from step_{stopped:06d}" in output
    account = (folder / "failure.txt").read_text()
    assert account.count("starting again from step_") == 2
    restarts = [row["perf/restarts"] for row in read_metrics(folder / "metrics.jsonl")]
    assert restarts == sorted(restarts)
    assert set(restarts) == {0, 1, 2}


def test_a_mistake_of_the_user_is_not_started_again(task: Task, tmp_path: Path) -> None:
    latest = tmp_path / "damaged" / "checkpoints" / "latest"
    latest.parent.mkdir(parents=True)
    latest.write_text("step_000020")  # which is not there
    with launched(
        "sft",
        str(ROOT / "configs" / "quickstart_sft.yaml"),
        f"run_dir={tmp_path}",
        "name=damaged",
        f"model.path={task.folder / 'model'}",
        f"data.train_path={task.folder / 'sft.jsonl'}",
        "trainer.layout.dp=1",
        "resume=auto",
        "fault.max_restarts=2",
    ) as launcher:
        output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1, output
    assert "ConfigError" in output
    assert output.count("starting 1 ranks (1 trainer)") == 1, output
    assert "starting again" not in output
