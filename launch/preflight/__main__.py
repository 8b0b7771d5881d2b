"""``python -m launch.preflight check | judge | bandwidth FOLDER``: the steps of a job before its ranks.

Called by the job's script: ``check`` and ``bandwidth`` as one task on every host, ``judge`` as one
task after each of them. FOLDER is the run's, with the job's ``cluster.yaml``; what hosts say goes to
PREFLIGHT_DIR. A check that does not hold is written down and is no error of the step's.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from launch.preflight.allocation import Allocation, read_allocation
from launch.preflight.bandwidth import measure
from launch.preflight.judge import reasons_by_host
from launch.preflight.links import notes, read_rates
from launch.preflight.steps import check, choose, judge, write_verdict
from launch.site import Site, load_site
from megarl.errors import MegarlError
from megatron_bridge.errors import BridgeError

TOO_FEW = 3  # exit code of `judge`
_WRITE_SECONDS = 60.0  # behind the time limit of the meeting: to examine, to write


def _judge(allocation: Allocation, site: Site, need: int) -> int:
    faults = judge(allocation, site)
    reasons = reasons_by_host(faults)
    good = choose(allocation.hosts, faults, len(allocation.hosts))
    write_verdict(allocation, faults, need)
    for host, reason in reasons.items():
        print(f"preflight: {host} is left out: {reason}")
    for note in notes(read_rates(allocation.folder), site):
        print(f"preflight: {note}")
    if len(good) < need:
        print(
            f"preflight: {len(good)} of {len(allocation.hosts)} hosts are good, the run needs {need}; "
            f"bad: {', '.join(f'{host} ({reason})' for host, reason in reasons.items())}",
            file=sys.stderr,
        )
        return TOO_FEW
    print(f"preflight: the run uses {' '.join(good[:need])}")
    return 0


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
