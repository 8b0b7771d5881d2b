"""A real Slurm's opinion of rendered scripts: 128 hosts of 8 GPUs that are powered down.

Needs `slurmctld`, `munged` and `sbatch` (Debian: slurmctld, slurm-client, munge), no root and no
daemon on any host: powered-down cloud nodes count as available to the scheduler.
"""

import getpass
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from launch.command import main
from launch.placement import place
from launch.site import load_site
from launch.slurm import Job, SubmissionError, submit
from megarl.config import GeneratorConfig, RunConfig, TrainerConfig
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout

ROOT = Path(__file__).parents[2]
BIG = "configs/llama3_405b_1024gpu.yaml"
SEARCH_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has the daemons
PROGRAMS = ("slurmctld", "munged", "sbatch", "scontrol")

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        any(shutil.which(each, path=SEARCH_PATH) is None for each in PROGRAMS),
        reason=f"needs {', '.join(PROGRAMS)}",
    ),
]

CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
EnforcePartLimits=ALL
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=86400
NodeName=DEFAULT CPUs=64 Sockets=2 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=2000000 Gres=gpu:8
NodeName=c[001-128] NodeHostname=localhost NodeAddr=127.0.0.1 Port={node_port} State=CLOUD
PartitionName=batch Nodes=c[001-128] Default=YES MaxTime=7-00:00:00 State=UP
"""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _wait_for_controller(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while True:
        result = subprocess.run(
            ["scontrol", "ping"], env=environment, capture_output=True, text=True, timeout=60
        )
        if "UP" in result.stdout:
            return
        assert time.monotonic() < deadline, result
        time.sleep(0.2)


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run a controller; yield the environment of its clients."""
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    (folder / "state").mkdir()
    ports = {"port": _free_port(), "node_port": _free_port()}
    conf, key = folder / "slurm.conf", folder / "munge.key"
    conf.write_text(CONF.format(folder=folder, user=getpass.getuser(), **ports))
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    environment = {**os.environ, "PATH": SEARCH_PATH, "SLURM_CONF": str(conf)}
    names = {"key-file": key, "socket": folder / "munge.sock", "pid-file": folder / "munged.pid"}
    names |= {"seed-file": folder / "munged.seed", "log-file": folder / "munged.log"}
    # The folders above may be anyone's: the key is this test's own.
    munge = ["munged", "--foreground", "--force", *(f"--{key}={at}" for key, at in names.items())]
    daemons = (munge, ["slurmctld", "-D", "-c", "-f", str(conf)])
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            with (folder / f"{command[0]}.out").open("wb") as log:
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        _wait_for_controller(environment)
        yield environment
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(timeout=60)


def _write_cluster(folder: Path, **slurm: object) -> Path:
    content = yaml.safe_load((ROOT / "configs/clusters/dgx_h100.yaml").read_text())
    content["slurm"] |= slurm
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def _script(folder: Path, capsys: pytest.CaptureFixture[str], cluster: Path) -> Path:
    assert main([BIG, "--cluster", str(cluster), "--dry-run", "--json"], Console()) == 0
    script = folder / "job.sbatch"
    script.write_text(json.loads(capsys.readouterr().out)["sbatch"])
    return script


@pytest.mark.parametrize(
    ("slurm", "words"),
    [
        ({}, "using 8192 processors on nodes c[001-128] in partition batch"),
        ({"spare_hosts": 1}, "Node count specification invalid"),
        ({"partition": "other"}, "invalid partition"),
        ({"time": "8-00:00:00"}, "time limit is invalid"),
        ({"cpus_per_host": 128}, "More processors requested than permitted"),
    ],
)
def test_1024_gpus_are_accepted_and_what_there_is_not_is_refused(
    controller: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    slurm: dict[str, object],
    words: str,
):
    monkeypatch.chdir(ROOT)
    script = _script(tmp_path, capsys, _write_cluster(tmp_path, **slurm))
    result = subprocess.run(
        ["sbatch", "--test-only", str(script)],
        env=controller,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert words.lower() in result.stderr.lower(), result
    assert (result.returncode == 0) is (not slurm)


def _make_job(folder: Path, spare_hosts: int) -> Job:
    config = RunConfig(
        trainer=TrainerConfig(layout=TrainerLayout(tp=8)),
        generator=GeneratorConfig(layout=GeneratorLayout(tp=8)),
    )
    return Job(
        name="two-hosts",
        summary="a trainer and a generator",
        folder=folder / "run",
        workdir=folder,
        last_checkpoint="step_000100",
        placement=place(config, 8, spare_hosts=spare_hosts),
        site=load_site(ROOT / "configs/clusters/dgx_h100.yaml"),
    )


def test_a_submitted_job_is_slurms(
    controller: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, controller[name])
    number = submit(_make_job(tmp_path, 1), "name: two-hosts\n")
    ask = ["squeue", "--noheader", f"--jobs={number}", "--format=%j %D"]
    result = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
    subprocess.run(["scancel", number], timeout=60, check=True)
    assert result.stdout.split() == ["two-hosts", "3"]
    assert (tmp_path / "run" / "config.yaml").read_text() == "name: two-hosts\n"


def test_a_refusal_comes_with_slurms_reason(
    controller: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, controller[name])
    with pytest.raises(
        SubmissionError, match=r"refused .*job\.sbatch with code 1: .*processors requested"
    ):
        submit(_make_job(tmp_path, 200), "")
