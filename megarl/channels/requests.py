"""The link between the reward executor and the replicas: reports in, orders out, within a tick.

A replica's head asks (`RequestClient.exchange`), a thread of the reward rank answers it
(`RequestServer`); the head passes the orders on to the other ranks of its replica. Both sides use the
global group; a tick's last answer says that the tick is over, so no message is left between ticks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.distributed import BroadcastOptions

from megarl.channels.wire import HEADER_LENGTH, M, pack, payload_length, unpack
from megarl.topology import GENERATOR, REWARD
from megarl.types import Message, Orders, Report
from megarl.world import Group, World, timed_wait

_REPORT_TAG, _ORDERS_TAG = 0x5200, 0x5300  # apart from those of channels


def _send(group: Group, wait: Callable, message: Message, peer: int, tag: int, what: str) -> None:
    for offset, tensor in enumerate(pack(message)):
        if tensor.numel():
            wait(group.send([tensor], peer, tag + offset), f"sending {what}")


def _receive(group: Group, wait: Callable, kind: type[M], peer: int, tag: int, what: str) -> M:
    header = torch.empty(HEADER_LENGTH, dtype=torch.int64)
    wait(group.recv([header], peer, tag), f"waiting for {what}")
    payload = torch.empty(payload_length(header, what), dtype=torch.uint8)
    if payload.numel():
        wait(group.recv([payload], peer, tag + 1), f"waiting for {what}")
    return unpack(kind, header, payload, what)


class RequestClient:
    """A generator rank's end; all ranks of a replica call it alike."""

    def __init__(self, world: World):
        place = world.topology.place(GENERATOR)
        self._world = world
        self._server = world.topology.place(REWARD).heads[0]
        index = place.group_index(world.rank)
        groups = [world.subgroup(f"orders/{i}", ranks) for i, ranks in enumerate(place.groups)]
        self._replica = groups[index]
        self.is_head = place.groups[index][0] == world.rank

    def agree(self, due: bool) -> bool:
        """Return the head's ``due`` on every rank of the replica."""
        if self._replica is None:
            return due
        flag = torch.tensor([int(due)])
        self._world.wait(self._replica.broadcast([flag], _from_head()), "the head's decision")
        return bool(flag)

    def exchange(self, report: Report) -> Orders:
        """Bring a report to the reward executor and its orders to all ranks of the replica."""
        world, orders = self._world, None
        if self.is_head:
            what = f"{{}} with {world.describe(self._server)}"
            control, wait = world.control, world.wait
            _send(control, wait, report, self._server, _REPORT_TAG, what.format("a report"))
            orders = _receive(
                control, wait, Orders, self._server, _ORDERS_TAG, what.format("orders")
            )
        if self._replica is None:
            assert orders is not None
            return orders
        return self._pass_on(self._replica, orders)

    def _pass_on(self, group: Group, orders: Orders | None) -> Orders:
        header, payload = pack(orders) if orders else (torch.empty(HEADER_LENGTH).long(), None)
        self._world.wait(group.broadcast([header], _from_head()), "orders from the replica's head")
        if payload is None:
            payload = torch.empty(payload_length(header, "orders"), dtype=torch.uint8)
        if payload.numel():
            self._world.wait(group.broadcast([payload], _from_head()), "orders from the head")
        return orders or unpack(Orders, header, payload, "orders from the replica's head")


def _from_head() -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = 0
    return options


Answer = Callable[
    [int, Report], tuple[Orders, bool]
]  # the orders, and whether they are a tick's last


class RequestServer:
    """The reward rank's end: one thread for each replica between `open` and `close`."""

    def __init__(self, world: World, answer: Answer):
        self._world, self._answer = world, answer
        self._heads = world.topology.place(GENERATOR).heads
        # Not the world's own wait: threads must not overwrite what this rank says it is doing.
        self._wait = timed_wait(world.timeout_seconds)
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def open(self) -> None:
        """Serve every replica until its last answer of this tick."""
        assert not self._threads, "close() ends a tick"
        self._threads = [
            threading.Thread(target=self._serve, args=(i, head), daemon=True, name=f"replica {i}")
            for i, head in enumerate(self._heads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Return when every replica has had its last answer.

        Raises:
            ChannelError, ChannelTimeout: a replica did not report.
        """
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self.check()

    def check(self) -> None:
        """Raise what a thread raised."""
        if self._failures:
            raise self._failures[0]

    def _serve(self, replica: int, head: int) -> None:
        world = self._world
        where = f"rank {world.rank} ({world.label}): {{}} with {world.describe(head)}"
        try:
            is_last = False
            while not is_last:
                report = _receive(
                    world.control, self._wait, Report, head, _REPORT_TAG, where.format("a report")
                )
                orders, is_last = self._answer(replica, report)
                _send(world.control, self._wait, orders, head, _ORDERS_TAG, where.format("orders"))
        except Exception as error:  # noqa: BLE001 - the thread's own edge: `check` raises it
            self._failures.append(error)
