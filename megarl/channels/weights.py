"""WEIGHTS: the trainer's parameters into the generators', shard to shard (DDMA).

Called by the controller at the head of a tick. Waiting for the peer (the handshake) and moving
bytes are separate spans, so that idle time and synchronisation time are never mixed up.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from megarl.channels.base import CommunicationChannel, CommunicationType
from megarl.ddma.engine import WeightSync
from megarl.observe.trace import SpanKind, Tracer


class WeightSource(Protocol):
    """The trainer's side: says which version it holds, and calls back before that changes."""

    @property
    def version(self) -> int: ...

    def before_update(self, settle: Callable[[], None]) -> None: ...


class WeightTarget(Protocol):
    """The generator's side: must not sample between the two calls."""

    def begin_update(self) -> None: ...

    def commit_update(self, version: int, received_bytes: int) -> None: ...


class WeightsSendChannel(CommunicationChannel):
    """The trainer's end: sends while the trainer computes its next gradients."""

    communication_type = CommunicationType.WEIGHTS

    def __init__(self, name: str, sync: WeightSync, source: WeightSource, tracer: Tracer):
        self.name, self._sync, self._source, self._tracer = name, sync, source, tracer
        source.before_update(self.settle)

    def communicate(self) -> None:
        self.settle()
        with self._tracer.span(f"wait/{self.name}", SpanKind.WAIT):
            version = self._sync.handshake(self._source.version)
        self._sync.send_beside(version)

    def settle(self) -> None:
        with self._tracer.span("send_weights", SpanKind.SYNC):
            self._sync.settle()


class WeightsReceiveChannel(CommunicationChannel):
    """A generator's end; the trainer's too on a rank that is both."""

    communication_type = CommunicationType.WEIGHTS

    def __init__(
        self,
        name: str,
        sync: WeightSync,
        target: WeightTarget,
        tracer: Tracer,
        inside: Callable[[], AbstractContextManager[None]],
        source: WeightSource | None = None,
    ):
        """Take the generator, what leads into its world, and the trainer where it is here."""
        self.name, self._sync, self._tracer = name, sync, tracer
        self._target, self._inside, self._source = target, inside, source

    def communicate(self) -> None:
        with self._tracer.span(f"wait/{self.name}", SpanKind.WAIT):
            version = self._sync.handshake(self._source.version if self._source else None)
        with self._tracer.span("update_weights", SpanKind.SYNC), self._inside():
            self._target.begin_update()
            self._sync.transfer(version)
            self._sync.require_clean()
            self._target.commit_update(version, self._sync.received_bytes)


class NoChannel(CommunicationChannel):
    """The end of an executor that the channel does not concern."""

    communication_type = CommunicationType.WEIGHTS

    def __init__(self, name: str):
        self.name = name

    def communicate(self) -> None:
        """Do nothing."""
