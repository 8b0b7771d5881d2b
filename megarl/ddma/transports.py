"""How the operations of a plan move: the `Transport` contract and its two implementations.

`CollectiveTransport` moves them point to point over a process group of all ranks (NCCL or gloo);
`LoopbackTransport` moves them inside one process and is the specification. Called by
`megarl.ddma.engine` and `megarl.ddma.export`; ranks are those of the given group.

On the wire an operation is its region's elements in row-major order, in one dtype for all. Both ends
derive the same messages from the operations alone, so each end decides for itself whether it reads
or writes a parameter in place or goes through a staging buffer.
"""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work

from megarl.errors import ChannelTimeout
from megarl.world import Group, Wait
from megatron_bridge.operations import Operation

_TAG = 0xDD3A  # keeps our gloo messages apart from those of channels on the same group


class _Together(Work):
    """Several works waited for as one; the error of one that fails carries its own label."""

    def __init__(self, works: Sequence[tuple[Work, str]]):
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(minutes=10)) -> bool:
        deadline = time.monotonic() + timeout.total_seconds()
        for work, label in self._works:
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                work.wait(left)
            except RuntimeError as error:
                raise RuntimeError(f"{label}: {error}") from error
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work, _ in self._works)


class Transport(ABC):
    """Moves operations between ranks; one object on each rank.

    `register` once, then for each round `post` and, before the values are used, `wait`.
    """

    def __init__(self, rank: int, wire_dtype: torch.dtype):
        self.rank = rank
        self.wire_dtype = wire_dtype
        self._tensors: Mapping[str, Tensor] = {}

    def register(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's parameters by their names in the plan; they are used in place."""
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    @property
    def framing(self) -> str:
        """What both ends must agree on for their messages to match."""
        return str(self.wire_dtype)

    def _source(self, item: Operation) -> Tensor:
        return self._tensors[item.source_param][item.source_box.slices]

    def _target(self, item: Operation) -> Tensor:
        return self._tensors[item.target_param][item.target_box.slices]

    @abstractmethod
    def post(self, operations: Sequence[Operation]) -> None:
        """Start this rank's part of one round; every peer must post the same round."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all that was posted has left this rank or arrived in its parameters."""

    @abstractmethod
    def swap(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int], label: str
    ) -> dict[int, Tensor]:
        """Exchange small control vectors: int64 tensors out, by peer; lengths in, by peer."""

    @abstractmethod
    def close(self) -> None:
        """Forget the parameters and free staging memory."""


class LoopbackHub:
    """The mail of all ranks of one process; give it to the `LoopbackTransport` of each."""

    def __init__(self, timeout_seconds: float = 10.0):
        self.timeout_seconds = timeout_seconds
        self._mail: dict[tuple[str, int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)

    def put(self, kind: str, source: int, target: int, tensor: Tensor) -> None:
        self._mail[kind, source, target].put(tensor)

    def get(self, kind: str, source: int, target: int) -> Tensor:
        try:
            return self._mail[kind, source, target].get(timeout=self.timeout_seconds)
        except queue.Empty as error:
            raise ChannelTimeout(
                f"rank {target} waits for {kind} of rank {source} for {self.timeout_seconds:.1f} s"
            ) from error


class LoopbackTransport(Transport):
    """All ranks in one process: each operation is one copy of its region, nothing more."""

    def __init__(self, hub: LoopbackHub, rank: int, wire_dtype: torch.dtype):
        super().__init__(rank, wire_dtype)
        self._hub = hub
        self._expected: list[Operation] = []

    def post(self, operations: Sequence[Operation]) -> None:
        for item in operations:
            if item.source_rank == self.rank:
                region = self._source(item).detach().to(self.wire_dtype, copy=True)
                self._hub.put("weights", self.rank, item.target_rank, region)
            if item.target_rank == self.rank:
                self._expected.append(item)

    @torch.no_grad()
    def wait(self) -> None:
        for item in self._expected:
            self._target(item).copy_(self._hub.get("weights", item.source_rank, self.rank))
        self._expected.clear()

    def swap(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int], label: str
    ) -> dict[int, Tensor]:
        for peer, vector in outgoing.items():
            self._hub.put("control", self.rank, peer, vector.clone())
        return {peer: self._hub.get("control", peer, self.rank) for peer in incoming}

    def close(self) -> None:
        self._tensors = {}


@dataclass(slots=True)
class _Round:
    """What one posted round leaves to do: works to wait for and regions to unpack afterwards."""

    work: Work | None = None
    label: str = ""
    sent: list[tuple[int, Tensor]] = field(default_factory=list)  # alive until the work is done
    unpack: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # staged, destination


