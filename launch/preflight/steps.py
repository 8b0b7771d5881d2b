"""The steps of a preflight: examine a host and meet the first one, judge all, say who is chosen.

Called by the job's script through ``python -m launch.preflight``, and by the cluster's doctor.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch.preflight.allocation import CHOSEN_FILE, GOOD_FILE, Allocation
from launch.preflight.judge import Fault, find_faults, reasons_by_host
from launch.preflight.links import link_faults, read_rates
from launch.preflight.meeting import Listener, Place, visit
from launch.preflight.report import Report, examine_host, read_reports, write_report
from launch.site import Site

HOSTS_FILE, BAD_FILE = "hosts", "bad"


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
        return replace(report, master=f"cannot listen on port {allocation.port}: {error}")
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


def write_verdict(allocation: Allocation, faults: Sequence[Fault], need: int) -> None:
    """Write the hosts that a run of ``need`` uses, and the bad ones with their reasons."""
    good = choose(allocation.hosts, faults, len(allocation.hosts))
    bad = [f"{host}\t{reason}" for host, reason in reasons_by_host(faults).items()]
    for name, lines in ((BAD_FILE, bad), (HOSTS_FILE, good[:need])):
        (allocation.folder / name).write_text("".join(f"{line}\n" for line in lines))
    for name, hosts in ((CHOSEN_FILE, good[:need]), (GOOD_FILE, good)):
        _replace_group(allocation.folder / name, allocation.hosts, hosts)


def _replace_group(path: Path, group: Sequence[str], hosts: Sequence[str]) -> None:
    """Put ``hosts`` behind those of other groups: a job of several judges each by itself."""
    before = path.read_text().split() if path.is_file() else []
    kept = [host for host in before if host not in group]
    path.write_text("".join(f"{host}\n" for host in (*kept, *hosts)))
