"""What a person sees when something dies or is wrong: a name, a reason, and no process left."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Task
from tests.jobs import ROOT, launched, start_command

pytestmark = pytest.mark.e2e

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def _ranks(launcher: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """Return the launcher's rank processes by the RANK they were given."""
    children = psutil.Process(launcher.pid).children()
    return {child.environ()["RANK"]: child for child in children if "RANK" in child.environ()}


def _wait_for_step(folder: Path, step: int, launcher: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    metrics = folder / "metrics.jsonl"
    while not (metrics.is_file() and f'"step": {step},' in metrics.read_text()):
        assert launcher.poll() is None, launcher.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get to its first steps"
        time.sleep(0.2)


@pytest.fixture
def endless_run(task: Task, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run in its third step that would go on for long."""
    overrides = task.overrides(tmp_path, "name=long", "max_steps=100000", "data.eval_path=")
    with launched("train", QUICKSTART, *overrides) as launcher:
        _wait_for_step(tmp_path / "long", 3, launcher)
        yield launcher, tmp_path / "long"


@pytest.mark.parametrize(
    ("rank", "label"),
    [("0", "trainer.0"), ("1", "trainer.1"), ("2", "generator.0"), ("3", "reward.0")],
)
def test_a_killed_rank_ends_the_job_and_is_named_with_its_waiters(
    endless_run: tuple[subprocess.Popen[str], Path], rank: str, label: str
) -> None:
    launcher, _ = endless_run
    everything = psutil.Process(launcher.pid).children(recursive=True)
    os.kill(_ranks(launcher)[rank].pid, signal.SIGKILL)
    killed_at = time.monotonic()
    output, _ = launcher.communicate(timeout=60)
    assert time.monotonic() - killed_at < 60  # fault.timeout_seconds of these runs
    assert launcher.returncode == 1
    assert f"rank {rank} ({label}) was killed by signal 9 (SIGKILL)" in output
    peers = output.split("what its peers waited for:")[1].split("last lines of")[0]
    others = {"0": "trainer.0", "1": "trainer.1", "2": "generator.0", "3": "reward.0"}
    for other, name in others.items():
        assert other == rank or f"rank {other} ({name}" in peers, output
    _, alive = psutil.wait_procs(everything, timeout=10)
    assert not alive, "processes outlived the job"


def test_an_interrupt_saves_a_checkpoint_and_ends_well(
    endless_run: tuple[subprocess.Popen[str], Path],
) -> None:
    launcher, folder = endless_run
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output
    latest = (folder / "checkpoints" / "latest").read_text()
    saved = int(latest.removeprefix("step_"))
    assert saved >= 2
    # Every step of the checkpoint has its metrics: a resumed run leaves no gap.
    assert f'"step": {saved},' in (folder / "metrics.jsonl").read_text()


def test_an_interrupt_saves_supervised_training_too(task: Task, tmp_path: Path) -> None:
    launcher = start_command(
        "sft",
        str(ROOT / "configs" / "quickstart_sft.yaml"),
        f"run_dir={tmp_path}",
        f"model.path={task.folder / 'model'}",
        f"data.train_path={task.folder / 'sft.jsonl'}",
        "max_steps=100000",
    )
    try:
        _wait_for_step(tmp_path / "quickstart-sft", 20, launcher)
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, output
    latest = (tmp_path / "quickstart-sft" / "checkpoints" / "latest").read_text()
    assert int(latest.removeprefix("step_")) >= 20


def test_a_killed_launcher_leaves_no_rank(
    endless_run: tuple[subprocess.Popen[str], Path],
) -> None:
    launcher, _ = endless_run
    everything = psutil.Process(launcher.pid).children(recursive=True)
    assert len(everything) >= 4
    launcher.kill()
    _, alive = psutil.wait_procs(everything, timeout=20)
    assert not alive


def _broken_rows(task: Task, folder: Path) -> tuple[str, ...]:
    path = folder / "broken.jsonl"
    path.write_text('{"prompt": "1+1=?", "answer": "2"}\n{"prompt": "1+2=?"}\n')
    return (f"data.train_path={path}",)


def _foreign_tokenizer(task: Task, folder: Path) -> tuple[str, ...]:
    model = folder / "model"
    model.mkdir()
    for file in (task.folder / "model").iterdir():
        text = file.read_text() if file.suffix == ".json" else None
        if file.name == "config.json" and text:
            text = text.replace('"vocab_size": 32', '"vocab_size": 12')
        target = model / file.name
        target.write_text(text) if text else target.symlink_to(file)
    return (f"model.path={model}",)


def _seconds_of_children() -> float:
    """Return the processor time of all processes that this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda task, folder: ("trainer.lrr=1",), ["trainer.lrr", "trainer.lr"]),
        (lambda task, folder: ("trainer.layout.tp=3",), ["tp 3", "4 attention heads"]),
        (lambda task, folder: ("generator.layout.tp=8",), ["tp 8", "4 attention heads"]),
        (lambda task, folder: ("trainer.layout.pp=4",), ["4", "layers"]),
        (lambda task, folder: (f"model.path={folder}",), ["config.json"]),
        (lambda task, folder: ("data.train_path=nowhere.jsonl",), ["nowhere.jsonl", "not exist"]),
        (lambda task, folder: ("reward.path=megarl.rewards.arithmetic:scor",), ["scor", "score"]),
        (lambda task, folder: ("rollout.max_response_length=400",), ["128 positions"]),
        (lambda task, folder: ("trainer.max_tokens_per_micro_batch=32",), ["32", "= 64"]),
        (lambda task, folder: ("trainer.layout.dp=64",), ["32 sequences", "dp = 64"]),
        (_broken_rows, ["broken.jsonl:2", "answer"]),
        (_foreign_tokenizer, ["tokenizer.json", "id 18", "11"]),
    ],
    ids=[
        "unknown key",
        "heads",
        "generator heads",
        "layers",
        "no model",
        "no file",
        "no reward",
        "too long",
        "small budget",
        "small batch",
        "malformed row",
        "foreign tokenizer",
    ],
)
def test_bad_input_gets_one_clear_error_at_once(make, words, task: Task, tmp_path: Path) -> None:
    overrides = task.overrides(tmp_path, *make(task, tmp_path))
    began = _seconds_of_children()
    process = start_command("train", QUICKSTART, *overrides)
    output, _ = process.communicate(timeout=60)
    seconds = _seconds_of_children() - began
    assert process.returncode == 2, output
    assert output.startswith("megarl: ")
    assert len(output.strip().splitlines()) == 1, output
    assert all(word in output for word in words), output
    # Of a processor, whoever else computes: a second or two. Importing torch takes longer than this.
    assert seconds < 4, f"{seconds:.1f} s"
    assert not (tmp_path / "quickstart").exists(), "a refused run leaves nothing behind"


def test_a_launcher_that_gives_too_few_ranks_is_refused(task: Task, tmp_path: Path) -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = start_command("train", QUICKSTART, *task.overrides(tmp_path), env=environment)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "need 4 ranks (2 trainer + 1 generator + 1 reward), the launcher gave 2" in output
