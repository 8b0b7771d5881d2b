"""Messages point to point over a process group of all ranks: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work

from megarl.ddma.transports.base import Transport
from megarl.errors import ChannelError
from megarl.world import Group, Wait
from megatron_bridge.operations import Message

_TAG = 0xDD3A  # keeps our gloo messages apart from those of channels on the same group
_FAN_OUT = 32  # of the tree in which ranks vote
_WARM_UP = "connecting for weights"


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


@dataclass(slots=True)
class _Round:
    """Consecutive messages that are posted together, and what is left to do with them."""

    messages: list[Message] = field(default_factory=list)
    staged_bytes: int = 0
    supply: int = -1  # the round that brings what this one forwards
    work: Work | None = None
    label: str = ""
    buffers: list[Tensor] = field(default_factory=list)  # alive until the work is done
    staged: list[tuple[Message, Tensor]] = field(default_factory=list)  # to be unpacked


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How much a rank has in flight: ``slots`` rounds of at most these sizes."""

    slots: int = 2
    chunk_bytes: int = 72 << 20  # of a round; a larger message stands alone
    max_messages: int = 256  # of a round

    @property
    def limit_bytes(self) -> int:
        """Most memory that a transfer takes, where no single message exceeds a chunk."""
        return self.slots * self.chunk_bytes

    @property
    def staged_bytes(self) -> int:
        """What messages may fill of a chunk; the rest is for all else that a process grows by."""
        return self.chunk_bytes * 15 // 16


