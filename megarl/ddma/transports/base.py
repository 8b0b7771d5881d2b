"""The contract of a transport: moves the messages of a plan between ranks.

Called by `megarl.ddma.engine` and `megarl.ddma.export`; ranks are those of the plan. Both ends derive
the same messages from the plan alone, so each end decides for itself whether it reads or writes a
parameter in place or goes through a staging buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from megarl.ddma.checksums import Verify
from megarl.ddma.memory import Memory
from megatron_bridge.operations import Message


class Transport(ABC):
    """One object on each rank: `register` once; for each transfer `begin`, `post` and `wait`."""

    memory: Memory

    def __init__(self, rank: int):
        self.rank = rank

    @property
    def framing(self) -> str:
        """What both ends must agree on for their messages to match."""
        return type(self).__name__

    def register(
        self,
        params: Mapping[str, Tensor],
        messages: Sequence[Message],
        verify: Verify = Verify.NONE,
    ) -> None:
        """Take this rank's parameters, used in place, and all messages of a transfer in order."""
        expected = [item for m in messages if m.target_rank == self.rank for item in m.items]
        self.memory = Memory(params, expected, verify)

    def warm_up(self, peers: Sequence[int]) -> None:  # noqa: B027 - most have nothing to connect
        """Make what is made at the first message to or from each of ``peers``, who enter too."""

    @abstractmethod
    def begin(self) -> None:
        """Let peers write: this rank's parameters are nobody's from now on."""

    @abstractmethod
    def post(self, messages: Sequence[Message]) -> None:
        """Start this rank's part of all messages, in order; may wait for earlier ones."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all that was posted has left this rank or arrived in its parameters.

        What a peer writes into them itself is there at the next `swap` from it, or after `agree`.
        """

    @abstractmethod
    def swap(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int], label: str
    ) -> dict[int, Tensor]:
        """Exchange small control vectors: int64 tensors out, by peer; lengths in, by peer."""

    @abstractmethod
    def agree(self, fault: bool) -> list[int]:
        """Return the ranks that have a fault; every rank of the transport enters."""

    @abstractmethod
    def close(self) -> None:
        """Forget the parameters and free staging memory."""
