"""Weight transfers side by side: ``python -m tools.bench_weight_sync [--json]``.

DDMA, Megatron-Core's resharding and gather + broadcast move the same weights between the same
processes, in turn, on loopback and on a miniature cluster (`tools.netlab`). On the latter the floor
is known: the bytes of the busiest NIC over its rate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.netlab import INTERFACE, Netlab
from tools.weight_cases import CASES, SCHEMES, Case, Job, floor_of, num_bytes

_PORT = 29_500  # in a miniature cluster nobody else listens
_CASE_SECONDS = 420.0
_RATE_MBIT = 200.0  # what twelve hosts can use at once on two cores


class BenchmarkError(RuntimeError):
    """A rank of the benchmark failed or did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says."""

    cases: tuple[str, ...]
    networks: tuple[str, ...]
    repeats: int = 3
    rate_mbit: float = _RATE_MBIT
    is_tiny: bool = False


# --- Processes ----------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _await(processes: Sequence[ForkServerProcess], jobs: Sequence[Job]) -> None:
    """Return when all have ended well.

    Raises:
        BenchmarkError: a rank failed, or time is up.
    """
    deadline = time.monotonic() + _CASE_SECONDS
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.05)
    bad = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    if bad:
        # A rank that only lost its peer fails too: one that raised something else knows why.
        tails = {rank: Path(jobs[rank].log).read_text()[-2000:] for rank in bad}
        known = [r for r in bad if "Error" in tails[r] and "onnection" not in tails[r][-300:]]
        rank = (known or bad)[0]
        raise BenchmarkError(f"ranks {bad} failed or did not end; rank {rank}:\n{tails[rank]}")


def _launch(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Run one case; return every rank's figures. No process is left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.weight_rank"])  # import the engines once for all ranks
    processes = [context.Process(target=_rank, args=(job,)) for job in jobs]
    try:
        for process in processes:
            process.start()
        _await(processes, jobs)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return json.loads(Path(jobs[0].result).read_text())


def _rank(job: Job) -> None:
    from tools.weight_rank import run_rank  # the driver itself needs no engine

    run_rank(job)


def run_case(case: Case, network: str, settings: Settings) -> dict[str, Any]:
    """Measure one case on "loopback" or "netlab"; return its row of figures.

    Raises:
        BenchmarkError: a rank failed.
        NetlabError: no miniature cluster can be made.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            case=case.name,
            is_tiny=settings.is_tiny,
            rank=0,
            address="127.0.0.1",
            port=_free_port(),
            interface="lo",
            host="",
            rate_mbit=0.0 if network == "loopback" else settings.rate_mbit,
            repeats=settings.repeats,
            result=f"{folder}/result.json",
            log="",
        )
        case = job.chosen()
        ranks = range(case.num_ranks)
        jobs = [replace(job, rank=rank, log=f"{folder}/{rank}.log") for rank in ranks]
        if network == "loopback":
            return _row(case, network, _launch(jobs), None)
        with Netlab(case.num_hosts, settings.rate_mbit) as lab:
            place = {"address": lab.addresses[0], "port": _PORT, "interface": INTERFACE}
            hosts = [lab.name_of(case.host_of(rank)) for rank in ranks]
            jobs = [replace(j, host=h, **place) for j, h in zip(jobs, hosts, strict=True)]
            return _row(case, network, _launch(jobs), settings.rate_mbit)


# --- Figures ------------------------------------------------------------------------------------


