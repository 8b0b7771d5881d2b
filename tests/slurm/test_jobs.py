"""Jobs that `megarl launch` hands to a real Slurm, on virtual nodes: from the queue to their end.

The quick start's run, made small: a trainer on one node, a generator and the rewards on another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from tests.chaos import consumed_prompts
from tests.jobs import ROOT, run_command
from tests.slurm.cluster import GENERATORS, NODES, TRAINERS, Slurm, wait_until

pytestmark = pytest.mark.slurm

STEPS, PROMPTS = 8, 8  # of more than half a second each: 32 samples, each scored in 20 ms
NO_GPU = "n2"
_START_SECONDS, _RUN_SECONDS = 240.0, 300.0
_LINKS = {"ranks_per_host": 1, "nic_bytes_per_second": 1.4e9, "nic_efficiency": 1.0}
_DEVICE = {
    "is_gpu": False,
    "memory_gib": 4.0,
    "peak_tflops": 0.1,
    "memory_bytes_per_second": 10.0e9,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job in the queue, or behind it."""

    slurm: Slurm
    number: str
    folder: Path  # of the run

    @property
    def state(self) -> str:
        return self.slurm.state(self.number)

    def attempts(self, event: str) -> list[dict]:
        lines = (self.folder / "attempts.jsonl").read_text().splitlines()
        return [one for one in map(json.loads, lines) if one["event"] == event]

    def rows(self) -> dict[int, dict]:
        """Return the steps that it has trained, so far as their lines are complete."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row for row in rows if "actor/loss" in row}

    def logs(self) -> str:
        """Return the last lines of everything that the job has written."""
        files = sorted((self.folder / "logs").glob("*.log"))
        return "\n".join(f"{file.name}:\n{file.read_text()[-3000:]}" for file in files)

    def wait_for_step(self, step: int) -> None:
        self._wait(lambda: step in self.rows(), _START_SECONDS, f"step {step}")

    def wait_for_end(self) -> None:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        self._wait(lambda: self.state in ends, _RUN_SECONDS, "an end")
        assert self.state == "COMPLETED", self.logs()

    def _wait(self, done: Callable[[], object], seconds: float, what: str) -> None:
        try:
            wait_until(done, seconds, f"{what} of job {self.number}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.state}\n{self.logs()}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """Where jobs are launched: `launch` does what a person does."""

    slurm: Slurm
    task: Path  # folder of the arithmetic task
    folder: Path

    def launch(
        self, name: str, *arguments: str, preflight: dict | None = None, **keys: object
    ) -> Submitted:
        """Submit a run under ``name``; ``keys`` are those of the cluster file's group slurm."""
        environment = [{"name": "OMP_NUM_THREADS", "value": "1", "why": "ranks share the cores"}]
        slurm = {"partition": "nodes", "time": "10", "signal_seconds": 60, "venv": sys.prefix}
        slurm |= {"preflight": preflight is not None, "environment": environment} | keys
        cluster = self.folder / f"{name}.yaml"
        groups = {"device": _DEVICE, "slurm": slurm, "preflight": preflight or {}}
        cluster.write_text(yaml.safe_dump({**_LINKS, **groups}))
        output = run_command(
            *("launch", str(ROOT / "configs/quickstart.yaml"), "--cluster", str(cluster), "--json"),
            *(f"name={name}", f"run_dir={self.folder}", f"model.path={self.task / 'model'}"),
            *(f"data.train_path={self.task / 'train.jsonl'}", "data.eval_path="),
            *(f"data.train_batch_size={PROMPTS}", "rollout.n=4", "rollout.max_response_length=16"),
            *("trainer.layout.tp=1", f"max_steps={STEPS}", "checkpoint.save_freq=1"),
            f"reward.path={Path(__file__).with_name('slow_reward.py')}:score",
            *("checkpoint.export_hf=false", "fault.timeout_seconds=60", *arguments),
            env=self.slurm.environment,
        )
        number = json.loads(output)["job"]
        return Submitted(slurm=self.slurm, number=number, folder=self.folder / name)


