"""BROADCAST, SCATTER and GATHER over the global world.

Called by the controller in each tick. Data that goes to all ranks of a group travels to the
group's head and from there by a broadcast within the group, so a sender's load does not grow with
the trainer's tensor and pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.channels import link
from megarl.channels.base import CommunicationChannel, CommunicationType
from megarl.errors import ChannelError
from megarl.executors.base import Executor
from megarl.observe.trace import SpanKind, Tracer
from megarl.types import Message
from megarl.world import Group, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What a channel is: its name, its ends and what it carries."""

    name: str
    outbound: str
    inbound: str
    message_type: type[Message]


class CollectiveChannel(CommunicationChannel):
    """Common part: this rank's role on the edge, and one message over a point-to-point link."""

    def __init__(self, edge: Edge, index: int, world: World, executor: Executor, tracer: Tracer):
        """Build the channel; every rank of the global world builds all channels in one order.

        Args:
            executor: this rank's at one end of the edge, or any of its where it has none there
            index: position among the run's channels, unique; makes the tags.
        """
        self.name, self.outbound, self.inbound = edge.name, edge.outbound, edge.inbound
        self._type = edge.message_type
        self._tag = 2 * index
        self._world, self._executor, self._tracer = world, executor, tracer
        self._source = world.topology.place(edge.outbound)
        self._target = world.topology.place(edge.inbound)

    def communicate(self) -> None:
        if self._executor.name == self.outbound:
            self._send_all()
        elif self._executor.name == self.inbound:
            with self._tracer.span(f"wait/{self.name}", SpanKind.WAIT):
                messages = self._receive_all()
            if messages:
                self._executor.put_input(self.name, messages)

    def _send_all(self) -> None:
        raise NotImplementedError

    def _receive_all(self) -> Sequence[Message]:
        raise NotImplementedError

    def _where(self, peer: int) -> str:
        return f"channel {self.name!r} with {self._world.describe(peer)}"

    def _send(self, message: Message, target: int) -> None:
        if not isinstance(message, self._type):
            raise ChannelError(
                f"channel {self.name!r} carries {self._type.__name__}, got {type(message).__name__}"
            )
        world, label = self._world, f"sending in {self._where(target)}"
        link.send(world.control, world.wait, message, target, self._tag, label)

    def _receive(self, source: int) -> Message:
        world, label = self._world, f"waiting in {self._where(source)}"
        return link.receive(world.control, world.wait, self._type, source, self._tag, label)

    def _fan_out(self, group: Group | None, message: Message | None, root: int) -> Message:
        """Broadcast the group's first rank's message to all its ranks; all of them enter."""
        if group is None:
            assert message is not None
            return message
        at_root = self._world.rank == root
        where = f"channel {self.name!r} with its receivers" if at_root else self._where(root)
        return link.fan_out(group, self._world.wait, self._type, message, f"waiting in {where}")


class BroadcastChannel(CollectiveChannel):
    """The outbound head's message to every inbound rank."""

    communication_type = CommunicationType.BROADCAST

    def __init__(self, edge: Edge, index: int, world: World, executor: Executor, tracer: Tracer):
        super().__init__(edge, index, world, executor, tracer)
        self._root = self._source.heads[0]
        ranks = (self._root, *self._target.ranks)
        self._group = world.subgroup(f"broadcast/{edge.name}", ranks)

    def _send_all(self) -> None:
        if self._world.rank == self._root:
            (message,) = self._executor.get_output(self.name)
            with self._tracer.span(f"wait/{self.name}", SpanKind.WAIT):
                self._fan_out(self._group, message, self._root)

    def _receive_all(self) -> Sequence[Message]:
        return (self._fan_out(self._group, None, self._root),)


class ScatterChannel(CollectiveChannel):
    """One message for each inbound group, from the outbound head, to all ranks of that group."""

    communication_type = CommunicationType.SCATTER

    def __init__(self, edge: Edge, index: int, world: World, executor: Executor, tracer: Tracer):
        super().__init__(edge, index, world, executor, tracer)
        groups = [
            world.subgroup(f"scatter/{edge.name}/{number}", ranks)
            for number, ranks in enumerate(self._target.groups)
        ]
        mine = world.rank in self._target.ranks
        self._group = groups[self._target.group_index(world.rank)] if mine else None

    def _send_all(self) -> None:
        if self._world.rank != self._source.heads[0]:
            return
        messages = self._executor.get_output(self.name)
        if len(messages) != len(self._target.groups):
            raise ChannelError(
                f"channel {self.name!r} scatters to {len(self._target.groups)} groups, "
                f"got {len(messages)} messages"
            )
        with self._tracer.span(f"wait/{self.name}", SpanKind.WAIT):
            for message, head in zip(messages, self._target.heads, strict=True):
                self._send(message, head)

    def _receive_all(self) -> Sequence[Message]:
        head = self._target.groups[self._target.group_index(self._world.rank)][0]
        is_head = self._world.rank == head
        message = self._receive(self._source.heads[0]) if is_head else None
        return (self._fan_out(self._group, message, head),)


class GatherChannel(CollectiveChannel):
    """One message of each outbound group's head to the inbound head."""

    communication_type = CommunicationType.GATHER

    def _send_all(self) -> None:
        if self._world.rank in self._source.heads:
            (message,) = self._executor.get_output(self.name)
            with self._tracer.span(f"wait/{self.name}", SpanKind.WAIT):
                self._send(message, self._target.heads[0])

    def _receive_all(self) -> Sequence[Message]:
        if self._world.rank != self._target.heads[0]:
            return ()
        return tuple(self._receive(head) for head in self._source.heads)
