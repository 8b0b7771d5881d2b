"""All ranks in one process: each message is one copy, nothing more; the specification of others."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megarl.ddma.transports.base import Transport
from megarl.errors import ChannelTimeout
from megatron_bridge.operations import Message


class LoopbackHub:
    """The mail of all ranks of one process; give it to the `LoopbackTransport` of each."""

    def __init__(self, num_ranks: int, timeout_seconds: float = 10.0):
        self.num_ranks = num_ranks
        self.timeout_seconds = timeout_seconds
        self.votes: dict[int, bool] = {}
        self.barrier = threading.Barrier(num_ranks)
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
    """One rank of a hub. Without threads, post the ranks' messages in the plan's order, then wait."""

    def __init__(self, hub: LoopbackHub, rank: int):
        super().__init__(rank)
        self._hub = hub
        self._expected: list[Message] = []

    def begin(self) -> None:
        self.memory.begin()
        self._expected.clear()

    @torch.no_grad()
    def post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.source_rank == self.rank:
                if message.hop:
                    self.wait()
                staged = torch.empty(message.nbytes, dtype=torch.uint8)
                self.memory.pack(message, staged)
                self._hub.put("weights", self.rank, message.target_rank, staged)
            if message.target_rank == self.rank:
                self._expected.append(message)

    @torch.no_grad()
    def wait(self) -> None:
        for message in self._expected:
            staged = self._hub.get("weights", message.source_rank, self.rank)
            self.memory.unpack(message, staged)
            self.memory.arrived(message)
        self._expected.clear()

    def swap(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int], label: str
    ) -> dict[int, Tensor]:
        for peer, vector in outgoing.items():
            self._hub.put("control", self.rank, peer, vector.clone())
        return {peer: self._hub.get("control", peer, self.rank) for peer in incoming}

    def agree(self, fault: bool) -> list[int]:
        hub = self._hub
        hub.votes[self.rank] = fault
        try:
            hub.barrier.wait(hub.timeout_seconds)
            faulty = sorted(rank for rank, said in hub.votes.items() if said)
            hub.barrier.wait(hub.timeout_seconds)
        except threading.BrokenBarrierError as error:
            raise ChannelTimeout(
                f"rank {self.rank} waits for all ranks' vote for {hub.timeout_seconds:.1f} s"
            ) from error
        return faulty

    def close(self) -> None:
        self.memory = type(self.memory)({})
