"""``megarl doctor --cluster FILE``: the steps of the preflight alone, and a table of hosts and checks.

Called by the command line. Inside a Slurm allocation it examines all its hosts, by one task on each;
elsewhere this machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.preflight.allocation import Allocation
from launch.preflight.judge import CHECKS, Fault
from launch.preflight.links import HostRates, notes, read_rates
from launch.preflight.report import Report, read_reports
from launch.preflight.steps import check, choose, judge, write_verdict
from launch.site import Site, load_site
from megarl.errors import ConfigError

_STEP_SECONDS = 600.0  # behind the meeting's time limit: to start tasks, and to measure links
_END_SECONDS = 30.0  # for srun to end its tasks


def main(cluster: Path, console: Console) -> int:
    """Examine the hosts at hand, show what was found; 1 where a host is bad, else 0."""
    site = load_site(cluster)
    job = os.environ.get("SLURM_JOB_ID", "")
    # All hosts of an allocation write into it, so it must lie on a file system that they share.
    folder = Path(tempfile.mkdtemp(prefix=".doctor.", dir=Path.cwd() if job else None))
    try:
        shutil.copy(cluster, folder / "cluster.yaml")
        allocation = _allocation(job, folder)
        if job:
            _step("check", allocation, site)
            good = _judge(allocation, site)
            if len(good) > 1 and site.preflight.link_share:
                _step("bandwidth", allocation, site, good)
        else:
            check(allocation, site)
        faults = judge(allocation, site)
        reports = read_reports(allocation.folder, allocation.hosts)
        rates = read_rates(allocation.folder)
    finally:
        shutil.rmtree(folder)
    console.print(table(allocation.hosts, reports, rates, faults))
    for fault in faults:
        _say(console, f"{fault.host}: {fault.check}: {fault.reason}", "red")
    for note in notes(rates, site):
        _say(console, f"note: {note}", "yellow")
    bad = {fault.host for fault in faults}
    _say(console, f"{len(allocation.hosts) - len(bad)} of {len(allocation.hosts)} hosts are good")
    return 1 if faults else 0


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _allocation(job: str, folder: Path) -> Allocation:
    if not job:
        host = socket.gethostname()
        return Allocation(host=host, hosts=(host,), folder=folder, address="127.0.0.1", port=0)
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    hosts = tuple(_output("scontrol", "show", "hostnames", nodes).split())
    if not hosts:
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {nodes!r}, expected the names of job {job}'s hosts"
        )
    return Allocation(
        host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        hosts=hosts,
        folder=folder,
        address=hosts[0],
        port=20000 + int(job) % 10000,
    )


def _output(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {result.stderr.strip()}")
    return result.stdout


def _judge(allocation: Allocation, site: Site) -> tuple[str, ...]:
    """Write who has passed so far, for the measurement of links."""
    faults = judge(allocation, site)
    good = choose(allocation.hosts, faults, len(allocation.hosts))
    write_verdict(allocation, faults, len(good))
    return good


def _step(
    name: str, allocation: Allocation, site: Site, hosts: Sequence[str] | None = None
) -> None:
    """Run a step as one task on each host; what it finds is in the folder, also after an error."""
    chosen = tuple(hosts or allocation.hosts)
    tasks = str(len(chosen))
    command = (
        "srun",
        "--overlap",
        "--nodelist",
        ",".join(chosen),
        "--nodes",
        tasks,
        "--ntasks",
        tasks,
    )
    environment = {
        **{key: value for key, value in os.environ.items() if "TASKS_PER_NODE" not in key},
        "PREFLIGHT_DIR": str(allocation.folder),
        "HOSTS": " ".join(allocation.hosts),
        "MASTER_ADDR": allocation.address,
        "MASTER_PORT": str(allocation.port),
        "WORLD_SIZE": tasks,
    }
    module = (sys.executable, "-m", "launch.preflight", name, str(allocation.folder))
    limit = site.preflight.timeout_seconds + _STEP_SECONDS
    with subprocess.Popen([*command, *module], env=environment) as process:
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:  # who hangs has written nothing, which is judged
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def table(
    hosts: Sequence[str],
    reports: Mapping[str, Report],
    rates: Mapping[str, HostRates],
    faults: Sequence[Fault],
) -> Table:
    """Return hosts x checks for a terminal; an empty cell was not looked at."""
    shown = Table("host", *CHECKS, title="megarl doctor --cluster")
    bad = {(fault.host, fault.check) for fault in faults}
    for host in hosts:
        cells: list[str] = []
        for name in CHECKS:
            seen = host in (rates if name == "links" else reports)
            good = "[green]holds[/green]" if seen else ""
            cells.append("[bold red]bad[/bold red]" if (host, name) in bad else good)
        shown.add_row(host, *cells)
    return shown