@pytest.fixture(scope="module")
def desk(nodes: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    run_command("data", str(folder / "task"), "--num-train", "256")
    return Desk(slurm=nodes, task=folder / "task", folder=folder)


@pytest.fixture(scope="module")
def whole(desk: Desk) -> Submitted:
    """A run in lockstep that nothing interrupts, at its end; one of its three hosts has no GPU."""
    seen = {"list_gpus": f"[ $(hostname) = {NO_GPU} ] || echo H100", "link_share": 0.0}
    job = desk.launch("whole", "mode=sync", preflight=seen, spare_hosts=1)
    job.wait_for_end()
    return job


def _check_same(job: Submitted, whole: Submitted) -> None:
    """An interrupted run trained on the same prompts, and as the other one did."""
    assert consumed_prompts(job.folder) == consumed_prompts(whole.folder)
    assert sorted(consumed_prompts(job.folder)) == list(range(PROMPTS * STEPS))
    expected, got = whole.rows(), job.rows()
    assert sorted(got) == sorted(expected)
    for step, row in expected.items():
        for key in ("rollout/reward", "perf/total_tokens"):
            assert got[step][key] == row[key], (step, key)
        assert got[step]["actor/loss"] == pytest.approx(row["actor/loss"], rel=1e-6, abs=1e-9)


def test_a_lost_node_of_a_heterogeneous_job_is_replaced(desk: Desk, request: pytest.FixtureRequest):
    """Trainer and generators have partitions of their own; a generator's node dies."""
    job = desk.launch(
        *("het", "mode=sync", "fault.max_restarts=1"),
        partition="trainers",
        generator_partition="generators",
    )
    job.wait_for_step(2)
    lost = job.attempts("start")[0]["hosts"][1]
    desk.slurm.crash(lost)
    whole = request.getfixturevalue("whole")  # runs while Slurm finds out
    job.wait_for_end()
    desk.slurm.start_node(lost)

    first, second = job.attempts("start")
    end = job.attempts("end")[-1]
    assert "" < first["checkpoint"] + second["checkpoint"] < end["checkpoint"]
    assert (end["restart"], end["code"], end["bad"]) == (1, 0, [lost])
    for hosts in (first["hosts"], end["hosts"]):
        assert (hosts[0] in TRAINERS, hosts[1] in GENERATORS) == (True, True)
    assert lost not in end["hosts"]
    _check_same(job, whole)


def test_a_run_over_two_nodes_trains_to_its_end(whole: Submitted):
    assert sorted(whole.rows()) == list(range(1, STEPS + 1))
    (start,), (end,) = whole.attempts("start"), whole.attempts("end")
    assert (len(start["hosts"]), start["bad"]) == (3, [])
    assert end["hosts"] == [host for host in start["hosts"] if host != NO_GPU]
    assert (end["code"], end["checkpoint"], end["bad"]) == (0, f"step_{STEPS:06d}", [NO_GPU])
    assert (whole.folder / "bad_nodes").read_text() == f"{NO_GPU}\t0 GPUs, expected 1\n"
    assert len(list((whole.folder / "logs").glob("rank_*.log"))) == 3
    assert "sendBytes failed" not in whole.logs()  # none speaks to a store that has gone
    assert (whole.folder / "summary.json").is_file()


def test_the_signal_of_a_time_limit_changes_nothing(desk: Desk, whole: Submitted):
    """The signal that Slurm would send is sent early."""
    job = desk.launch("limit", "mode=sync")
    job.wait_for_step(2)
    assert "#SBATCH --signal=B:USR1@60\n" in (job.folder / "job.sbatch").read_text()
    desk.slurm.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for_end()
    first, second = job.attempts("start")
    stopped, end = job.attempts("end")
    assert "" == first["checkpoint"] < second["checkpoint"] < end["checkpoint"]
    assert second["checkpoint"] == stopped["checkpoint"]
    assert [stopped["code"], end["code"], end["bad"]] == [0, 0, []]
    _check_same(job, whole)


def test_a_cancelled_array_of_seeds_leaves_no_process(desk: Desk):
    """There are nodes for one task at a time."""
    array = desk.launch("array", "max_steps=500", "--seeds", "3,7", partition="generators")
    running, waiting = (
        replace(array, number=f"{array.number}_{seed}", folder=desk.folder / f"array-seed{seed}")
        for seed in (3, 7)
    )
    running.wait_for_step(1)
    assert waiting.state == "PENDING"
    desk.slurm.ask("scancel", array.number)
    wait_until(lambda: not any(map(desk.slurm.processes, NODES)), 60, "empty nodes")
    wait_until(lambda: desk.slurm.ask("squeue", "-h") == "", 60, "an empty queue")
    assert {running.state, waiting.state} == {"CANCELLED"}
    assert len(running.attempts("start")) == 1
    for seed, task in ((3, running), (7, waiting)):
        assert yaml.safe_load((task.folder / "config.yaml").read_text())["seed"] == seed
