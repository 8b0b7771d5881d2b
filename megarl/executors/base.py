"""The contract that the controller steps and that channels feed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from megarl.types import Message


class Executor(ABC):
    """One role on one set of ranks; knows neither the controller nor a peer.

    Each rank of an executor has an instance. Order of calls::

        init()                      builds the engine; the executor world exists
        each tick:  set_step(tick)
                    get_output / put_input    as the channels of the tick ask
                    prepare()                 what others' work of the tick needs first
                    step()                    the work of the tick
                    save_checkpoint()
        close()
    """

    name: str
    stopping: bool = False  # a Control message asked this run to save and end

    @abstractmethod
    def init(self) -> None:
        """Build what the executor needs; every rank of its world enters."""

    @abstractmethod
    def set_step(self, step: int) -> None:
        """Begin tick ``step``."""

    def prepare(self) -> None:  # noqa: B027 - most executors have nothing to prepare
        """Make what a channel of this tick will ask for."""

    @abstractmethod
    def step(self) -> None:
        """Do the work of the tick; every rank of the executor world enters."""

    @abstractmethod
    def get_output(self, channel: str) -> Sequence[Message]:
        """Return what goes into ``channel``; called on the ranks that send.

        SCATTER channels take one message for each inbound group, the others one.
        """

    @abstractmethod
    def put_input(self, channel: str, messages: Sequence[Message]) -> None:
        """Take what came out of ``channel``; called on the ranks that receive.

        GATHER channels bring one message from each outbound group, the others one.
        """

    def get_model(self) -> Mapping[str, Tensor]:
        """Return the live local parameters, for a WEIGHTS channel."""
        raise NotImplementedError(f"executor {self.name!r} has no model")

    def save_checkpoint(self) -> None:  # noqa: B027 - executors without state save nothing
        """Save state if the tick asks for it; every rank of the executor world enters."""

    def close(self) -> None:  # noqa: B027 - executors without resources close nothing
        """Release engines, processes and files; may be called after a failure."""
