"""The two worlds of each rank, and every wait on a peer.

* the *executor world* is torch's default process group: all ranks of the trainer, the ranks of one
  replica of the generator. Megatron and vLLM run in it unpatched;
* the *global world* holds all ranks; it is a second group made from the same store under another
  prefix. Channels and DDMA use it and sub-groups of it.

Called by `megarl.train` (join, leave), channels and DDMA (groups, `wait`). The store also carries
what each rank is doing, so that whoever ends the job can say who waited for whom.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.errors import ChannelError, ChannelTimeout
from megarl.topology import ExecutorPlace, Topology

_POLL_SECONDS = 0.25  # how often a waiting rank looks whether its time is over or a signal came
STOP_KEY, FAILURE_KEY = "stop", "failure"
_STORE_TIMEOUT = timedelta(seconds=120)  # connecting to the store, while peers still import


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a rank is doing, as it last wrote into the store."""

    label: str
    step: int
    what: str
    since: float  # seconds since the epoch

    def describe(self, now: float) -> str:
        what = self.what or "between two spans"
        return f"{self.label}, tick {self.step}: {what} for {now - self.since:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended, as it wrote into the store under ``FAILURE_KEY/rank``."""

    time: float
    message: str
    by_peer: bool  # it only noticed that a peer was gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where and as whom a rank joins."""

    rank: int
    host: str
    port: int
    is_store_host: bool  # this process hosts the store (else the launcher does)
    timeout_seconds: float


def _is_closed(error: BaseException) -> bool:
    """Whether a process group says that a peer is gone, in gloo's or NCCL's words."""
    return "onnection closed" in str(error) or "onnection reset" in str(error)


def read_status(store: dist.Store, rank: int) -> Status | None:
    """Return what ``rank`` last said of itself; None where it has not joined yet."""
    key = f"status/{rank}"
    if not store.check([key]):
        return None
    return Status(**json.loads(store.get(key)))


class World:
    """One rank's membership in both worlds, from `join` to `leave`."""

    def __init__(self, topology: Topology, at: Rendezvous):
        self.topology = topology
        self.rank = at.rank
        self.timeout_seconds = at.timeout_seconds
        self.place: ExecutorPlace = topology.place_of(at.rank)
        self.label = topology.label(at.rank)
        self._timeout = timedelta(seconds=at.timeout_seconds)
        self._step = -1
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="wait")
        self.store = dist.TCPStore(
            at.host, at.port, is_master=at.is_store_host, timeout=_STORE_TIMEOUT
        )
        self.set_status("joining the worlds")
        self.run_id = f"{at.port}"  # unique on a host while the run lasts
        self._join_executor_world()
        self.control: dist.ProcessGroup = self._gloo("global", tuple(range(topology.size)))

    def _join_executor_world(self) -> None:
        """Make the default group; sets the environment that external engines read their rank from."""
        ranks = self.place.world_of(self.rank)
        local = ranks.index(self.rank)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"executor/{ranks[0]}", self.store),
            rank=local,
            world_size=len(ranks),
            timeout=self._timeout,
        )
        os.environ.update(RANK=str(local), WORLD_SIZE=str(len(ranks)))
        if not torch.cuda.is_available():
            os.environ["LOCAL_RANK"] = str(local)

    def _gloo(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        store = dist.PrefixStore(f"group/{name}", self.store)
        return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), self._timeout)

    def subgroup(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return a gloo group of ``ranks`` in that order; None for one rank or a non-member.

        All members enter, in the same order of names.
        """
        if self.rank not in ranks or len(ranks) == 1:
            return None
        return self._gloo(name, ranks)

    def device_group(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return a group for device tensors: NCCL on GPUs, gloo on CPUs; all ``ranks`` enter."""
        if not torch.cuda.is_available():
            return self._gloo(name, ranks)
        store = dist.PrefixStore(f"group/{name}", self.store)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, ranks.index(self.rank), len(ranks), options)

    def describe(self, rank: int) -> str:
        return f"rank {rank} ({self.topology.label(rank)})"

    def set_step(self, step: int) -> None:
        self._step = step

    def set_status(self, what: str) -> None:
        """Say what this rank is doing from now on."""
        status = Status(label=self.label, step=self._step, what=what, since=time.time())
        self.store.set(f"status/{self.rank}", json.dumps(asdict(status)))

    def stop_requested(self) -> bool:
        """Whether someone asked this run to save and end."""
        return self.store.check([STOP_KEY])

    def request_stop(self) -> None:
        self.store.set(STOP_KEY, "1")

    def report_failure(self, error: BaseException) -> None:
        """Leave word of this rank's end for whoever watches the job."""
        gone = isinstance(error, ChannelError | ChannelTimeout) or _is_closed(error)
        failure = Failure(
            time=time.time(), message=f"{type(error).__name__}: {error}", by_peer=gone
        )
        self.store.set(f"{FAILURE_KEY}/{self.rank}", json.dumps(asdict(failure)))

    def barrier(self, label: str) -> None:
        """Wait until all ranks of the global world are here."""
        self.wait(self.control.barrier(), f"waiting for all ranks at {label!r}")

    def wait(self, work: dist.Work, label: str) -> None:
        """Wait for ``work`` in a way that signals interrupt and that ends.

        Raises:
            ChannelTimeout: not done within the world's timeout.
            ChannelError: the peer closed the connection.
        """
        began = time.monotonic()
        self.set_status(label)
        future = self._waiter.submit(work.wait, self._timeout)
        while True:
            try:
                future.result(timeout=_POLL_SECONDS)
                return
            except FutureTimeout as error:
                if future.done() or time.monotonic() - began > self.timeout_seconds:
                    raise ChannelTimeout(self._report(label, began)) from error
            except RuntimeError as error:
                if time.monotonic() - began >= self.timeout_seconds:
                    raise ChannelTimeout(self._report(label, began)) from error
                ending = "a peer closed the connection" if _is_closed(error) else str(error)
                raise ChannelError(f"{self._report(label, began)}: {ending}") from error

    def _report(self, label: str, began: float) -> str:
        seconds = time.monotonic() - began
        return f"rank {self.rank} ({self.label}), tick {self._step}: {label} for {seconds:.1f} s"

    def leave(self) -> None:
        """Leave both worlds; may be called after a failure."""
        self._waiter.shutdown(wait=False, cancel_futures=True)
        if dist.is_initialized():
            dist.destroy_process_group()
