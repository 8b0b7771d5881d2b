"""What a run folder says of its run."""

import io
import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from launch.status import RunStatus, lines, main, run_status
from megarl.config_file import load_config, to_yaml
from megarl.errors import DataError

NOW = 2_000_000_000.0
QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
FAILURE = """2026-11-30 10:00:00
rank 3 (generator.1) has died: killed by SIGKILL
what all ranks were doing:

  rank 0 (trainer.0): waits

2026-11-30 10:00:09
starting again from step_000010: 1 of 3 without a newer checkpoint

"""


@cache
def _config(overrides: tuple[str, ...]) -> str:
    return to_yaml(load_config(QUICKSTART, overrides))


def _run(folder: Path, *overrides: str) -> Path:
    """Make a run folder whose three steps took 2, 4 and 6 s; the last metrics came a minute ago."""
    given = ("max_steps=10", "data.train_batch_size=4", "rollout.n=8", *overrides)
    (folder / "config.yaml").write_text(_config(given))
    rows = [
        {
            "step": step,
            "timing_s/step": 2.0 * step,
            "perf/tokens_per_second": 100.0 * step,
            "rollout/reward": 0.25,
        }
        for step in (1, 2, 3)
    ]
    rows.append({"step": 3, "val/accuracy": 0.5})
    path = folder / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    os.utime(path, (NOW - 60, NOW - 60))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").write_text("step_000002\n")
    return folder


def _attempts(folder: Path, *attempts: dict) -> None:
    text = "".join(f"{json.dumps({'time': 0, 'checkpoint': '', **one})}\n" for one in attempts)
    (folder / "attempts.jsonl").write_text(text)


def _status(folder: Path, **states: str) -> RunStatus:
    return run_status(
        folder, {name.removeprefix("job"): word for name, word in states.items()}, NOW
    )


def test_a_local_run_is_told_from_its_metrics_and_checkpoint(tmp_path: Path):
    assert _status(_run(tmp_path)) == RunStatus(
        name="quickstart",
        state="not known",
        step=3,
        max_steps=10,
        tokens_per_second=200.0,
        samples_per_second=8.0,  # 32 in 4 s
        step_seconds=4.0,
        reward=0.25,
        checkpoint="step_000002",
        last_row_seconds=60.0,
        job="",
        starts=None,
        restarts=0,
        hosts=(),
        bad_hosts=(),
        last_error="",
    )


def test_a_run_without_a_step_says_so(tmp_path: Path):
    folder = _run(tmp_path)
    (folder / "metrics.jsonl").unlink()
    (folder / "checkpoints" / "latest").unlink()
    found = _status(folder)
    assert (found.step, found.last_row_seconds, found.samples_per_second) == (0, None, None)
    assert [line.split("  ")[-1] for line in lines(found)[2:6]] == [
        "no step yet",
        "none",
        "none",
        "0",
    ]


def test_a_run_at_its_last_step_is_finished(tmp_path: Path):
    assert _status(_run(tmp_path, "max_steps=3")).state == "finished"


def test_restarts_and_the_last_error_of_a_local_run_come_from_its_accounts(tmp_path: Path):
    (_run(tmp_path) / "failure.txt").write_text(FAILURE)
    found = _status(tmp_path)
    assert found.restarts == 1
    assert (
        found.last_error == "2026-11-30 10:00:00: rank 3 (generator.1) has died: killed by SIGKILL"
    )


def test_the_newest_account_counts_whoever_wrote_it(tmp_path: Path):
    (_run(tmp_path) / "failure.txt").write_text(FAILURE)
    later = "2026-11-30 11:00:00\ntrainer.0 waited for generator.1 in vain\n"
    (tmp_path / "failure.trainer.0.txt").write_text(later)
    assert _status(tmp_path).last_error.endswith("trainer.0 waited for generator.1 in vain")


def test_a_slurm_run_counts_its_requeues_and_names_its_hosts(tmp_path: Path):
    start = {"job": "12", "event": "start", "code": 0, "bad": []}
    _attempts(
        _run(tmp_path),
        {**start, "restart": 0, "hosts": ["n1", "n2"]},
        {"job": "12", "event": "end", "restart": 0, "code": 137},
        {**start, "restart": 1, "hosts": ["n1", "n3"], "bad": ["n2"]},
    )
    (tmp_path / "bad_nodes").write_text("n7\t1 GPUs, expected 8\nn2\tdown\n")
    found = _status(tmp_path, job12="RUNNING")
    assert (found.state, found.job, found.starts, found.restarts) == ("running", "12", 2, 1)
    assert found.hosts == ("n1", "n3")
    assert found.bad_hosts == ("n7", "n2")
    assert found.last_error == "job 12 ended with code 137"

    end = {"job": "12", "event": "end", "restart": 1, "code": 0, "hosts": ["n3"], "bad": ["n9"]}
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write(f"{json.dumps(end)}\n")
    found = _status(tmp_path)
    assert (found.state, found.hosts, found.bad_hosts) == ("ended", ("n3",), ("n7", "n2", "n9"))


@pytest.mark.parametrize(("event", "state"), [("start", "not known"), ("end", "ended")])
def test_a_job_that_slurm_has_forgotten_is_judged_by_its_last_word(
    tmp_path: Path, event: str, state: str
):
    _attempts(_run(tmp_path), {"job": "12", "restart": 0, "event": event, "code": 0, "hosts": []})
    assert _status(tmp_path).state == state


def test_a_line_that_is_being_written_is_not_read_and_a_broken_one_is_named(tmp_path: Path):
    _attempts(_run(tmp_path), {"job": "12", "restart": 0, "event": "start", "code": 0, "hosts": []})
    path = tmp_path / "attempts.jsonl"
    whole = path.read_text()
    path.write_text(f'{whole}{{"job": "12", "ev')
    assert _status(tmp_path).starts == 1
    path.write_text(f"{whole}nonsense\n")
    with pytest.raises(DataError, match=r"attempts.jsonl:2: not a JSON object"):
        _status(tmp_path)


def test_another_folder_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"is no run folder: it has no config.yaml"):
        _status(tmp_path)


def test_the_command_asks_slurm_and_shows_text_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _attempts(_run(tmp_path), {"job": "12", "restart": 0, "event": "start", "code": 0, "hosts": []})
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text('#!/bin/sh\n[ "$2" = --jobs=12 ] && echo "12 PENDING"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    output = io.StringIO()
    assert main([str(tmp_path)], Console(file=output)) == 0
    assert "state  pending, job 12" in output.getvalue()
    assert "pace  4 s a step, 200 tokens/s, 8 samples/s, reward 0.250" in output.getvalue()
    output = io.StringIO()
    assert main([str(tmp_path), "--json"], Console(file=output)) == 0
    shown = RunStatus(**json.loads(output.getvalue()))
    expected = _status(tmp_path, job12="PENDING")
    assert replace(shown, last_row_seconds=60.0, hosts=(), bad_hosts=()) == expected
