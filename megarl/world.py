"""The two worlds of each rank, and every wait on a peer.

* the *executor world* is torch's default process group: all ranks of the trainer, the ranks of one
  replica of the generator. Megatron and vLLM run in it unpatched; a rank of both has two of them
  and is `inside` one at a time;
* the *global world* holds all ranks; it is a second group made from the same store under another
  prefix. Channels and DDMA use it and sub-groups of it.

Called by `megarl.train` (join, leave), channels and DDMA (groups, `wait`). The store also carries
what each rank is doing (`megarl.progress`): whoever ends the job can say who waited for whom.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import ChannelError, ChannelTimeout, ConfigError, DataError
from megarl.progress import (
    OBSERVER_KEY,
    STOP_KEY,
    Failure,
    Heartbeat,
    Status,
    write_account,
    write_failure,
)
from megarl.topology import TRAINER, ExecutorPlace, Topology

_ARRIVED_KEY, _LEFT_KEY = "arrived", "left"
_POLL_SECONDS = 0.05  # how often a waiting rank looks whether its time is over or a signal came
_LEAVE_SECONDS = 10.0  # that the store's host gives its peers, whose last beats come yet
_STORE_TIMEOUT = timedelta(seconds=120)  # connecting to the store, while peers still import


Wait = Callable[[dist.Work, str], None]


def _is_closed(error: BaseException) -> bool:
    """Whether a process group says that a peer is gone, in gloo's or NCCL's words."""
    return "onnection closed" in str(error) or "onnection reset" in str(error)


def _is_expired(error: BaseException) -> bool:
    """Whether a collective inside an executor's world, in gloo's words, gave up on a peer."""
    return "Timed out" in str(error)


def _reason(error: BaseException) -> str:
    """Return why a wait failed, without gloo's source path but with the label before it."""
    text = str(error)
    label = text.partition("[/")[0]
    if _is_closed(error):
        return f"{label}a peer closed the connection"
    return f"{label}timed out" if _is_expired(error) else text


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
class Rendezvous:
    """Where and as whom a rank joins."""

    rank: int
    host: str
    port: int
    is_store_host: bool  # this process hosts the store (else the launcher does)
    timeout_seconds: float


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
        self.places = topology.places_of(at.rank)
        self.place: ExecutorPlace = self.places[0]
        self.label = topology.label(at.rank)
        self._timeout = timedelta(seconds=at.timeout_seconds)
        self._is_store_host = at.is_store_host
        self._step = -1
        self._wait = timed_wait(at.timeout_seconds)
        self.store = dist.TCPStore(
            at.host, at.port, is_master=at.is_store_host, timeout=_STORE_TIMEOUT
        )
        self._last_what = ""  # for a failure's report: leaving a span on an error clears the status
        self._say("starting", waiting=False)
        beats = dist.TCPStore(at.host, at.port, is_master=False, timeout=_STORE_TIMEOUT)
        self._heartbeat = Heartbeat(beats, self.rank, lambda: self._status)
        self._heartbeat.start()
        self.run_id = f"{at.port}"  # unique on a host while the run lasts
        self.store.set(f"host/{self.rank}", _host_name())
        with self.waiting("joining the worlds"):
            self._defaults = {place.name: self._executor_group(place) for place in self.places}
            self._enter(self.place)
            self.control: Group = self._gloo("global", tuple(range(topology.size)))

    def _executor_group(self, place: ExecutorPlace) -> dist.ProcessGroup | None:
        """Make one default group; torch refuses a second one beside it, so it is put away first."""
        ranks = place.world_of(self.rank)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.group.WORLD = None
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"executor/{place.name}/{ranks[0]}", self.store),
            rank=ranks.index(self.rank),
            world_size=len(ranks),
            timeout=self._timeout,
        )
        return dist.group.WORLD

    def _enter(self, place: ExecutorPlace) -> None:
        """Set torch's default group, and the environment that engines read their rank from."""
        ranks = place.world_of(self.rank)
        local = str(ranks.index(self.rank))
        dist.group.WORLD = self._defaults[place.name]
        os.environ.update(RANK=local, WORLD_SIZE=str(len(ranks)))
        if not torch.cuda.is_available():
            os.environ["LOCAL_RANK"] = local
        self._inside = place

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Be in the world of executor ``name``, one of this rank's: its engine's calls belong here."""
        before = self._inside
        self._enter(self.topology.place(name))
        try:
            yield
        finally:
            self._enter(before)

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
        self._status = replace(self._status, step=step, since=time.time())

    def set_status(self, what: str) -> None:
        """Say what this rank is doing from now on; to say it again is progress too."""
        if what or not self._status.waiting:  # else an error leaves a span: keep what it waited for
            self._say(what, waiting=False)

    def _say(self, what: str, *, waiting: bool) -> None:
        self._last_what = what or self._last_what
        self._status = Status(
            label=self.label, step=self._step, what=what, since=time.time(), waiting=waiting
        )

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """Say that this rank waits for a peer: whoever finds the job stuck looks elsewhere first."""
        before = self._status
        self._say(label, waiting=True)
        yield
        self._status = replace(before, since=time.time())

    def stop_requested(self) -> bool:
        """Whether someone asked this run to save and end."""
        return self.store.check([STOP_KEY])

    def request_stop(self) -> None:
        self.store.set(STOP_KEY, "1")

    def stop_on(self, *numbers: signal.Signals) -> None:
        """Take the first of these signals as the wish to save and end; a second one ends at once."""

        def on_signal(number: int, frame: object) -> None:
            for each in numbers:
                signal.signal(each, signal.SIG_DFL)
            self.request_stop()

        for number in numbers:
            signal.signal(number, on_signal)

    def arrive(self, tick: int) -> None:
        """Say that this rank stands at the head of ``tick``; the trainer's first rank is heard."""
        if self.rank == self.topology.place(TRAINER).heads[0]:
            self.store.set(f"{_ARRIVED_KEY}/{tick}", "1")

    def has_arrived(self, tick: int) -> bool:
        """Whether the trainer stands at the head of ``tick``: a look that waits for nobody."""
        return self.store.check([f"{_ARRIVED_KEY}/{tick}"])

    def report_failure(self, error: BaseException, folder: Path | None = None) -> None:
        """Leave word of this rank's end for whoever watches the job.

        Where no launcher of ours does and this rank gives up on a peer, it writes what all ranks
        were doing to ``failure.<label>.txt`` in ``folder``.
        """
        by_peer = (
            isinstance(error, ChannelError | ChannelTimeout)
            or self._status.waiting
            or _is_closed(error)
            or _is_expired(error)
        )
        reason = _reason(error)
        message = f"{type(error).__name__}: {reason}"
        if not reason.startswith(
            f"rank {self.rank} "
        ):  # only `wait` says itself who was doing what
            where = f"rank {self.rank} ({self.label}), tick {self._step}"
            message = f"{where}: {self._last_what}: {message}"
        self._heartbeat.publish()
        failure = Failure(
            time=time.time(),
            message=message,
            by_peer=by_peer,
            by_user=isinstance(error, ConfigError | DataError),
        )
        write_failure(self.store, self.rank, failure)
        if by_peer and folder is not None and not self.store.check([OBSERVER_KEY]):
            labels = {rank: self.topology.label(rank) for rank in range(self.topology.size)}
            write_account(folder / f"failure.{self.label}.txt", self.store, labels, message)

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
        with self.waiting(label):
            self._wait(work, f"rank {self.rank} ({self.label}), tick {self._step}: {label}")

    def leave(self) -> None:
        """Leave both worlds, where all others do; the store's host is the last to go."""
        self._heartbeat.stop()
        left = self.store.add(_LEFT_KEY, 1)
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._is_store_host and left < self.topology.size and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            left = self.store.add(_LEFT_KEY, 0)
        if dist.is_initialized():
            dist.destroy_process_group()
