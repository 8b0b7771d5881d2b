"""``python -m launch.preflight check | judge | bandwidth FOLDER``: the steps of a job before its ranks.

Called by the job's script: ``check`` and ``bandwidth`` as one task on every host, ``judge`` as one
task after each of them. FOLDER is the run's, with the job's ``cluster.yaml``; what hosts say goes to
PREFLIGHT_DIR. A check that does not hold is written down and is no error of the step's.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch.preflight.allocation import CHOSEN_FILE, GOOD_FILE, Allocation, read_allocation
from launch.preflight.bandwidth import measure
from launch.preflight.judge import Fault, find_faults, reasons_by_host
from launch.preflight.links import link_faults, read_rates
from launch.preflight.meeting import Listener, Place, visit
from launch.preflight.report import Report, examine_host, read_reports, write_report
from launch.site import Site, load_site
from megarl.errors import MegarlError
from megatron_bridge.errors import BridgeError

HOSTS_FILE, BAD_FILE = "hosts", "bad"
TOO_FEW = 3  # exit code of `judge`
_WRITE_SECONDS = 60.0  # behind the time limit of the meeting: to examine, to write


def check(allocation: Allocation, site: Site) -> Report:
    """Examine this host and meet the first one, or be it; return what was found, also written."""
    report = examine_host(allocation.host, allocation.hosts[0], site)
    seconds = site.preflight.timeout_seconds
    try:
        allocation.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{allocation.folder} cannot be made: {error.strerror}"
        report = replace(report, shared=reason)
    if allocation.host == allocation.hosts[0]:
        report = _receive(allocation, report, seconds)
    else:
        place = Place(
            address=allocation.address,
            port=allocation.port,
            folder=allocation.folder,
            seconds=seconds,
        )
        report = visit(place, report)
    if not report.shared:
        write_report(allocation.folder, report)
    return report


def _receive(allocation: Allocation, report: Report, seconds: float) -> Report:
    """Be the first host: wait for all others."""
    try:
        listener = Listener(allocation.port, secrets.token_hex(8), allocation.folder)
    except OSError as error:
        return replace(report, master=f"cannot listen on port {allocation.port}: {error.strerror}")
    listener.wait(set(allocation.hosts[1:]), seconds)
    return report


def judge(allocation: Allocation, site: Site) -> list[Fault]:
    """Return the faults of all hosts, of their links too once these have been measured."""
    folder = allocation.folder
    faults = find_faults(allocation.hosts, read_reports(folder, allocation.hosts), site)
    passed = set(allocation.hosts) - {fault.host for fault in faults}
    slow = link_faults(read_rates(folder), site)
    return [*faults, *(fault for fault in slow if fault.host in passed)]


def choose(hosts: Sequence[str], faults: Sequence[Fault], need: int) -> tuple[str, ...]:
    """Return the first ``need`` hosts without a fault, fewer where there are not so many."""
    bad = {fault.host for fault in faults}
    return tuple(host for host in hosts if host not in bad)[:need]


def _judge(allocation: Allocation, site: Site, need: int) -> int:
    faults = judge(allocation, site)
    reasons = reasons_by_host(faults)
    good = choose(allocation.hosts, faults, len(allocation.hosts))
    bad = [f"{host}\t{reason}" for host, reason in reasons.items()]
    for name, lines in ((BAD_FILE, bad), (HOSTS_FILE, good[:need])):
        (allocation.folder / name).write_text("".join(f"{line}\n" for line in lines))
    for name, hosts in ((CHOSEN_FILE, good[:need]), (GOOD_FILE, good)):
        _replace_group(allocation.folder / name, allocation.hosts, hosts)
    for host, reason in reasons.items():
        print(f"preflight: {host} is left out: {reason}")
    if len(good) < need:
        print(
            f"preflight: {len(good)} of {len(allocation.hosts)} hosts are good, the run needs {need}; "
            f"bad: {', '.join(f'{host} ({reason})' for host, reason in reasons.items())}",
            file=sys.stderr,
        )
        return TOO_FEW
    print(f"preflight: the run uses {' '.join(good[:need])}")
    return 0


def _replace_group(path: Path, group: Sequence[str], hosts: Sequence[str]) -> None:
    """Put ``hosts`` behind those of other groups: a job of several judges each by itself."""
    before = path.read_text().split() if path.is_file() else []
    kept = [host for host in before if host not in group]
    path.write_text("".join(f"{host}\n" for host in (*kept, *hosts)))


def _end_later(seconds: float) -> None:
    """End this process after ``seconds``, also out of a file server's or a driver's hang."""

    def end() -> None:
        print(f"preflight: ended by itself after {seconds:.0f} s", file=sys.stderr, flush=True)
        os._exit(0)  # without a report, which says enough

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def main(arguments: Sequence[str]) -> int:
    """Do one step."""
    parser = argparse.ArgumentParser(prog="python -m launch.preflight", description=__doc__)
    parser.add_argument("step", choices=("check", "judge", "bandwidth"))
    parser.add_argument("folder", type=Path, help="of the run, with cluster.yaml")
    parser.add_argument("--need", type=int, help="how many hosts the run uses; judge only")
    given = parser.parse_args(arguments)
    try:
        allocation = read_allocation()
        site = load_site(given.folder / "cluster.yaml")
        if given.step == "judge":
            need = len(allocation.hosts) if given.need is None else given.need
            return _judge(allocation, site, need)
        if given.step == "check":
            _end_later(site.preflight.timeout_seconds + _WRITE_SECONDS)
            check(allocation, site)
        else:
            measure(allocation, site)
    except (MegarlError, BridgeError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
