"""Who is left out, and why: pure functions of all hosts' reports.

Called by the preflight's ``judge`` and the cluster's doctor. Among hosts that differ the majority
is right; where as many say one thing as another, those with the earlier host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launch.preflight.report import Report
from launch.site import GIB, Site

CHECKS = ("report", "master", "shared", "clock", "gpus", "versions", "limits", "links")
_GPU_FIELDS = ("gpu", "driver", "used_mib", "ecc_errors", "max_clock_mhz", "slowdown")
_SAME_GPU_FIELDS = ("gpu", "driver", "max_clock_mhz")
_NUMBERS = ("used_mib", "ecc_errors", "max_clock_mhz")
_UNKNOWN = ("", "N/A", "Not Supported")
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One reason to leave a host out."""

    host: str
    check: str
    reason: str


def find_faults(hosts: Sequence[str], reports: Mapping[str, Report], site: Site) -> list[Fault]:
    """Return every host's faults; ``hosts`` in node order, those without a report among them."""
    present = [host for host in hosts if host in reports]
    shown = [reports[host] for host in present]
    silent = [
        Fault(host=host, check="report", reason=_silence(site))
        for host in hosts
        if host not in reports
    ]
    faults = [
        *silent,
        *_reach_faults(shown),
        *(Fault(host=one.host, check="shared", reason=one.shared) for one in shown if one.shared),
        *_clock_faults(shown, site.preflight.clock_skew_seconds),
        *(fault for one in shown for fault in _gpu_faults(one, site)),
        *_version_faults(shown),
        *(fault for one in shown for fault in _limit_faults(one, site)),
    ]
    order = {host: number for number, host in enumerate(hosts)}
    return sorted(faults, key=lambda fault: (order[fault.host], CHECKS.index(fault.check)))


def _silence(site: Site) -> str:
    return (
        f"no report within {site.preflight.timeout_seconds:g} s: it did not start the check, or "
        "hangs in it, or its files and its way to the first host are both cut off"
    )


def _reach_faults(reports: Sequence[Report]) -> Iterator[Fault]:
    """Yield who did not meet the first host; where most did not, it is the first one's fault."""
    missed = [one for one in reports if one.master]
    first = next((one for one in reports if one.host == one.first), None)
    if first is None:  # of a group of hosts that it is not in, or dead, which its own group shows
        yield from (Fault(host=one.host, check="master", reason=one.master) for one in missed)
    elif first.master:
        yield Fault(host=first.host, check="master", reason=first.master)
    elif len(missed) > 1 and 2 * len(missed) > len(reports) - 1:
        reason = f"{len(missed)} of {len(reports) - 1} hosts did not meet it: {missed[0].master}"
        yield Fault(host=first.host, check="master", reason=reason)
    else:
        yield from (Fault(host=one.host, check="master", reason=one.master) for one in missed)


def _clock_faults(reports: Sequence[Report], most_seconds: float) -> Iterator[Fault]:
    """Yield the clocks that are far from the median one; of two, the first host's is right."""
    known = [(one, -one.ahead_seconds) for one in reports if not one.master]
    clocks = [ahead for _, ahead in known]
    ordered = sorted(clocks if _has_first(reports) else [*clocks, 0.0])
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    right = min(middle, key=abs, default=0.0)
    for one, ahead in known:
        apart = ahead - right
        if abs(apart) > most_seconds + one.round_trip_seconds / 2:
            way = "ahead of" if apart > 0 else "behind"
            reason = (
                f"its clock is {abs(apart):.3g} s {way} the others', {most_seconds:g} s allowed"
            )
            yield Fault(host=one.host, check="clock", reason=reason)


def _has_first(reports: Sequence[Report]) -> bool:
    return any(one.host == one.first for one in reports)


def parse_gpu(line: str) -> dict[str, str]:
    """Return a GPU's fields by name; those that the command does not know are left out."""
    pairs = zip(_GPU_FIELDS, (part.strip() for part in line.split(",")), strict=False)
    return {name: text for name, text in pairs if text.strip("[]") not in _UNKNOWN}


