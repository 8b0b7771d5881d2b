"""The measurement of a host's links: a process a NIC, watched, and what they found in a file.

Called by the step ``bandwidth`` on every host that was found good. A process that hangs or dies in a
round (a driver may do both) costs that round: another one goes on with the next.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.preflight.allocation import CHOSEN_FILE, GOOD_FILE, Allocation
from launch.preflight.links import ALL, HostRates, Rate, rates_path, rounds
from launch.site import Site
from megarl.errors import ConfigError
from megarl.observe.files import replacing

if TYPE_CHECKING:
    from launch.preflight.link_rank import LinkPlan

_ROUND_SECONDS = 90.0  # two waits for a peer, and what ending a group may take


def measure(allocation: Allocation, site: Site) -> None:
    """Measure this host's links and write their rates; nothing where the cluster file says so."""
    if not site.preflight.link_share:
        return
    tested = _tested(allocation.folder, allocation.host)
    if len(tested) < 2:
        return
    from launch.preflight.link_rank import LinkPlan, host_store, wait_for_all

    _write(allocation, HostRates(tested=tested, rates=()))  # begun, which tells a crash from none

    nics = site.links.nics_per_host if site.device.is_gpu else 1
    host = tested.index(allocation.host)
    plans = [
        LinkPlan(
            tested=tested,
            host=host,
            nic=nic,
            num_nics=nics,
            device=nic * (site.links.ranks_per_host // nics) if site.device.is_gpu else -1,
            # A job's script may still name a first host that is bad.
            address=tested[0] if allocation.address in allocation.hosts else allocation.address,
            port=allocation.port,
            most_rounds=site.preflight.link_rounds,
            first_round=0,
            bytes_per_second=site.link_bytes_per_second,
            start_seconds=site.preflight.timeout_seconds,
        )
        for nic in range(nics)
    ]
    store = host_store(allocation.port) if host == 0 else None
    with ThreadPoolExecutor(nics) as pool:
        found = tuple(rate for rates in pool.map(_measure_nic, plans) for rate in rates)
    _write(allocation, HostRates(tested=tested, rates=found))
    if store is not None:
        wait_for_all(store, nics * len(tested), _ROUND_SECONDS)


def _write(allocation: Allocation, rates: HostRates) -> None:
    with replacing(rates_path(allocation.folder, allocation.host)) as text:
        json.dump(asdict(rates), text)


def _tested(folder: Path, host: str) -> tuple[str, ...]:
    """Return the hosts that take part: the chosen ones, or all good ones if there are so many tasks.

    Raises:
        ConfigError: this host is not among them.
    """
    tasks = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 0)
    lists = [(folder / name).read_text().split() for name in (CHOSEN_FILE, GOOD_FILE)]
    found = next((names for names in lists if len(names) == tasks and host in names), None)
    if found is None:
        raise ConfigError(
            f"{tasks} tasks measure links, {host} among them; {folder} names {len(lists[0])} chosen "
            f"and {len(lists[1])} good hosts: expected one task on each of either"
        )
    return tuple(found)


def _measure_nic(plan: LinkPlan) -> list[Rate]:
    """Return the rates of all rounds, whatever becomes of the processes that measure them."""
    peers: list[str | None] = []
    for pairs in rounds(len(plan.tested), plan.most_rounds):
        mine = next((pair for pair in pairs if plan.host in pair), None)
        peers.append(None if mine is None else plan.tested[mine[1 - mine.index(plan.host)]])
    found: dict[str, Rate] = {}
    first = 0
    while first <= len(peers):
        error = ""
        for line in _lines(replace(plan, first_round=first)):
            if isinstance(line, Rate):
                found[line.peer] = line
            else:
                error = line
        left = [
            number for number in range(first, len(peers)) if peers[number] not in (None, *found)
        ]
        if not left:
            found.setdefault(ALL, Rate(peer=ALL, nic=plan.nic, bytes_per_second=0.0, error=error))
            break
        lost = str(peers[left[0]])
        found[lost] = Rate(peer=lost, nic=plan.nic, bytes_per_second=0.0, error=error)
        first = left[0] + 1
    return list(found.values())


def _lines(plan: LinkPlan) -> Iterator[Rate | str]:
    """Yield each rate that a process prints and, where it does not end well, why."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.preflight.link_rank", json.dumps(asdict(plan))],
        stdout=subprocess.PIPE,
        text=True,
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    seconds = plan.start_seconds + _ROUND_SECONDS
    try:
        while line := lines.get(timeout=seconds):
            yield Rate(**json.loads(line))
            seconds = _ROUND_SECONDS
        if code := process.wait(_ROUND_SECONDS):
            yield f"the measuring process ended with {code}"
    except (queue.Empty, subprocess.TimeoutExpired):
        yield f"no end after {seconds:.0f} s"
    finally:
        process.kill()
