"""A real Slurm's opinion of rendered scripts: 128 hosts of 8 GPUs that are powered down.

Powered-down cloud nodes count as available to the scheduler, so no daemon runs on any host.
"""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from launch.command import main
from launch.placement import place
from launch.site import load_site
from launch.slurm import Job, SubmissionError, render, submit
from megarl.config import GeneratorConfig, RunConfig, TrainerConfig
from megarl.config_file import load_config
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from tests.slurm.cluster import Slurm

ROOT = Path(__file__).parents[2]
BIG = "configs/llama3_405b_1024gpu.yaml"
DGX = ROOT / "configs/clusters/dgx_h100.yaml"

pytestmark = pytest.mark.slurm


def _is_accepted(slurm: Slurm, script: str, folder: Path, words: str) -> bool:
    """Ask Slurm, which must say ``words``."""
    file = folder / "job.sbatch"
    file.write_text(script)
    result = subprocess.run(
        ["sbatch", "--test-only", str(file)],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert words.lower() in result.stderr.lower(), result
    return result.returncode == 0


def test_1024_gpus_are_accepted(
    slurm: Slurm,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(ROOT)
    assert main([BIG, "--cluster", str(DGX), "--dry-run", "--json"], Console()) == 0
    script = json.loads(capsys.readouterr().out)["sbatch"]
    words = "using 8192 processors on nodes c[001-128] in partition batch"
    assert _is_accepted(slurm, script, tmp_path, words)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "using 8192 processors"),
        ({"spare_hosts": 1}, "Node count specification invalid"),
        ({"partition": "other"}, "invalid partition"),
        ({"time": "8-00:00:00"}, "time limit is invalid"),
        ({"cpus_per_host": 128}, "More processors requested than permitted"),
    ],
)
def test_what_there_is_not_is_refused(
    slurm: Slurm, tmp_path: Path, keys: dict[str, object], words: str
):
    content = yaml.safe_load(DGX.read_text())
    content["slurm"] |= keys
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content))
    site = load_site(tmp_path / "cluster.yaml")
    placement = place(load_config(ROOT / BIG), 8, spare_hosts=site.slurm.spare_hosts)
    job = replace(_make_job(tmp_path, 0), placement=placement, site=site)
    assert _is_accepted(slurm, render(job), tmp_path, words) is (not keys)


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
        site=load_site(DGX),
    )


def test_a_submitted_job_is_slurms(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    job = _make_job(tmp_path, 1)
    number = submit(job, {job.folder: "name: two-hosts\n"}, "")
    ask = ["squeue", "--noheader", f"--jobs={number}", "--format=%j %D"]
    result = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
    subprocess.run(["scancel", number], timeout=60, check=True)
    assert result.stdout.split() == ["two-hosts", "3"]
    assert (tmp_path / "run" / "config.yaml").read_text() == "name: two-hosts\n"


def test_a_refusal_comes_with_slurms_reason(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    with pytest.raises(
        SubmissionError, match=r"refused .*job\.sbatch with code 1: .*processors requested"
    ):
        submit(_make_job(tmp_path, 200), {tmp_path / "run": ""}, "")