def _gpu_faults(report: Report, site: Site) -> Iterator[Fault]:
    asked = bool(site.preflight.list_gpus) or site.device.is_gpu
    gpus = [parse_gpu(line) for line in report.gpu_lines]
    reasons: list[str] = []
    if report.gpu_error:
        reasons.append(report.gpu_error)
    elif asked and len(gpus) < site.links.ranks_per_host:
        reasons.append(f"{len(gpus)} GPUs, expected {site.links.ranks_per_host}")
    for index, gpu in enumerate(gpus):
        reasons += [f"GPU {index}: {reason}" for reason in _one_gpu(gpu, site)]
    return (Fault(host=report.host, check="gpus", reason=reason) for reason in reasons)


def _one_gpu(gpu: Mapping[str, str], site: Site) -> Iterator[str]:
    numbers: dict[str, float] = {}
    for name in _NUMBERS:
        try:
            numbers[name] = float(gpu.get(name, "0"))
        except ValueError:  # "[GPU requires reset]" and the like
            yield f"{name} is {gpu[name]!r}, expected a number"
    if errors := numbers.get("ecc_errors"):
        yield f"{errors:.0f} uncorrected ECC errors"
    if gpu.get("slowdown", "").lower() == "active":
        yield "its clocks are slowed down by the hardware (heat or power)"
    used = numbers.get("used_mib", 0.0) * _MIB
    if used > site.preflight.gpu_used_gib * GIB:
        yield (
            f"{used / GIB:.1f} GiB of its memory are in use before the run, "
            f"{site.preflight.gpu_used_gib:g} allowed"
        )


def _version_faults(reports: Sequence[Report]) -> Iterator[Fault]:
    """Yield what differs from the majority, of libraries and of GPUs."""
    said = {one.host: {**one.versions, **_gpu_versions(one)} for one in reports}
    names = dict.fromkeys(name for versions in said.values() for name in versions)
    for name in names:
        values = {host: versions[name] for host, versions in said.items() if name in versions}
        right = majority(list(values.values()))
        for host, value in values.items():
            if value != right:
                same = sum(other == right for other in values.values())
                reason = f"{name} is {value}, {right} on {same} of {len(values)} hosts"
                yield Fault(host=host, check="versions", reason=reason)


def majority(values: Sequence[str]) -> str:
    """Return the most frequent value; of equally frequent ones the first."""
    return Counter(values).most_common(1)[0][0]


def _gpu_versions(report: Report) -> dict[str, str]:
    gpus = [parse_gpu(line) for line in report.gpu_lines]
    kinds = {name: {gpu[name] for gpu in gpus if name in gpu} for name in _SAME_GPU_FIELDS}
    return {name: " and ".join(sorted(values)) for name, values in kinds.items() if values}


def _limit_faults(report: Report, site: Site) -> Iterator[Fault]:
    wanted = site.preflight
    rows = (
        ("open files", report.open_files, wanted.open_files, 1, ""),
        ("/dev/shm", report.shm_bytes, wanted.shm_gib, GIB, " GiB"),
        ("free memory", report.memory_bytes, wanted.memory_gib, GIB, " GiB"),
    )
    for name, found, least, unit, suffix in rows:
        if 0 <= found < least * unit:  # -1: RLIM_INFINITY
            reason = f"{name}: {found / unit:.3g}{suffix}, expected at least {least:g}{suffix}"
            yield Fault(host=report.host, check="limits", reason=reason)


def reasons_by_host(faults: Sequence[Fault]) -> dict[str, str]:
    """Return the bad hosts, each with all its reasons on one line."""
    found: dict[str, list[str]] = {}
    for fault in faults:
        found.setdefault(fault.host, []).append(" ".join(fault.reason.split()))
    return {host: "; ".join(reasons) for host, reasons in found.items()}
