"""The batch script: what it asks for, what it starts, and that bash and the shell's quoting agree."""

import json
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
    """The words of the step that starts ranks, as the shell splits them."""
    start = script.index("exec srun ")
    return shlex.split(script[start : script.index("    ;\n", start)].replace("\\\n", " "))


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


def test_one_step_starts_every_rank():
    script = render(_make_job())
    assert "step_0=(--gpus-per-node=4)\n" in script
    assert " seat 0 4 5 " in script
    words = _step(script)
    assert {"--distribution=arbitrary", "--kill-on-bad-exit=1"} <= set(words)
    assert "WORLD_SIZE=9" in script


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
    words = shlex.split(script[script.index("step_0=(") :].partition(")\n")[0].partition("(")[2])
    assert "--container-image=/i.sqsh" in words
    mounts = "/code of mine:/code of mine,/runs/a:/runs/a,/d:/d"
    assert f"--container-mounts={mounts}" in words
    assert "container" not in "".join(_options(script))


def test_apptainer_runs_inside_the_step():
    script = render(_make_job(container=Container.APPTAINER, image="/i.sif"))
    _check_syntax(script)
    words = shlex.split(script[script.index("python=(") :].partition(")\n")[0].partition("(")[2])
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
        submit(job, {job.folder: "name: a\n"}, "name: c\n")
    assert (tmp_path / "run" / "config.yaml").read_text() == "name: a\n"
    assert (tmp_path / "run" / "cluster.yaml").read_text() == "name: c\n"
    assert job.script.read_text() == render(job)


def test_a_heterogeneous_job_is_one_world_over_two_partitions():
    slurm = {"partition": "big", "generator_partition": "small", "cpus_per_host": 64}
    script = render(_make_job(spare_hosts=1, generator_cpus_per_host=20, **slurm))
    _check_syntax(script)
    head, _, _ = script.partition("set -uo pipefail")
    trainer, generator = (_options(part) for part in head.split("#SBATCH hetjob\n"))
    assert (trainer["partition"], generator["partition"]) == ("big", "small")
    assert (trainer["nodes"], generator["nodes"]) == ("2", "2")  # a spare one in each
    assert (trainer["ntasks-per-node"], generator["ntasks-per-node"]) == ("4", "5")
    assert (trainer["cpus-per-task"], generator["cpus-per-task"]) == ("16", "4")
    for each in (trainer, generator):
        assert {"requeue", "exclusive", "signal", "time"} <= set(each)
    words = _step(script)
    assert words.count(":") == 1
    assert words.count("megarl.train") == 0  # `everywhere` is given it
    assert "step_0=(--het-group=0 " in script
    assert "step_1=(--het-group=1 " in script
    assert "export MASTER_PORT" in script
    assert "WORLD_SIZE=9" in script
    assert '"$SLURM_JOB_NODELIST_HET_GROUP_1"' in script


def test_groups_of_hosts_need_a_trainer_of_whole_hosts():
    config = RunConfig(
        trainer=TrainerConfig(layout=TrainerLayout(tp=2)),
        generator=GeneratorConfig(layout=GeneratorLayout(replicas=4)),
    )
    job = replace(_make_job(generator_partition="small"), placement=place(config, 4))
    with pytest.raises(ConfigError, match="host 0 has trainer and generator ranks"):
        render(job)