def _scheme_row(case: Case, ranks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return one scheme's figures over all ranks."""
    figures = [rank["figures"][name] for rank in ranks]
    runs = zip(*(f["seconds"] for f in figures), strict=True)
    sent = [figures[rank]["sent_bytes"] for rank in case.trainer_ranks]
    bounds = [f["extra_bytes_bound"] for f in figures if f["extra_bytes_bound"] is not None]
    predicted = [f["predicted_seconds"] for f in figures if f["predicted_seconds"] is not None]
    return {
        "seconds": median(max(run) for run in runs),
        "first_seconds": max(f["first_seconds"] for f in figures),
        "setup_seconds": max(f["setup_seconds"] for f in figures),
        "plan_seconds": max(f["plan_seconds"] for f in figures),
        "sent_bytes": sum(f["sent_bytes"] for f in figures),
        "imbalance": max(sent) / mean(sent) if sum(sent) else None,
        "extra_bytes": max(f["extra_bytes"] for f in figures),
        "extra_bytes_bound": max(bounds, default=None),
        "predicted_seconds": max(predicted, default=None),
    }


def _row(
    case: Case, network: str, ranks: list[dict[str, Any]], rate_mbit: float | None
) -> dict[str, Any]:
    """Return the figures of a case; medians over the repeats, each the slowest rank's."""
    schemes = {name: _scheme_row(case, ranks, name) for name in ranks[0]["figures"]}
    reasons: dict[str, str] = dict(ranks[0]["reasons"])
    total = sum(map(num_bytes, case.targets))
    floor = floor_of(case)
    speed = ranks[0]["raw_bytes_per_second"] if rate_mbit is None else rate_mbit * 1e6 / 8
    busiest = floor.forwarding_bytes if case.forwarding else floor.unicast_bytes
    floor_bytes = total if rate_mbit is None else busiest
    seconds = {name: schemes.get(name, {}).get("seconds") for name in SCHEMES}
    ddma = schemes.get("ddma_collective", {})
    # On loopback what is predicted is the short way: sockets there are bound by the processors.
    predicted = (ddma if rate_mbit else schemes.get("ddma_ipc", {})).get("predicted_seconds")
    copied = total / ranks[0]["memcpy_bytes_per_second"]
    return {
        "name": case.name,
        "network": network,
        **{f"{name}_seconds": seconds[name] for name in SCHEMES},
        "floor_seconds": floor_bytes / speed,
        "floor_fraction": _ratio(floor_bytes / speed, seconds["ddma_collective"]),
        "memcpy_fraction": _ratio(copied, seconds["ddma_ipc"]),
        "extra_bytes": ddma.get("extra_bytes"),
        "extra_bytes_bound": ddma.get("extra_bytes_bound"),
        "predicted_seconds": predicted,
        "imbalance": ddma.get("imbalance"),
        "bytes": total,
        "floor_bytes": floor_bytes,
        "unicast_floor_seconds": floor.unicast_bytes / speed if rate_mbit else None,
        "rate_mbit": rate_mbit,
        "raw_bytes_per_second": ranks[0]["raw_bytes_per_second"],
        "memcpy_bytes_per_second": ranks[0]["memcpy_bytes_per_second"],
        "machine_idle_fraction": mean(rank["idle_fraction"] for rank in ranks),
        "schemes": schemes,
        "reasons": reasons,
    }


def _ratio(best: float, seconds: float | None) -> float | None:
    return None if not seconds else best / seconds


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Weight transfer, seconds (median)")
    columns = ["case", "network", "MB", *SCHEMES, "predicted", "floor", "of floor", "extra MB"]
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "network") else "right")
    for row in rows:
        times = [_number(row[f"{name}_seconds"]) for name in SCHEMES]
        table.add_row(
            row["name"],
            row["network"],
            _number(row["bytes"] / 1e6),
            *times,
            _number(row["predicted_seconds"]),
            _number(row["floor_seconds"]),
            _number(row["floor_fraction"]),
            _number((row["extra_bytes"] or 0) / 1e6),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# --- Command line -------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> tuple[Settings, bool]:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_weight_sync", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--network", choices=("loopback", "netlab", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate-mbit", type=float, default=_RATE_MBIT, help="of a NIC")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to try things")
    said = parser.parse_args(argv)
    networks = ("loopback", "netlab") if said.network == "both" else (said.network,)
    settings = Settings(
        cases=tuple(said.cases),
        networks=networks,
        repeats=said.repeats,
        rate_mbit=said.rate_mbit,
        is_tiny=said.tiny,
    )
    return settings, said.json


def main(argv: Sequence[str] | None = None) -> None:
    settings, as_json = _parse(argv)
    notes: list[str] = []
    reason = Netlab.available() if "netlab" in settings.networks else ""
    if reason and settings.networks == ("netlab",):
        sys.exit(reason)
    if reason:
        notes.append(f"loopback only, where the balance of load cannot be seen: {reason}")
        settings = replace(settings, networks=("loopback",))
    rows = [
        run_case(CASES[name], network, settings)
        for network in settings.networks
        for name in settings.cases
        if network == "netlab" or CASES[name].ranks_per_host == 1  # loopback is one host anyway
    ]
    if as_json:
        print(json.dumps({"cases": rows, "notes": notes}, indent=1))
        return
    console = Console()
    console.print(_table(rows))
    for row in rows:
        for what, text in row["reasons"].items():
            console.print(f"{row['name']} on {row['network']}: {what}: {text}")
    for note in notes:
        console.print(note)


if __name__ == "__main__":
    main()
