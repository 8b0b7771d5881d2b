"""The batch script: what it asks for, what it starts, and that bash and the shell's quoting agree."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launch.placement import place
from launch.site import Container, Device, Site, Slurm, Variable
from launch.slurm import Job, SubmissionError, render, submit
from megarl.config import GeneratorConfig, RunConfig, TrainerConfig
from megarl.errors import ConfigError
from megatron_bridge.cluster import Cluster
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout


def _make_job(folder: str = "/runs/a", spare_hosts: int = 0, is_gpu: bool = True, **slurm) -> Job:
    config = RunConfig(
        trainer=TrainerConfig(layout=TrainerLayout(tp=4)),
        generator=GeneratorConfig(layout=GeneratorLayout(replicas=4)),
    )
    return Job(
        name="a",
        summary="a run",
        folder=Path(folder),
        workdir=Path("/code of mine"),
        last_checkpoint="step_000100",
        placement=place(config, 4, spare_hosts=spare_hosts),
        site=Site(
            links=Cluster(ranks_per_host=4),
            device=Device(is_gpu=is_gpu),
            slurm=Slurm(spare_hosts=spare_hosts, **slurm),
        ),
    )


def _options(script: str) -> dict[str, str]:
    """What `#SBATCH --key=value` lines say."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH --")]
    pairs = [line.removeprefix("#SBATCH --").partition("=") for line in lines]
    return {key: value for key, _, value in pairs}


def _step(script: str) -> list[str]:
    """The words of the srun command, as the shell splits them."""
    lines = script[script.index("\nsrun ") : script.index("\nstep=$!")]
    return shlex.split(lines.replace("\\\n", " "))


def _check_syntax(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=20)


def test_a_job_asks_for_whole_hosts_with_a_seat_for_the_reward_rank():
    script = render(_make_job(cpus_per_host=64, partition="train", time="1-00:00:00"))
    _check_syntax(script)
    found = _options(script)
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("2", "5", "4")
    assert found["cpus-per-task"] == "12"  # of 64, for 5 ranks
    assert (found["partition"], found["time"]) == ("train", "1-00:00:00")
    assert {"exclusive", "requeue"} <= set(found)
    assert found["output"] == "/runs/a/logs/%x_%j.log"
    assert found["signal"] == "B:USR1@600"
    assert "account" not in found
    assert "qos" not in found


def test_one_step_starts_every_rank_where_it_is_placed():
    script = render(_make_job())
    assert "tasks=(4 5)" in script
    words = _step(script)
    assert {"--ntasks=9", "--nodes=2", "--distribution=arbitrary", "--gpus-per-node=4"} <= set(
        words
    )
    assert words[-7:-1] == [
        "python",
        "-m",
        "megarl.train",
        "train",
        "/runs/a/config.yaml",
        "${resume[@]}",
    ]
    assert script.count("srun ") == 1


def test_the_host_file_has_a_line_for_each_rank(tmp_path: Path):
    script = render(_make_job(folder=str(tmp_path), spare_hosts=1))
    (tmp_path / "logs").mkdir()
    part = script[script.index("tasks=(") : script.index("export MASTER_ADDR")]
    given = "SLURM_JOB_ID=7; hosts=(first second third)\n"
    subprocess.run(["bash", "-euc", given + part], check=True, timeout=20)
    lines = (tmp_path / "logs" / "hosts_7").read_text().split()
    assert lines == ["first"] * 4 + ["second"] * 5
    assert _options(script)["nodes"] == "3"
    assert "--nodes=2" in _step(script)


def test_without_devices_none_are_asked_for():
    assert "gpus" not in render(_make_job(is_gpu=False))


def test_a_variable_comes_with_its_reason_and_quoted():
    variables = [Variable(name="A", value="b c; $d", why="because")]
    script = render(_make_job(environment=variables, setup=["module load cuda"]))
    assert "export A='b c; $d'  # because" in script
    assert "module load cuda\n" in script
    _check_syntax(script)


def test_a_virtual_environment_is_entered():
    assert "\n. '/my env'/bin/activate\n" in render(_make_job(venv="/my env"))


def test_pyxis_starts_the_container_with_the_step():
    script = render(_make_job(container=Container.PYXIS, image="/i.sqsh", mounts=["/d:/d"]))
    _check_syntax(script)
    words = _step(script)
    assert "--container-image=/i.sqsh" in words
    mounts = "/code of mine:/code of mine,/runs/a:/runs/a,/d:/d"
    assert f"--container-mounts={mounts}" in words
    assert "container" not in "".join(_options(script))


def test_apptainer_runs_inside_the_step():
    script = render(_make_job(container=Container.APPTAINER, image="/i.sif"))
    _check_syntax(script)
    words = _step(script)
    at = words.index("apptainer")
    assert words[at : at + 5] == [
        "apptainer",
        "exec",
        "--nv",
        "--bind",
        "/code of mine:/code of mine",
    ]
    assert words[words.index("/i.sif") + 1] == "python"


def test_a_host_needs_a_core_for_each_rank():
    with pytest.raises(
        ConfigError, match="cpus_per_host is 4, expected at least one for each of 5"
    ):
        render(_make_job(cpus_per_host=4))


def test_a_machine_without_slurm_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = replace(_make_job(), folder=tmp_path / "run")
    with pytest.raises(SubmissionError, match="sbatch was not found"):
        submit(job, "name: a\n")
    assert (tmp_path / "run" / "config.yaml").read_text() == "name: a\n"
    assert job.script.read_text() == render(job)


@pytest.mark.parametrize(
    ("code", "latest", "state", "signalled", "requeued"),
    [
        (0, "step_000100", "RUNNING", False, False),  # done
        (0, "step_000040", "RUNNING", False, True),  # preempted: the ranks alone were asked to stop
        (0, "step_000040", "COMPLETING", False, False),  # cancelled
        (1, "step_000040", "RUNNING", False, False),  # a rank failed
        (0, "step_000040", "RUNNING", True, True),  # the time limit comes
        (0, "step_000040", "COMPLETING", True, False),  # cancelled
        (0, "", "RUNNING", True, True),  # before the first checkpoint
        (0, "step_000100", "RUNNING", True, False),  # done while the signal came
    ],
)
def test_a_job_comes_back_only_if_it_was_stopped_too_early(
    tmp_path: Path, code: int, latest: str, state: str, signalled: bool, requeued: bool
):
    """Run the script's own end; what Slurm's commands would answer is given."""
    (tmp_path / "checkpoints").mkdir()
    if latest:
        (tmp_path / "checkpoints" / "latest").write_text(latest)
    script = render(_make_job(folder=str(tmp_path)))
    end = script[script.index("stopping=\ntrap") :]
    start, stop = end.index("srun "), end.index("step=$!")
    waits = f"trap 'exit {code}' USR1; for i in {{1..100}}; do sleep 0.1; done"
    step = f"bash -c {shlex.quote(waits if signalled else f'exit {code}')} &\n"
    arrival = "(sleep 1; kill -USR1 $$) &\n" if signalled else ""
    slurm = f"squeue() {{ echo {state}; }}; scontrol() {{ echo requeue; exit 0; }}\n"
    text = slurm + "SLURM_JOB_ID=7\n" + end[:start] + step + "step=$!\n" + arrival
    text += end[stop + len("step=$!\n") :]
    result = subprocess.run(
        ["bash", "-uc", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout == "requeue\n") is requeued, result
    assert result.returncode == code
