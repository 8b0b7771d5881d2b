"""Which hosts a job has and which of them this is, as the job's script says in the environment.

Called by the steps of the preflight.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import ConfigError

CHOSEN_FILE, GOOD_FILE = "chosen", "good"  # of all groups of hosts, each judged by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What the job's script says in the environment."""

    host: str  # this one
    hosts: tuple[str, ...]  # of the job, in node order
    folder: Path
    address: str  # of the first host
    port: int


def read_allocation() -> Allocation:
    """Return what the environment says.

    Raises:
        ConfigError: a variable is missing or is no number.
    """
    names = ("PREFLIGHT_DIR", "HOSTS", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ.get(name, "") for name in names}
    for name, value in given.items():
        if not value or (name == "MASTER_PORT" and not value.isdecimal()):
            raise ConfigError(f"{name} is {value!r}: the job's script sets it for each step")
    return Allocation(
        host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        hosts=tuple(given["HOSTS"].split()),
        folder=Path(given["PREFLIGHT_DIR"]),
        address=given["MASTER_ADDR"],
        port=int(given["MASTER_PORT"]),
    )
