"""Reports in, orders out, over real gloo processes: a trainer, replicas of tp 1 or 2, a reward rank."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megarl.channels.requests import RequestClient, RequestServer
from megarl.errors import ChannelError, ChannelTimeout
from megarl.rollout.engine import Sample, SampleRequest
from megarl.rollout.messages import (
    State,
    Work,
    pack_samples,
    pack_work,
    unpack_samples,
    unpack_work,
)
from megarl.topology import (
    GENERATOR,
    REWARD,
    ExecutorPlace,
    Topology,
    trainer_place,
)
from megarl.types import Orders, Report
from megarl.world import Rendezvous, World
from megatron_bridge.parallel import TrainerLayout
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

EOS, TICKS, REPORTS = 2, 2, 4
REPLICAS = ((1,), (2, 3))  # rank 0 trains, rank 4 rewards


def _topology(replicas: tuple[tuple[int, ...], ...]) -> Topology:
    """A layout has replicas of one size; here they differ."""
    last = replicas[-1][-1] + 1
    generators = ExecutorPlace(name=GENERATOR, groups=replicas, worlds=replicas)
    reward = ExecutorPlace(name=REWARD, groups=((last,),), worlds=((last,),))
    return Topology(places=(trainer_place(TrainerLayout()), generators, reward))


def _world(rank: int, port: int, topology: Topology, timeout: float = 30.0) -> World:
    at = Rendezvous(
        rank=rank, host="127.0.0.1", port=port, is_store_host=False, timeout_seconds=timeout
    )
    return World(topology, at)


def _make_request(request_id: int) -> SampleRequest:
    return SampleRequest(
        request_id=request_id,
        prompt=(5,) * (request_id + 1),
        max_tokens=8,
        temperature=1.0,
        seed=request_id,
        eos_token_id=EOS,
    )


def _make_sample(replica: int, tick: int, number: int) -> Sample:
    return Sample(
        request_id=1000 * replica + 100 * tick + number,
        tokens=(7,) * number,
        logprobs=(-1.0,) * number,
        versions=(tick,) * number,
        finished=True,
    )


def _serve(world: World) -> list[list[int]]:
    """Answer report k of a replica with k requests; the last one of a tick ends it."""
    seen: list[list[int]] = [[] for _ in REPLICAS]

    def answer(replica: int, report: Report) -> tuple[Orders, bool]:
        seen[replica] += [sample.request_id for sample in unpack_samples(report)]
        number = len(seen[replica]) % REPORTS
        requests = [_make_request(10 * replica + i) for i in range(number)]
        state = State.GO if number else State.BOUNDARY
        work = Work(state=state, requests=requests, aborts=[replica] * number)
        return pack_work(work, EOS), state is State.BOUNDARY

    server = RequestServer(world, answer)
    for _ in range(TICKS):
        server.open()
        server.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("replica")]
    return seen


def _ask(world: World, replica: int) -> list[list[int]]:
    """Return what this rank was ordered: request ids by report."""
    client = RequestClient(world)
    assert client.is_head is (world.rank == REPLICAS[replica][0])
    orders = []
    for tick in range(TICKS):
        state, number = State.GO, 0
        while state is State.GO:
            # What another rank than the head thinks or has does not count.
            assert client.agree(number % 2 == 0 if client.is_head else number % 2 == 1) is (
                number % 2 == 0
            )
            samples = [_make_sample(replica, tick, number)] if client.is_head else []
            work = unpack_work(client.exchange(pack_samples(samples)))
            orders.append([request.request_id for request in work.requests])
            assert list(work.requests) == [_make_request(i) for i in orders[-1]]
            state, number = work.state, number + 1
    return orders


def _run(rank: int, size: int, port: int) -> list[list[int]]:
    world = _world(rank, port, _topology(REPLICAS))
    found: list[list[int]] = []
    if world.place.name == REWARD:
        found = _serve(world)
    elif world.place.name == GENERATOR:
        found = _ask(world, world.place.group_index(rank))
    world.barrier("end")
    world.leave()
    return found


def _store() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


def test_orders_reach_all_ranks_of_a_replica_until_the_tick_ends_for_them() -> None:
    store = _store()
    results = run_ranks(_run, 5, store.port, default_group=False)
    for replica, ranks in enumerate(REPLICAS):
        first = 10 * replica
        tick = [list(range(first, first + number)) for number in (1, 2, 3, 0)]
        for rank in ranks:
            assert results[rank] == tick * TICKS, rank
    assert results[4] == [
        [1000 * replica + 100 * tick + number for tick in range(TICKS) for number in range(REPORTS)]
        for replica in range(len(REPLICAS))
    ]


def _lose_a_replica(rank: int, size: int, port: int, leaves: bool) -> str:
    """Let the second of two replicas report once, then leave or say nothing more."""
    world = _world(rank, port, _topology(((1,), (2,))), timeout=3.0)
    if world.place.name != REWARD:
        if world.place.name == GENERATOR:
            reports = 1 if rank == 2 else 2
            client = RequestClient(world)
            for _ in range(reports):
                client.exchange(pack_samples([]))
        if rank != 2 or not leaves:
            world.store.wait(["done"], timedelta(seconds=60))
        return ""
    answers = [0, 0]

    def answer(replica: int, report: Report) -> tuple[Orders, bool]:
        answers[replica] += 1
        is_last = answers[replica] == 2
        state = State.BOUNDARY if is_last else State.GO
        return pack_work(Work(state=state), EOS), is_last

    server = RequestServer(world, answer)
    server.open()
    try:
        server.close()
    except (ChannelTimeout, ChannelError) as error:
        return f"{type(error).__name__}: {error} {answers}"
    finally:
        world.store.set("done", "1")
    return "no error"


@pytest.mark.parametrize(("leaves", "kind"), [(False, "ChannelTimeout"), (True, "ChannelError")])
def test_a_replica_that_is_gone_or_silent_is_named(leaves: bool, kind: str) -> None:
    store = _store()
    said = run_ranks(_lose_a_replica, 4, store.port, leaves, default_group=False)[3]
    assert said.startswith(kind), said
    for words in ("rank 3 (reward.0)", "a report", "rank 2 (generator.1)", "[2, 1]"):
        assert words in said
