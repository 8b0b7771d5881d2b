"""One rank of the weight-transfer benchmark.

Forked by `tools.bench_weight_sync` for every rank. All schemes run in the same processes, in turn;
each must bring the right weights before it is timed. Rank 0 writes the figures of all ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tools.known_weights import KnownWeights, empty_params
from tools.netlab import enter_host
from tools.weight_cases import SCHEMES, Case, Job, Unavailable
from tools.weight_peers import GatherBroadcast, GatherChain, MegatronReshard
from tools.weight_schemes import Scheme, Tensors, ddma_scheme

_TIMEOUT = timedelta(seconds=120)
_RAW_BYTES = 32 << 20


# --- Memory and processor time ------------------------------------------------------------------


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _resident_bytes() -> int:
    """Return what this process holds after giving freed memory back; restart the peak's count."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _machine_seconds() -> tuple[float, float]:
    """Return the idle and all processor seconds of this machine until now."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
    return ticks[3] + ticks[4], sum(ticks)


# --- What the transport and the memory can do ---------------------------------------------------


def _memcpy_bytes_per_second() -> float:
    source = torch.ones(_RAW_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return _RAW_BYTES / best


def _raw_bytes_per_second(rank: int, peer: int) -> float:
    """Return one stream's goodput from rank 0 to ``peer``, both having the machine to themselves."""
    payload = torch.zeros(_RAW_BYTES, dtype=torch.uint8)
    seconds = 0.0
    for part in (payload[: 1 << 20], payload):
        dist.barrier()
        began = time.perf_counter()
        if rank == 0:
            dist.send(part, peer)
        elif rank == peer:
            dist.recv(part, 0)
        dist.barrier()
        seconds = time.perf_counter() - began
    return _RAW_BYTES / seconds


# --- Schemes ------------------------------------------------------------------------------------


def _makers(case: Case, job: Job, params: Tensors) -> dict[str, Callable[[], Scheme]]:
    """Return how to make each scheme; ``params`` are this rank's in either world."""
    rank = job.rank
    host = case.host_of(rank)
    others = (r for r in range(case.num_ranks) if not job.host or case.host_of(r) == host)
    near = frozenset(others) - {rank}
    source = params if rank in case.trainer_ranks else {}
    makers: dict[str, Callable[[], Scheme]] = {
        "ddma_collective": lambda: ddma_scheme(case, rank, "collective", params, near),
        "ddma_ipc": lambda: ddma_scheme(case, rank, "ipc", params, near),
        "mcore": lambda: MegatronReshard(case, rank, source),
        "gather_broadcast": lambda: GatherBroadcast(case, rank, source, params),
        "gather_chain": lambda: GatherChain(case, rank, source, params),
    }
    assert tuple(makers) == SCHEMES
    return makers


@dataclass(slots=True)
class _Figures:
    """Of one scheme on one rank."""

    setup_seconds: float = 0.0
    first_seconds: float = 0.0
    seconds: tuple[float, ...] = ()
    extra_bytes: int = 0
    plan_seconds: float = 0.0
    sent_bytes: int = 0
    extra_bytes_bound: int | None = None
    predicted_seconds: float | None = None


def _first_run(scheme: Scheme, known: KnownWeights) -> _Figures:
    """Set a scheme up, run it once and check what it brought.

    ``extra_bytes`` is how far the resident memory of the process rose meanwhile: whatever plans,
    staging tensors and gloo's own buffers took, in use at once. Where the weights arrive is touched
    before. The first run, because no memory that is kept for later runs exists before it.
    """
    for param in scheme.params.values() if scheme.target else ():
        param.zero_()
    dist.barrier()
    before = _resident_bytes()
    began = time.perf_counter()
    scheme.setup()
    dist.barrier()
    figures = _Figures(setup_seconds=time.perf_counter() - began)
    figures.first_seconds = scheme.run()
    figures.extra_bytes = _status_bytes("VmHWM") - before
    figures.plan_seconds, figures.sent_bytes = scheme.plan_seconds, scheme.sent_bytes
    figures.extra_bytes_bound = scheme.extra_bytes_bound
    if scheme.target:
        wrong = known.differing(scheme.target, scheme.params)
        if wrong:
            raise RuntimeError(f"{type(scheme).__name__}: {len(wrong)} wrong, first {wrong[0]}")
    return figures


def _measure(job: Job) -> dict[str, object]:
    """Run all schemes of the job; return this rank's figures."""
    case, rank = job.chosen(), job.rank
    known = KnownWeights(case.spec)
    side = case.source if rank in case.trainer_ranks else case.target
    manifest = side.manifest(rank)
    params = empty_params(manifest)
    if rank in case.trainer_ranks:
        known.fill(manifest, params)
    figures: dict[str, _Figures] = {}
    reasons: dict[str, str] = {}
    schemes: dict[str, Scheme] = {}
    for name, make in _makers(case, job, params).items():
        try:
            schemes[name] = make()
        except Unavailable as error:
            reasons[name] = str(error)
            continue
        figures[name] = _first_run(schemes[name], known)
    idle, machine = _machine_seconds()
    raw = memcpy = 0.0
    for _ in range(job.repeats):
        raw = max(raw, _raw_bytes_per_second(rank, case.trainer.world_size))
        memcpy = max(memcpy, _memcpy_bytes_per_second() if rank == 0 else 0.0)
        for name, scheme in schemes.items():
            figures[name].seconds += (scheme.run(),)
    idle_later, machine_later = _machine_seconds()
    for name, scheme in schemes.items():
        if rank == 0:
            figures[name].predicted_seconds = scheme.predict(job.rate_mbit * 1e6 / 8, memcpy)
    return {
        "figures": {name: asdict(found) for name, found in figures.items()},
        "reasons": reasons,
        "raw_bytes_per_second": raw,
        "memcpy_bytes_per_second": memcpy,
        "idle_fraction": (idle_later - idle) / max(machine_later - machine, 1e-9),
    }


def run_rank(job: Job) -> None:
    """Take part in a job as the only thing this process does; its words go to the job's log."""
    with Path(job.log).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if job.host:
        enter_host(job.host)
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME=job.interface)
    case = job.chosen()
    is_first = job.rank == 0
    store = dist.TCPStore(job.address, job.port, is_master=is_first, timeout=_TIMEOUT)
    dist.init_process_group(
        "gloo", store=store, rank=job.rank, world_size=case.num_ranks, timeout=_TIMEOUT
    )
    mine = _measure(job)
    ranks: list[object] = [None] * case.num_ranks
    dist.all_gather_object(ranks, mine)
    if is_first:
        Path(job.result).write_text(json.dumps(ranks))
    dist.barrier()
    dist.destroy_process_group()