class CollectiveTransport(Transport):
    """Messages over a process group whose ranks are those of the plan.

    A message of one region travels in place where it is contiguous and of the wire's dtype, else
    through the staging memory of its round. No rank can wait for ever: see `Message`.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        wait: Wait,
        window: Window | None = None,
        control: Group | None = None,
    ):
        """On GPUs all ranks of the group construct it together.

        Args:
            control: a gloo group of the same ranks for handshake and votes; ``group`` where that is
                one.
        """
        super().__init__(group.rank())
        self._group, self._device, self._wait = group, device, wait
        self._control = control or group
        self.window = window or Window()
        self._rounds: list[_Round] = []
        self._in_flight: deque[int] = deque()
        self._slots: list[Tensor] = []  # staging memory, one for each slot
        self._order: Sequence[Message] = ()
        if device.type == "cuda":
            # NCCL makes the communicator of grouped sends at the first call, which all must enter.
            first = torch.zeros(1, device=device)
            wait(group.allreduce([first]), "the first collective of the weight transport")

    @property
    def staging_bytes(self) -> int:
        """Staging memory that this rank holds."""
        return sum(slot.numel() for slot in self._slots)

    def warm_up(self, peers: Sequence[int]) -> None:
        """Exchange one byte with each peer over the group, whose connections NCCL makes only then.

        A gloo group is connected from its start: where it is also the control group nothing is
        sent, since the handshake is its first message anyway.
        """
        if self._control is self._group:
            return
        sends, receives = (
            [(peer, torch.zeros(1, dtype=torch.uint8, device=self._device)) for peer in peers]
            for _ in range(2)
        )
        work = self._exchange(sends, receives, _WARM_UP)
        if work is not None:
            self._wait(work, _label(_WARM_UP, sends, receives))

    def begin(self) -> None:
        self.memory.begin()

    @torch.no_grad()
    def post(self, messages: Sequence[Message]) -> None:
        if messages is not self._order:
            self._plan_rounds(messages)
        for index, current in enumerate(self._rounds):
            while self._in_flight and (
                len(self._in_flight) >= self.window.slots or self._in_flight[0] <= current.supply
            ):
                self._finish()
            self._start(index, current)

    def _plan_rounds(self, messages: Sequence[Message]) -> None:
        """Cut the messages into rounds, which are the same in every transfer.

        Where this rank forwards, a round is a step of the plan's order: what a later step forwards
        has then arrived while the step between them is on its way.
        """
        forwards = any(message.hop and message.source_rank == self.rank for message in messages)
        rounds, window = [_Round()], self.window
        brought: dict[tuple[int, ...], int] = {}
        for message in messages:
            sending = message.source_rank == self.rank
            in_place = self._is_in_place(message, sending=sending)
            size = 0 if in_place else _padded(message.nbytes)
            current = rounds[-1]
            supply = brought[message.content] if sending and message.hop else -1
            full = len(current.messages) >= window.max_messages
            if current.messages and (
                full
                or (forwards and message.step != current.messages[-1].step)
                or (size and current.staged_bytes + size > window.staged_bytes)
                or supply == len(rounds) - 1
            ):
                current = _Round()
                rounds.append(current)
            current.messages.append(message)
            current.staged_bytes += size
            current.supply = max(current.supply, supply)
            if message.target_rank == self.rank:
                brought[message.content] = len(rounds) - 1
        size = max(item.staged_bytes for item in rounds)
        count = min(self.window.slots, len(rounds))
        self._slots = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count)
        ]
        self._rounds, self._order = rounds, messages

    def _is_in_place(self, message: Message, *, sending: bool) -> bool:
        """Whether the message needs no staging memory on this rank."""
        return (
            len(message.items) == 1 and self.memory.is_in_place(message.items[0], sending=sending)
        ) or message.source_rank == message.target_rank

    def _start(self, index: int, current: _Round) -> None:
        slot = self._slots[index % len(self._slots)]
        at = 0
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for message in current.messages:
            sending = message.source_rank == self.rank
            if sending and message.target_rank == self.rank:
                self._copy(message)
                continue
            if self._is_in_place(message, sending=sending):
                part = self._in_place(message, sending=sending)
            else:
                part = slot[at : at + message.nbytes]
                at += _padded(message.nbytes)
                if sending:
                    self.memory.pack(message, part)
                else:
                    current.staged.append((message, part))
            if sending:
                sends.append((message.target_rank, part))
            else:
                receives.append((message.source_rank, part))
        current.buffers = [part for _, part in [*sends, *receives]]
        current.label = _label("weights", sends, receives)
        current.work = self._exchange(sends, receives, "weights")
        self._in_flight.append(index)

    def _copy(self, message: Message) -> None:
        """Carry out a message from this rank to itself."""
        for item in message.items:
            self.memory.write(item, self.memory)
        self.memory.arrived(message)

    def _in_place(self, message: Message, *, sending: bool) -> Tensor:
        """Return what travels of a message that needs no staging memory."""
        (item,) = message.items
        region = self.memory.source(item) if sending else self.memory.target(item)
        return region.reshape(-1).view(torch.uint8)

    def _finish(self) -> None:
        current = self._rounds[self._in_flight.popleft()]
        if current.work is not None:
            self._wait(current.work, current.label)
        for message, part in current.staged:
            self.memory.unpack(message, part)
        for message in current.messages:
            if message.target_rank == self.rank != message.source_rank:
                self.memory.arrived(message)
        current.work = None
        current.buffers.clear()
        current.staged.clear()

    @torch.no_grad()
    def wait(self) -> None:
        while self._in_flight:
            self._finish()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def swap(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int], label: str
    ) -> dict[int, Tensor]:
        arrived = {
            peer: torch.empty(length, dtype=torch.int64)
            for peer, length in sorted(incoming.items())
        }
        sends, receives = sorted(outgoing.items()), list(arrived.items())
        works = _post(self._control, sends, receives, label)
        if works:
            self._wait(_Together(works), _label(label, sends, receives))
        return arrived

    def agree(self, fault: bool) -> list[int]:
        size = self._control.size()
        votes = torch.zeros(size, dtype=torch.int64)
        votes[self.rank] = fault
        first = self.rank * _FAN_OUT + 1
        children = range(first, min(first + _FAN_OUT, size))
        for said in self.swap({}, dict.fromkeys(children, size), "votes on the weights").values():
            votes |= said
        if self.rank:
            parent = (self.rank - 1) // _FAN_OUT
            answers = self.swap({parent: votes}, {parent: size}, "all ranks' vote on the weights")
            votes = answers[parent]
        self.swap(dict.fromkeys(children, votes), {}, "all ranks' vote on the weights")
        return votes.nonzero().flatten().tolist()

    def close(self) -> None:
        self._rounds, self._slots, self._order = [], [], ()
        self._in_flight.clear()
        self.memory = type(self.memory)({})

    def _exchange(
        self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], what: str
    ) -> Work | None:
        """Post messages; NCCL needs one group call, without which crossing pairs deadlock."""
        if not sends and not receives:
            return None
        if self._device.type != "cuda":
            return _Together(_post(self._group, sends, receives, what))
        self._group._start_coalescing()  # pyright: ignore[reportAttributeAccessIssue]
        _post(self._group, sends, receives, what)
        return self._group._end_coalescing()  # pyright: ignore[reportAttributeAccessIssue]


def _post(
    group: Group, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], what: str
) -> list[tuple[Work, str]]:
    works: list[tuple[Work, str]] = []
    try:
        for peer, tensor in receives:
            label = f"{what} from rank {peer}"
            works.append((group.recv([tensor], peer, _TAG), label))
        for peer, tensor in sends:
            label = f"{what} to rank {peer}"
            works.append((group.send([tensor], peer, _TAG), label))
    except RuntimeError as error:  # gloo knows already that the peer is gone
        raise ChannelError(f"{label}: {str(error).splitlines()[0]}") from error
    return works


def _padded(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def _label(what: str, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> str:
    peers = sorted({peer for peer, _ in [*sends, *receives]})
    return f"{what} with rank{'s'[: len(peers) > 1]} {', '.join(map(str, peers))}"