def test_an_array_has_a_task_and_a_folder_for_each_seed():
    job = replace(_make_job(), seeds=(3, 7))
    script = render(job)
    _check_syntax(script)
    found = _options(script)
    assert found["array"] == "3,7"
    assert found["output"] == "/runs/a-seed%a/logs/%x_%j.log"
    assert job.folders == (Path("/runs/a-seed3"), Path("/runs/a-seed7"))
    assert job.script == Path("/runs/a-seed3/job.sbatch")
    given = "SLURM_ARRAY_JOB_ID=5; SLURM_ARRAY_TASK_ID=7; SLURM_JOB_ID=9\n"
    part = script[script.index("run=") : script.index("attempt=")]
    result = subprocess.run(
        ["bash", "-euc", given + part + "echo $run $job"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.stdout == "/runs/a-seed7 5_7\n"
    with pytest.raises(ConfigError, match="no arrays of heterogeneous jobs"):
        render(replace(_make_job(generator_partition="small"), seeds=(3, 7)))


# --- The whole script, with Slurm's commands played by files ----------------------------------


# srun runs its one task here: the step's words end with the program's.
_COMMANDS = {
    "sinfo": "cat $played/states",
    "squeue": "cat $played/state",
    "scontrol": """
case $1 in
  show) tr ' ' '\\n' < $played/nodes;;
  *) echo "scontrol $*" >> $played/done;;
esac""",
    "srun": """
echo "srun $*" >> $played/done
case "$*" in
  *"launch.preflight judge"*)
    cp $played/bad $PREFLIGHT_DIR
    tr ' ' '\\n' <<< "$HOSTS" | grep -vxFf <(cut -f1 $played/bad) > $PREFLIGHT_DIR/good
    head -n 2 $PREFLIGHT_DIR/good > $PREFLIGHT_DIR/hosts
    [ $(wc -l < $PREFLIGHT_DIR/hosts) = 2 ]
    exit $(($? * 3));;
  *launch.preflight*) exit 0;;
esac
while [ "$1" != rank ]; do shift; done
shift 2
cp $PREFLIGHT_DIR/ranks_0 $played/ranks
exec $played/rank""",
}


def _play(
    folder: Path, rank: str, *, state: str = "RUNNING", nodes: str = "n1 n2 n3", **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run a job's script in ``folder``; Slurm says what files there say, ``rank`` is the step."""
    played, run = folder / "played", folder / "run"
    played.mkdir(exist_ok=True)
    run.mkdir(exist_ok=True)
    texts = {"state": state, "nodes": nodes, "states": str(settings.pop("states", ""))}
    for name, text in texts.items():
        (played / name).write_text(f"{text}\n" if text else "")
    (played / "done").write_text("")
    for name, text in (*_COMMANDS.items(), ("rank", rank)):
        (played / name).write_text(f"#!/bin/bash\n{text}\n")
        (played / name).chmod(0o755)
    restarts = int(str(settings.pop("max_restarts", 0)))
    attempt = str(settings.pop("attempt", 0))
    bad = str(settings.pop("bad", ""))
    (played / "bad").write_text(bad)
    job = replace(_make_job(spare_hosts=1, preflight=bool(bad)), max_restarts=restarts)
    script = render(replace(job, folder=run, workdir=folder))
    environment = {
        "PATH": f"{played}:/usr/bin:/bin",
        "played": str(played),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_RESTART_COUNT": attempt,
    }
    return subprocess.run(
        ["bash", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _done(folder: Path, what: str) -> list[str]:
    lines = (folder / "played" / "done").read_text().splitlines()
    return [line for line in lines if line.startswith(what)]


def _attempts(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run/attempts.jsonl").read_text().splitlines()]


def _save(step: int) -> str:
    return f"mkdir -p run/checkpoints; echo step_{step:06d} > run/checkpoints/latest; "


# As ranks do: on the signal they save and end well.
_STOPPED = "trap '{}exit 0' USR1; kill -USR1 $PPID; for i in {{1..100}}; do sleep 0.1; done"


@pytest.mark.parametrize(
    ("rank", "state", "requeued", "code"),
    [
        (_save(100), "RUNNING", False, 0),  # done
        (_save(40), "RUNNING", True, 0),  # preempted: the ranks alone were asked to stop
        (_save(40), "COMPLETING", False, 0),  # cancelled
        (_save(40) + "exit 1", "RUNNING", False, 1),  # a rank failed
        (_STOPPED.format(_save(40)), "RUNNING", True, 0),  # the time limit comes
        (_STOPPED.format(_save(40)), "COMPLETING", False, 0),  # cancelled
        (_STOPPED.format(""), "RUNNING", True, 0),  # before the first checkpoint
        (_STOPPED.format(_save(100)), "RUNNING", False, 0),  # done while the signal came
    ],
)
def test_a_job_comes_back_only_if_it_was_stopped_too_early(
    tmp_path: Path, rank: str, state: str, requeued: bool, code: int
):
    result = _play(tmp_path, rank, state=state)
    assert _done(tmp_path, "scontrol") == ["scontrol requeue 7"] * requeued, result
    assert result.returncode == code
    (step,) = _done(tmp_path, "srun")
    assert "--ntasks=9 --nodes=2 " in step
    assert step.endswith(f"python -m megarl.train train {tmp_path}/run/config.yaml")
    assert (tmp_path / "played/ranks").read_text().split() == ["n1"] * 4 + ["n2"] * 5
    start, end = _attempts(tmp_path)
    assert start.pop("time") <= end.pop("time")
    assert (start["job"], start["restart"], start["checkpoint"]) == ("7", 0, "")
    assert (start["event"], start["hosts"], start["bad"]) == ("start", ["n1", "n2", "n3"], [])
    assert (end["event"], end["code"], end["hosts"]) == ("end", code, ["n1", "n2"])


def test_a_requeued_job_resumes():
    assert "((attempt == 0)) || resume=(resume=auto)" in render(_make_job())


def test_restarts_without_a_newer_checkpoint_are_counted(tmp_path: Path):
    """Two are allowed; the fifth start is the third one from step 40."""
    fails = "exit 1"
    ranks = [fails, _save(40) + fails, fails, fails, fails]
    found = []
    for attempt, rank in enumerate(ranks):
        result = _play(tmp_path, rank, attempt=attempt, max_restarts=2)
        found.append((bool(_done(tmp_path, "scontrol requeue")), result.returncode))
        step = _done(tmp_path, "srun")[0]
        assert step.endswith(" resume=auto") is (attempt > 0)
    assert found == [(True, 1)] * 4 + [(False, 1)]
    # Slurm itself may start it again, after a node's failure: then it ends without a step.
    result = _play(tmp_path, fails, attempt=5, max_restarts=2)
    assert "given up: 4 starts from 'step_000040', fault.max_restarts is 2" in result.stderr
    assert _done(tmp_path, "srun") == []
    last = _attempts(tmp_path)[-1]
    assert (last["restart"], last["event"], last["code"]) == (5, "end", 1)


def test_a_lost_host_is_left_out_from_then_on(tmp_path: Path):
    result = _play(tmp_path, "exit 1", states="n1\tdown*\nn2\talloc", state="COMPLETING")
    assert _done(tmp_path, "scontrol") == ["scontrol update JobId=7 ExcNodeList=n1"], result
    assert (tmp_path / "run/bad_nodes").read_text() == "n1\tdown*\n"
    assert _attempts(tmp_path)[-1]["bad"] == ["n1"]
    # It has come back, and Slurm gives it to the job again: the spare host takes its place.
    _play(tmp_path, _save(100), attempt=1, max_restarts=1)
    assert (tmp_path / "played/ranks").read_text().split() == ["n2"] * 4 + ["n3"] * 5
    # With one good host left there is nothing to start; the next start must have others.
    (tmp_path / "run/bad_nodes").write_text("n1\ta\nn3\tb\n")
    (tmp_path / "run/checkpoints/latest").unlink()
    result = _play(tmp_path, _save(100), max_restarts=5)
    assert result.returncode == 3
    assert "too few good hosts: 1" in result.stderr
    assert _done(tmp_path, "s") == [
        "scontrol requeue 7",
        "scontrol update JobId=7 ExcNodeList=n1,n3",
    ]


def test_the_preflight_says_which_hosts_are_used(tmp_path: Path):
    """All hosts are examined; a spare takes the place of one that is no good."""
    result = _play(tmp_path, _save(100), bad="n2\tno GPU\n")
    assert result.returncode == 0, result
    steps = _done(tmp_path, "srun")
    names = ["check"] * 3 + ["judge", "bandwidth", "judge"]
    assert [name for step in steps[:-1] for name in set(names) if f" {name} " in step] == names
    checked = {word for step in steps[:3] for word in step.split() if "--nodelist=" in word}
    assert checked == {f"--nodelist=n{number}" for number in (1, 2, 3)}
    assert "--ntasks=2 --nodes=2 " in steps[4]  # the good ones
    assert (tmp_path / "played/ranks").read_text().split() == ["n1"] * 4 + ["n3"] * 5
    assert (tmp_path / "run/bad_nodes").read_text() == "n2\tno GPU\n"
    end = _attempts(tmp_path)[-1]
    assert (end["hosts"], end["bad"]) == (["n1", "n3"], ["n2"])


def test_without_enough_good_hosts_the_job_waits_for_others(tmp_path: Path):
    bad = "n1\tslow\nn2\tno GPU\n"
    result = _play(tmp_path, _save(100), bad=bad, max_restarts=1)
    assert result.returncode == 3, result
    assert not (tmp_path / "played/ranks").exists()
    assert _done(tmp_path, "scontrol") == [
        "scontrol requeue 7",
        "scontrol update JobId=7 ExcNodeList=n1,n2",
    ]
    assert _attempts(tmp_path)[-1]["code"] == 3
