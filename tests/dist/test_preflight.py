"""The preflight's steps as a job runs them: processes with host names of their own on one machine."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tools.netlab import Netlab

ROOT = Path(__file__).parents[2]
# Two "GPUs" on each host, but for n3: the list is a command of the cluster file's.
CLUSTER = """
name: pseudo
ranks_per_host: 2
nic_bytes_per_second: {rate}
nic_efficiency: 1.0
device: {{is_gpu: false, memory_gib: 1, peak_tflops: 1, memory_bytes_per_second: 1.0e9}}
preflight:
  list_gpus: 'echo "H100, 550.54"; [ "$SLURMD_NODENAME" = n3 ] || echo "H100, 550.54"'
  timeout_seconds: {seconds}
  link_rounds: 3
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Job:
    """A run folder and the environment that a job's script gives to all steps."""

    def __init__(self, folder: Path, hosts: Sequence[str], *, rate: str, seconds: float):
        self.folder, self.hosts = folder, tuple(hosts)
        self.found = folder / "preflight" / "1_0"
        (folder / "cluster.yaml").write_text(CLUSTER.format(rate=rate, seconds=seconds))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PREFLIGHT_DIR": str(self.found),
            "HOSTS": " ".join(hosts),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }

    def argv(self, step: str, *options: str) -> list[str]:
        return [sys.executable, "-m", "launch.preflight", step, str(self.folder), *options]

    def everywhere(self, step: str, of_host: Mapping[str, Mapping[str, str]]) -> None:
        """Run a step as one task on each host; some have variables of their own."""
        tasks = [
            subprocess.Popen(
                self.argv(step),
                env={**self.environment, "SLURMD_NODENAME": host, **of_host.get(host, {})},
                start_new_session=True,
            )
            for host in self.hosts
        ]
        try:
            assert [task.wait(120) for task in tasks] == [0] * len(tasks)
        finally:
            for task in tasks:
                if task.poll() is None:
                    os.killpg(task.pid, signal.SIGKILL)

    def judge(self, need: int) -> subprocess.CompletedProcess[str]:
        argv = self.argv("judge", "--need", str(need))
        return subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )

    def lines(self, name: str) -> list[str]:
        return (self.found / name).read_text().splitlines()


def _other_version(folder: Path, package: str, version: str) -> str:
    """Return a path on which another version of a package is installed."""
    installed = folder / "site" / f"{package}-{version}.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    )
    return str(installed.parent)


@pytest.mark.dist
def test_a_wrong_version_a_missing_gpu_and_an_unreachable_master_are_named(tmp_path: Path):
    job = _Job(tmp_path, [f"n{number}" for number in range(1, 7)], rate="1e9", seconds=12)
    site = _other_version(tmp_path, "numpy", "1.0.1")
    elsewhere = tmp_path / "elsewhere"
    job.everywhere(
        "check",
        {
            "n2": {"PYTHONPATH": f"{site}:{ROOT}"},
            "n4": {"MASTER_PORT": str(_free_port())},  # nobody listens there
            "n5": {"PREFLIGHT_DIR": str(elsewhere)},  # a file system that the others do not see
        },
    )

    judged = job.judge(need=2)
    assert judged.returncode == 0, judged.stderr
    assert job.lines("hosts") == ["n1", "n6"]
    reasons = dict(line.split("\t") for line in job.lines("bad"))
    assert list(reasons) == ["n2", "n3", "n4", "n5"]
    assert "numpy is 1.0.1" in reasons["n2"]
    assert reasons["n3"] == "1 GPUs, expected 2"
    assert "not reached in 12 s" in reasons["n4"]
    assert "refused" in reasons["n4"]
    assert f"{elsewhere} is another one than the first host's" in reasons["n5"]
    assert "n3 is left out: 1 GPUs, expected 2" in judged.stdout

    judged = job.judge(need=3)
    assert judged.returncode == 3
    assert "2 of 6 hosts are good, the run needs 3" in judged.stderr
    assert all(f"{host} ({reason})" in judged.stderr for host, reason in reasons.items())


def _good_reports(job: _Job) -> None:
    """Write what `check` would have found, for a test of the step behind it."""
    from launch.preflight.report import Report, write_report

    job.found.mkdir(parents=True)
    for host in job.hosts:
        report = Report(
            host=host,
            first=job.hosts[0],
            gpu_lines=("H100", "H100"),
            versions={},
            open_files=1 << 20,
            shm_bytes=2 << 30,
            memory_bytes=2 << 30,
        )
        write_report(job.found, report)


@pytest.mark.dist
@pytest.mark.skipif(bool(Netlab.available()), reason=Netlab.available())
def test_a_host_with_a_slow_nic_is_named_by_measurement(tmp_path: Path):
    job = _Job(tmp_path, ["n1", "n2", "n3"], rate="10.0e6", seconds=60)
    _good_reports(job)
    assert job.judge(need=3).returncode == 0
    with Netlab(hosts=3, rate_mbit=80.0) as lab:
        lab.slow(1, rate_mbit=20.0)
        tasks = [
            lab.start(
                number,
                job.argv("bandwidth"),
                {
                    **job.environment,
                    "SLURMD_NODENAME": host,
                    "WORLD_SIZE": "3",
                    "MASTER_ADDR": lab.addresses[0],
                    "GLOO_SOCKET_IFNAME": "eth0",
                },
            )
            for number, host in enumerate(job.hosts)
        ]
        assert [task.wait(240) for task in tasks] == [0, 0, 0]
    assert job.judge(need=2).returncode == 0
    assert job.lines("hosts") == ["n1", "n3"]
    (line,) = job.lines("bad")
    assert line.startswith("n2\tslow links to 2 of 2 hosts: 0.00")
    rates = json.loads((job.found / "n3.rates.json").read_text())["rates"]
    good = {rate["peer"]: rate["bytes_per_second"] for rate in rates}
    assert good["n1"] == pytest.approx(10e6, rel=0.3)
    assert good["n2"] == pytest.approx(2.5e6, rel=0.3)
    assert 0 < good[""] < 5e6  # among all: no faster than the slowest
