"""The link between the reward executor and the replicas: reports in, orders out, within a tick.

A replica's head asks (`RequestClient.exchange`), a thread of the reward rank answers it
(`RequestServer`); the head passes the orders on to the other ranks of its replica. Both sides use the
global group; a tick's last answer says that the tick is over, so no message is left between ticks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from megarl.channels import link
from megarl.topology import GENERATOR, REWARD
from megarl.types import Orders, Report
from megarl.world import World, timed_wait

_REPORT_TAG, _ORDERS_TAG = 0x5200, 0x5300  # apart from those of channels


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
        work = self._replica.broadcast([flag], link.from_first_rank())
        self._world.wait(work, "the head's decision")
        return bool(flag)

    def exchange(self, report: Report) -> Orders:
        """Bring a report to the reward executor and its orders to all ranks of the replica."""
        world, orders = self._world, None
        if self.is_head:
            control, wait, server = world.control, world.wait, self._server
            peer = world.describe(server)
            link.send(control, wait, report, server, _REPORT_TAG, f"sending a report with {peer}")
            label = f"waiting for orders with {peer}"
            orders = link.receive(control, wait, Orders, server, _ORDERS_TAG, label)
        if self._replica is None:
            assert orders is not None
            return orders
        label = "orders from the replica's head"
        return link.fan_out(self._replica, world.wait, Orders, orders, label)


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
        control, wait, peer = world.control, self._wait, world.describe(head)
        me = f"rank {world.rank} ({world.label})"
        receiving = f"{me}: waiting for a report with {peer}"
        sending = f"{me}: sending orders with {peer}"
        try:
            is_last = False
            while not is_last:
                report = link.receive(control, wait, Report, head, _REPORT_TAG, receiving)
                orders, is_last = self._answer(replica, report)
                link.send(control, wait, orders, head, _ORDERS_TAG, sending)
        except Exception as error:  # noqa: BLE001 - the thread's own edge: `check` raises it
            self._failures.append(error)
