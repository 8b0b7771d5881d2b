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
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import ChannelError, ChannelTimeout
from megarl.topology import ExecutorPlace, Topology

_POLL_SECONDS = 0.05  # how often a waiting rank looks whether its time is over or a signal came
STOP_KEY, FAILURE_KEY = "stop", "failure"
_STORE_TIMEOUT = timedelta(seconds=120)  # connecting to the store, while peers still import


Wait = Callable[[dist.Work, str], None]


def _is_closed(error: BaseException) -> bool:
    """Whether a process group says that a peer is gone, in gloo's or NCCL's words."""
    return "onnection closed" in str(error) or "onnection reset" in str(error)


def _reason(error: BaseException) -> str:
    """Return why a wait failed, without gloo's source path but with the label before it."""
    text = str(error)
    label = text.partition("[/")[0]
    if _is_closed(error):
        return f"{label}a peer closed the connection"
    return f"{label}timed out" if "Timed out" in text else text


class Group(Protocol):
    """What megarl needs of a process group: `torch.distributed.ProcessGroup` or a backend."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def barrier(self) -> dist.Work: ...
    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> dist.Work: ...
    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work: ...


def timed_wait(timeout_seconds: float) -> Wait:
    """Return a wait that ends after ``timeout_seconds`` and that signals can interrupt.

    A gloo send or receive completes only inside `Work.wait`, and a wait that expires closes the
    connection; so a thread waits once, for the whole time, while the caller polls. An NCCL wait
    only orders streams; there ``is_completed`` tells when the bytes have arrived.

    Raises (when called):
        ChannelTimeout: the work was not done in time; names the label.
        ChannelError: the peer closed the connection.
    """

    def wait(work: dist.Work, label: str) -> None:
        failure: list[RuntimeError] = []

        def block() -> None:
            try:
                work.wait(timedelta(seconds=timeout_seconds))
            except RuntimeError as error:
                failure.append(error)

        began = time.monotonic()
        thread = threading.Thread(target=block, name=f"wait: {label}", daemon=True)
        thread.start()
        thread.join(_POLL_SECONDS)
        while thread.is_alive() or not (failure or work.is_completed()):
            waited = time.monotonic() - began
            if waited > timeout_seconds + 2 * _POLL_SECONDS:
                raise ChannelTimeout(f"{label} for {waited:.1f} s: not done")
            if thread.is_alive():
                thread.join(_POLL_SECONDS)
            else:
                time.sleep(_POLL_SECONDS / 100)
        if failure:
            waited = time.monotonic() - began
            kind = ChannelTimeout if waited >= timeout_seconds else ChannelError
            raise kind(f"{label} for {waited:.1f} s: {_reason(failure[0])}") from failure[0]

    return wait


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


def read_status(store: dist.Store, rank: int) -> Status | None:
    """Return what ``rank`` last said of itself; None where it has not joined yet."""
    key = f"status/{rank}"
    if not store.check([key]):
        return None
    return Status(**json.loads(store.get(key)))


def _host_name() -> str:
    """Return a name that those have in common who see one another's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.is_file() else ""]
    if sys.platform == "linux":
        parts.append(os.readlink("/proc/self/ns/pid"))  # a machine, or a container on it
    return " ".join(parts)


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
        self._wait = timed_wait(at.timeout_seconds)
        self.store = dist.TCPStore(
            at.host, at.port, is_master=at.is_store_host, timeout=_STORE_TIMEOUT
        )
        self._last_what = ""  # for a failure's report: leaving a span on an error clears the status
        self.set_status("joining the worlds")
        self.run_id = f"{at.port}"  # unique on a host while the run lasts
        self.store.set(f"host/{self.rank}", _host_name())
        self._join_executor_world()
        self.control: Group = self._gloo("global", tuple(range(topology.size)))

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

    def _gloo(self, name: str, ranks: tuple[int, ...]) -> Group:
        store = dist.PrefixStore(f"group/{name}", self.store)
        group = dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), self._timeout)
        return cast(Group, group)

    def subgroup(self, name: str, ranks: tuple[int, ...]) -> Group | None:
        """Return a gloo group of ``ranks`` in that order; None for one rank or a non-member.

        All members enter, in the same order of names.
        """
        if self.rank not in ranks or len(ranks) == 1:
            return None
        return self._gloo(name, ranks)

    def device_group(self, name: str, ranks: tuple[int, ...]) -> Group:
        """Return a group for device tensors: NCCL on GPUs, gloo on CPUs; all ``ranks`` enter."""
        if not torch.cuda.is_available():
            return self._gloo(name, ranks)
        store = dist.PrefixStore(f"group/{name}", self.store)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return cast(
            Group, dist.ProcessGroupNCCL(store, ranks.index(self.rank), len(ranks), options)
        )

    def describe(self, rank: int) -> str:
        return f"rank {rank} ({self.topology.label(rank)})"

    def set_step(self, step: int) -> None:
        self._step = step

    def set_status(self, what: str) -> None:
        """Say what this rank is doing from now on."""
        self._last_what = what or self._last_what
        status = Status(label=self.label, step=self._step, what=what, since=time.time())
        self.store.set(f"status/{self.rank}", json.dumps(asdict(status)))

    def stop_requested(self) -> bool:
        """Whether someone asked this run to save and end."""
        return self.store.check([STOP_KEY])

    def request_stop(self) -> None:
        self.store.set(STOP_KEY, "1")

    def report_failure(self, error: BaseException) -> None:
        """Leave word of this rank's end for whoever watches the job."""
        waited = isinstance(error, ChannelError | ChannelTimeout)
        reason = _reason(error)
        message = f"{type(error).__name__}: {reason}"
        if not reason.startswith(
            f"rank {self.rank} "
        ):  # only `wait` says itself who was doing what
            where = f"rank {self.rank} ({self.label}), tick {self._step}"
            message = f"{where}: {self._last_what}: {message}"
        failure = Failure(time=time.time(), message=message, by_peer=waited or _is_closed(error))
        self.store.set(f"{FAILURE_KEY}/{self.rank}", json.dumps(asdict(failure)))

    def hosts(self) -> tuple[int, ...]:
        """Return a number of the host of each rank; all said theirs before they joined."""
        names = [self.store.get(f"host/{rank}") for rank in range(self.topology.size)]
        known = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return tuple(known[name] for name in names)

    def barrier(self, label: str) -> None:
        """Wait until all ranks of the global world are here."""
        self.wait(self.control.barrier(), f"waiting for all ranks at {label!r}")

    def wait(self, work: dist.Work, label: str) -> None:
        """Wait for ``work`` in a way that signals interrupt and that ends.

        Raises:
            ChannelTimeout: not done within the world's timeout.
            ChannelError: the peer closed the connection.
        """
        self.set_status(label)
        self._wait(work, f"rank {self.rank} ({self.label}), tick {self._step}: {label}")

    def leave(self) -> None:
        """Leave both worlds; may be called after a failure."""
        if dist.is_initialized():
            dist.destroy_process_group()
