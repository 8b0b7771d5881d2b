"""Channels and worlds over real gloo processes: 4 trainer ranks, 2 replicas, 1 reward rank."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.channels.collective import BroadcastChannel, Edge, GatherChannel, ScatterChannel
from megarl.errors import ChannelError, ChannelTimeout
from megarl.executors.base import Executor
from megarl.observe.trace import Tracer
from megarl.progress import read_progress
from megarl.topology import GENERATOR, REWARD, TRAINER, Topology, rl_topology
from megarl.types import Control, Message, MetricValues
from megarl.world import Rendezvous, World
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

TRAINERS, REPLICAS = TrainerLayout(tp=2, dp=2), GeneratorLayout(tp=1, replicas=2)


class _FakeExecutor(Executor):
    def __init__(self, name: str, outputs: Sequence[Message]) -> None:
        self.name, self._outputs = name, outputs
        self.inputs: dict[str, Sequence[Message]] = {}

    def init(self) -> None: ...
    def set_step(self, step: int) -> None: ...
    def step(self) -> None: ...

    def get_output(self, channel: str) -> Sequence[Message]:
        return self._outputs

    def put_input(self, channel: str, messages: Sequence[Message]) -> None:
        self.inputs[channel] = messages


def _world(rank: int, port: int, topology: Topology, timeout: float = 30.0) -> World:
    at = Rendezvous(
        rank=rank, host="127.0.0.1", port=port, is_store_host=False, timeout_seconds=timeout
    )
    return World(topology, at)


def _run_all_channels(rank: int, size: int, port: int) -> dict:
    world = _world(rank, port, rl_topology(TRAINERS, REPLICAS))
    name = world.place.name
    outputs: Sequence[Message] = {
        TRAINER: [MetricValues.from_dict({"rank": float(rank)})],
        GENERATOR: [MetricValues.from_dict({"rank": float(rank)})],
        REWARD: [Control(stop=torch.tensor([10 + part])) for part in range(TRAINERS.dp)],
    }[name]
    executor, tracer = _FakeExecutor(name, outputs), Tracer(name, rank)
    stop = _FakeExecutor(name, [Control(stop=torch.tensor([1]))])
    scatter = Edge(name="s", outbound=REWARD, inbound=TRAINER, message_type=Control)
    gather = Edge(name="g", outbound=GENERATOR, inbound=REWARD, message_type=MetricValues)
    broadcast = Edge(name="b", outbound=REWARD, inbound=TRAINER, message_type=Control)
    channels = [
        ScatterChannel(scatter, 0, world, executor, tracer),
        GatherChannel(gather, 1, world, executor, tracer),
        BroadcastChannel(broadcast, 2, world, stop, tracer),
    ]
    for _ in range(2):  # a second round: nothing of the first is left on the wire
        for channel in channels:
            channel.communicate()
    world.barrier("end")
    executor_world = dist.get_world_size(), dist.get_rank()
    got = {**executor.inputs, **stop.inputs}
    world.leave()
    return {
        "world": executor_world,
        "s": [int(m.stop) for m in got.get("s", ())],  # type: ignore[attr-defined]
        "g": [m.to_dict()["rank"] for m in got.get("g", ())],  # type: ignore[attr-defined]
        "b": [int(m.stop) for m in got.get("b", ())],  # type: ignore[attr-defined]
    }


def _store() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


def test_messages_reach_exactly_the_ranks_that_their_channel_names() -> None:
    store = _store()
    results = run_ranks(_run_all_channels, 7, store.port, default_group=False)
    # Trainer ranks 0, 1 are data-parallel part 0 and ranks 2, 3 part 1; all of a part get it.
    assert [result["s"] for result in results] == [[10], [10], [11], [11], [], [], []]
    assert [result["g"] for result in results] == [[]] * 6 + [[4.0, 5.0]]
    assert [result["b"] for result in results] == [[1]] * 4 + [[]] * 3
    assert [result["world"] for result in results] == [
        *((4, rank) for rank in range(4)),
        (1, 0),
        (1, 0),
        (1, 0),
    ]


def _wait_for_a_silent_peer(rank: int, size: int, port: int, leaves: bool, folder: Path) -> str:
    world = _world(rank, port, rl_topology(TrainerLayout(), GeneratorLayout()), timeout=3.0)
    world.set_step(4)
    if rank:
        if not (leaves and rank == 2):
            world.store.wait(["done"], timedelta(seconds=60))
        return ""
    edge = Edge(name="batch", outbound=REWARD, inbound=TRAINER, message_type=Control)
    executor, tracer = _FakeExecutor(TRAINER, ()), Tracer(TRAINER, rank)
    try:
        GatherChannel(edge, 0, world, executor, tracer).communicate()
    except (ChannelTimeout, ChannelError) as error:
        world.report_failure(error, folder)
        progress = read_progress(world.store, 0)
        assert progress is not None
        return f"{type(error).__name__}: {error} | {progress.status.what}"
    finally:
        world.store.set("done", "1")
    return "no error"


@pytest.mark.parametrize(("leaves", "kind"), [(False, "ChannelTimeout"), (True, "ChannelError")])
def test_a_peer_that_never_sends_or_is_gone_is_named(
    leaves: bool, kind: str, tmp_path: Path
) -> None:
    store = _store()
    said = run_ranks(_wait_for_a_silent_peer, 3, store.port, leaves, tmp_path, default_group=False)[
        0
    ]
    assert said.startswith(kind), said
    for word in ("rank 0 (trainer.0)", "tick 4", "channel 'batch'", "rank 2 (reward.0)"):
        assert word in said
    # No launcher of ours watches: the rank that gave up wrote down what all were doing.
    lines = (tmp_path / "failure.trainer.0.txt").read_text().splitlines()
    assert "channel 'batch'" in lines[1]
    assert [line.split(":")[0] for line in lines[3:]] == [
        "  rank 0 (trainer.0)",
        "  rank 1 (generator.0)",
        "  rank 2 (reward.0)",
    ]
    assert ["NO HEARTBEAT" in line for line in lines[3:]] == [False, False, leaves]
