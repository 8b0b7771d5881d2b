"""The contract of a channel: a directed, named, typed edge between two executors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum


class CommunicationType(Enum):
    """How messages travel from the outbound to the inbound executor."""

    BROADCAST = "broadcast"  # one message to every inbound rank
    SCATTER = "scatter"  # one message for each inbound group
    GATHER = "gather"  # one message of each outbound group to the inbound head
    WEIGHTS = "weights"  # parameters, shard to shard (DDMA)


class CommunicationChannel(ABC):
    """One edge. Ranks of the outbound and of the inbound executor call `communicate` in the same
    order of channels; other ranks' call does nothing.
    """

    name: str
    outbound: str
    inbound: str
    communication_type: CommunicationType

    @abstractmethod
    def communicate(self) -> None:
        """Send or receive this rank's part.

        Raises:
            ChannelTimeout: a peer did not come in time; names it.
            ChannelError: a peer is gone or sent something else.
        """

    def settle(self) -> None:  # noqa: B027 - most channels leave nothing behind
        """Wait for what the last `communicate` left to end later; raise what it raised."""
