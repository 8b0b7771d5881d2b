"""One NIC's part in the measurement of links: torch.distributed in a process of its own.

Started by `launch.preflight.bandwidth`, which also calls `host_store`. Prints a line of JSON for each
round. Consumes what its peer of the round sends; waits for it in torch's collectives, each with a
time limit. Meets one peer a round, by a process group that only the two are in, then all others.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from launch.preflight.links import ALL, Rate, rounds

_WAIT_SECONDS = 30.0  # for a peer, and for one exchange
_MEASURE_SECONDS = 0.25  # that the exchanges take at the expected rate
_CHUNKS, _MOST_CHUNK_BYTES = 8, 256 << 20
_IN_FLIGHT = 4  # chunks of a pair, each way
_DONE_KEY = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """What one NIC's process has to do."""

    tested: tuple[str, ...]  # all hosts
    host: int  # this one's index in them
    nic: int
    num_nics: int
    device: int  # the GPU beside the NIC; -1: gloo on the CPU
    address: str  # of the store
    port: int
    most_rounds: int
    first_round: int  # not 0 where an earlier process ended in a round
    bytes_per_second: float  # expected
    start_seconds: float  # in which all processes must have started


def host_store(port: int) -> dist.TCPStore:
    """Return the store at which all meet; it lives as long as this object."""
    return dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)


def wait_for_all(store: dist.TCPStore, num_processes: int, seconds: float) -> None:
    """Return when so many processes have ended their measurement, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while store.add(_DONE_KEY, 0) < num_processes and time.monotonic() < deadline:
        time.sleep(0.05)


class _Links:
    """The exchanges of one process."""

    def __init__(self, plan: LinkPlan):
        self._plan = plan
        self._device = torch.device("cpu" if plan.device < 0 else f"cuda:{plan.device}")
        if plan.device >= 0:
            torch.cuda.set_device(self._device)
        self._store = dist.TCPStore(
            plan.address,
            plan.port,
            is_master=False,
            timeout=timedelta(seconds=plan.start_seconds),
        )
        chunk = plan.bytes_per_second * _MEASURE_SECONDS / _CHUNKS
        self._elements = max(1, int(min(chunk, _MOST_CHUNK_BYTES)) // 4)
        self._repeats = max(2, round(chunk * _CHUNKS / (self._elements * 4 * _IN_FLIGHT)))

    def run(self) -> Iterator[Rate]:
        """Yield the rate of each round from the plan's first one on, then that among all."""
        plan = self._plan
        self._gather()
        for number, pairs in enumerate(rounds(len(plan.tested), plan.most_rounds)):
            mine = next((pair for pair in pairs if plan.host in pair), None)
            if number >= plan.first_round and mine is not None:
                yield self._meet(number, mine)
        yield self._reduce()
        self._store.add(_DONE_KEY, 1)

    def _gather(self) -> None:
        """Wait until all have started; who has not by then is missed in each of its rounds."""
        plan = self._plan
        self._store.set(f"here/{plan.host}/{plan.nic}", "")
        keys = [
            f"here/{host}/{nic}" for host in range(len(plan.tested)) for nic in range(plan.num_nics)
        ]
        try:
            self._store.wait(keys, timedelta(seconds=plan.start_seconds))
        except RuntimeError:
            return

    def _meet(self, number: int, pair: tuple[int, int]) -> Rate:
        plan = self._plan
        peer = pair[1 - pair.index(plan.host)]
        sent = torch.zeros(self._elements, device=self._device)
        received = torch.empty_like(sent)

        def exchange() -> None:
            other = 1 - pair.index(plan.host)
            operations = [
                dist.P2POp(dist.isend, sent, other),
                dist.P2POp(dist.irecv, received, other),
            ]
            # Some at a time: else a receiver's consent waits behind its own data, in full queues.
            for work in dist.batch_isend_irecv(operations * _IN_FLIGHT):
                work.wait()

        name = f"{plan.nic}/{number}/{pair[0]}"
        seconds, error = self._time(name, pair.index(plan.host), 2, exchange)
        rate = _IN_FLIGHT * sent.nbytes / seconds if seconds else 0.0
        return Rate(peer=plan.tested[peer], nic=plan.nic, bytes_per_second=rate, error=error)

    def _reduce(self) -> Rate:
        """Sum over all processes; a NIC's rate is what nccl-tests call the bus bandwidth, divided."""
        plan = self._plan
        tensor = torch.zeros(self._elements, device=self._device)
        size = len(plan.tested) * plan.num_nics
        rank = plan.host * plan.num_nics + plan.nic
        seconds, error = self._time("all", rank, size, lambda: dist.all_reduce(tensor))
        bus = 2 * (size - 1) / size * tensor.nbytes / seconds if seconds else 0.0
        return Rate(peer=ALL, nic=plan.nic, bytes_per_second=bus / plan.num_nics, error=error)

    def _time(
        self, name: str, rank: int, size: int, exchange: Callable[[], object]
    ) -> tuple[float, str]:
        """Return the seconds of one exchange in a group of its own; 0 and the reason if it fails."""
        try:
            with self._group(name, rank, size):
                exchange()  # connects
                self._synchronize()
                began = time.monotonic()
                for _ in range(self._repeats):
                    exchange()
                self._synchronize()
                return (time.monotonic() - began) / self._repeats, ""
        except RuntimeError as raised:  # also DistError and its kinds
            return 0.0, " ".join(str(raised).split())[:200] or type(raised).__name__

    @contextmanager
    def _group(self, name: str, rank: int, size: int) -> Iterator[None]:
        """Make a default group of ``size`` processes, which alone enter, and end it."""
        try:
            dist.init_process_group(
                "gloo" if self._device.type == "cpu" else "nccl",
                store=dist.PrefixStore(name, self._store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=_WAIT_SECONDS),
                device_id=None if self._device.type == "cpu" else self._device,
            )
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Measure what the plan on the command line says."""
    torch.set_num_threads(1)
    fields = json.loads(sys.argv[1])
    plan = LinkPlan(**fields | {"tested": tuple(fields["tested"])})
    for rate in _Links(plan).run():
        print(json.dumps(asdict(rate)), flush=True)


if __name__ == "__main__":
    main()