class CollectiveTransport(Transport):
    """Point-to-point messages over a process group whose ranks are those of the operations.

    Small regions for one peer travel in one message; a large one travels alone, in place where it is
    contiguous and already of the wire dtype. Staging memory is at most ``slots`` rounds of what
    `megatron_bridge.plan.schedule` lets one rank have in a round.
    """

    def __init__(
        self,
        group: Group,
        wire_dtype: torch.dtype,
        device: torch.device,
        *,
        wait: Wait,
        slots: int = 2,
        coalesce_bytes: int = 1 << 18,
    ):
        """On GPUs all ranks of the group construct it together; all give one ``coalesce_bytes``."""
        super().__init__(group.rank(), wire_dtype)
        self._group = group
        self._device = device
        self._wait = wait
        self._slots = slots
        self._coalesce_numel = max(1, coalesce_bytes // wire_dtype.itemsize)
        self._in_flight: deque[_Round] = deque()
        if device.type == "cuda":
            # NCCL makes the communicator of grouped sends at the first call, which all must enter.
            first = torch.zeros(1, device=device)
            wait(group.allreduce([first]), "the first collective of the weight transport")

    @property
    def framing(self) -> str:
        return f"{self.wire_dtype}, messages of {self._coalesce_numel} elements"

    @torch.no_grad()
    def post(self, operations: Sequence[Operation]) -> None:
        while len(self._in_flight) >= self._slots:
            self._finish(self._in_flight.popleft())
        current = _Round()
        receives: list[tuple[int, Tensor]] = []
        for (source, target), messages in self._messages(operations).items():
            if source == target:
                for item in (item for message in messages for item in message):
                    self._target(item).copy_(self._source(item).to(self.wire_dtype))
            elif source == self.rank:
                current.sent += [(target, self._pack(message)) for message in messages]
            elif target == self.rank:
                receives += [(source, self._place(message, current)) for message in messages]
        current.label = _label("weights", current.sent, receives)
        current.work = self._start(current.sent, receives, "weights")
        self._in_flight.append(current)

    def wait(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight.popleft())
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def swap(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int], label: str
    ) -> dict[int, Tensor]:
        arrived = {
            peer: torch.empty(length, dtype=torch.int64, device=self._device)
            for peer, length in sorted(incoming.items())
        }
        sends = [(peer, vector.to(self._device)) for peer, vector in sorted(outgoing.items())]
        receives = list(arrived.items())
        work = self._start(sends, receives, label)
        if work is not None:
            self._wait(work, _label(label, sends, receives))
        return {peer: vector.cpu() for peer, vector in arrived.items()}

    def close(self) -> None:
        self._in_flight.clear()
        self._tensors = {}

    def _messages(
        self, operations: Sequence[Operation]
    ) -> dict[tuple[int, int], list[list[Operation]]]:
        """Group a round's operations by pair: large ones alone, then all small ones in one."""
        pairs: dict[tuple[int, int], list[list[Operation]]] = {}
        small: dict[tuple[int, int], list[Operation]] = defaultdict(list)
        for item in operations:
            pair = (item.source_rank, item.target_rank)
            if self.rank not in pair:
                continue
            messages = pairs.setdefault(pair, [])
            if item.box.numel >= self._coalesce_numel:
                messages.append([item])
            else:
                small[pair].append(item)
        for pair, items in small.items():
            pairs[pair].append(items)
        return pairs

    def _is_direct(self, region: Tensor) -> bool:
        return region.is_contiguous() and region.dtype == self.wire_dtype

    def _pack(self, message: list[Operation]) -> Tensor:
        regions = [self._source(item) for item in message]
        if len(regions) == 1 and self._is_direct(regions[0]):
            return regions[0]
        # A region of one dtype is cast on its way into the buffer: no second copy.
        staged = self._staging(message)
        for region, part in zip(regions, _split(staged, message), strict=True):
            part.copy_(region)
        return staged

    def _place(self, message: list[Operation], current: _Round) -> Tensor:
        regions = [self._target(item) for item in message]
        if len(regions) == 1 and self._is_direct(regions[0]):
            return regions[0]
        staged = self._staging(message)
        current.unpack += zip(_split(staged, message), regions, strict=True)
        return staged

    def _staging(self, message: list[Operation]) -> Tensor:
        numel = sum(item.box.numel for item in message)
        return torch.empty(numel, dtype=self.wire_dtype, device=self._device)

    def _start(
        self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], what: str
    ) -> Work | None:
        """Post messages; NCCL needs one group call, without which crossing pairs deadlock."""
        if not sends and not receives:
            return None
        coalescing = self._device.type == "cuda"
        if coalescing:
            self._group._start_coalescing()  # pyright: ignore[reportAttributeAccessIssue]
        works = [
            (self._group.recv([tensor], peer, _TAG), f"{what} from rank {peer}")
            for peer, tensor in receives
        ]
        works += [
            (self._group.send([tensor], peer, _TAG), f"{what} to rank {peer}")
            for peer, tensor in sends
        ]
        if coalescing:
            return self._group._end_coalescing()  # pyright: ignore[reportAttributeAccessIssue]
        return _Together(works)

    @torch.no_grad()
    def _finish(self, current: _Round) -> None:
        if current.work is not None:
            self._wait(current.work, current.label)
        for staged, region in current.unpack:
            region.copy_(staged)


def _label(what: str, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> str:
    peers = sorted({peer for peer, _ in [*sends, *receives]})
    return f"{what} with rank{'s'[: len(peers) > 1]} {', '.join(map(str, peers))}"


def _split(staged: Tensor, message: list[Operation]) -> list[Tensor]:
    """View a flat buffer as the message's regions, one behind the other."""
    parts = staged.split([item.box.numel for item in message])
    return [part.view(item.box.shape) for part, item in zip(parts, message, strict=True)]
