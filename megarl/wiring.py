"""Composition of the reinforcement-learning run: configuration -> executors and channels.

Called by `megarl.train` on every rank. Components are wired here and never look each other up.
Executors are imported where they are built: Megatron-Core, vLLM and transformers each take seconds
to import, and no rank needs all three.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from megarl.channels.base import CommunicationChannel
from megarl.channels.collective import BroadcastChannel, Edge, GatherChannel, ScatterChannel
from megarl.channels.requests import RequestClient, RequestServer
from megarl.channels.weights import (
    NoChannel,
    WeightSource,
    WeightsReceiveChannel,
    WeightsSendChannel,
    WeightTarget,
)
from megarl.checkpoint import StartPoint
from megarl.config import RunConfig, WeightTransport
from megarl.controller import (
    BATCH,
    CONTROL_GENERATOR,
    CONTROL_TRAINER,
    GENERATOR_METRICS,
    TRAINER_METRICS,
    WEIGHTS,
)
from megarl.ddma.engine import WeightSync
from megarl.ddma.transports.base import Transport
from megarl.ddma.transports.collective import CollectiveTransport, Window
from megarl.ddma.transports.ipc import IpcTransport
from megarl.executors.base import Executor
from megarl.observe.trace import Tracer
from megarl.topology import GENERATOR, REWARD, TRAINER, Topology
from megarl.types import Control, MetricValues, TrainBatch
from megarl.weights import run_spec, weight_plan
from megarl.world import World
from megatron_bridge.layouts.vllm import vllm_manifest

if TYPE_CHECKING:
    from megarl.executors.policy import ExportLink
    from megarl.executors.reward import MetricSink
    from megarl.rollout.vllm_engine import VllmEngine

EDGES = (
    Edge(name=CONTROL_TRAINER, outbound=REWARD, inbound=TRAINER, message_type=Control),
    Edge(name=CONTROL_GENERATOR, outbound=REWARD, inbound=GENERATOR, message_type=Control),
    Edge(name=TRAINER_METRICS, outbound=TRAINER, inbound=REWARD, message_type=MetricValues),
    Edge(name=GENERATOR_METRICS, outbound=GENERATOR, inbound=REWARD, message_type=MetricValues),
    Edge(name=BATCH, outbound=REWARD, inbound=TRAINER, message_type=TrainBatch),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What every component of this rank is built from."""

    config: RunConfig
    topology: Topology
    world: World
    tracers: Mapping[str, Tracer]  # by executor of this rank
    start: StartPoint
    began: float  # monotonic seconds when the process began


def make_tracers(world: World) -> Mapping[str, Tracer]:
    """Return a tracer for each executor of this rank: on a rank of two each times its own work."""
    return {
        place.name: Tracer(place.name, world.rank, on_enter=world.set_status)
        for place in world.places
    }


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def make_engine(rank: Rank, *, load_weights: bool) -> VllmEngine:
    """Start this rank's vLLM; all ranks of its replica enter."""
    from megarl.rollout.vllm_engine import EngineSettings, VllmEngine

    config = rank.config
    replica = rank.topology.place(GENERATOR).group_index(rank.world.rank)
    return VllmEngine(
        EngineSettings(
            model_path=config.model.path,
            dtype=config.generator_dtype,
            tp=config.generator.layout.tp,
            quantization=config.generator.layout.quantization,
            ep=config.generator.layout.ep,
            max_model_len=config.data.max_prompt_length + config.rollout.max_response_length,
            max_running_sequences=config.generator.max_running_sequences,
            kv_cache_bytes=int(config.generator.kv_cache_gib * 2**30),
            seed=config.seed,
            enforce_eager=config.generator.enforce_eager,
            prefix_caching=config.generator.prefix_caching,
            partial_kv=config.rollout.partial_kv,
            job=f"{config.name}-{rank.world.run_id}-{replica}",
            load_weights=load_weights,
        )
    )


def export_link(world: World) -> ExportLink:
    """Return what the trainer's ranks send their shards over when they export."""
    from megarl.executors.policy import ExportLink

    ranks = world.topology.place(TRAINER).ranks
    group = world.device_group("trainer/export", ranks) if len(ranks) > 1 else None
    return ExportLink(group=group, wait=world.wait)


def make_executors(
    rank: Rank, sink: MetricSink | None, work: RunConfig | None = None
) -> tuple[Executor, ...]:
    """Build this rank's executors: one, or the trainer and the generator.

    Args:
        work: what the executors do, where that is less than ``rank.config`` says; engines are
            built as that says.
    """
    return tuple(_make_executor(place.name, rank, sink, work) for place in rank.world.places)


def initialize(rank: Rank, executors: Sequence[Executor]) -> None:
    """Build the engines, each in its world.

    Of two the generator comes first: vLLM wants most of a GPU free when it starts, whatever it is
    then told to use of it.
    """
    for executor in reversed(executors):
        with rank.world.inside(executor.name):
            executor.init()


def close(rank: Rank, executors: Sequence[Executor]) -> None:
    """Close all executors, each in its world; may be called after a failure."""
    for executor in executors:
        with rank.world.inside(executor.name):
            executor.close()


def _make_executor(
    name: str, rank: Rank, sink: MetricSink | None, work: RunConfig | None
) -> Executor:
    config, world, start = work or rank.config, rank.world, rank.start
    tracer = rank.tracers[name]
    match name:
        case _ if name == TRAINER:
            from megarl.executors.trainer import Surroundings, TrainerExecutor

            around = Surroundings(link=export_link(world), arrive=world.arrive)
            return TrainerExecutor(config, start, world.rank, around, tracer)
        case _ if name == GENERATOR:
            from megarl.executors.generator import GeneratorExecutor, Replica

            place, layout = rank.topology.place(GENERATOR), config.generator.layout
            index = place.group_index(world.rank)
            local_rank = place.groups[index].index(world.rank)
            manifest = vllm_manifest(
                run_spec(config),
                layout.tp,
                local_rank,
                global_rank=world.rank,
                layout=layout,
            )
            replica = Replica(
                manifest=manifest, client=RequestClient(world), has_arrived=world.has_arrived
            )
            engine = partial(make_engine, rank, load_weights=False)
            return GeneratorExecutor(config, start, replica, engine, tracer)
        case _:
            from megarl.executors.reward import RewardExecutor, Surroundings

            assert sink is not None
            around = Surroundings(
                sink=sink,
                say=world.set_status,
                stop_requested=world.stop_requested,
                has_arrived=world.has_arrived,
                serve=partial(RequestServer, world),
                num_replicas=len(rank.topology.place(GENERATOR).groups),
                closes_before_batch=config.is_colocated,
            )
            return RewardExecutor(config, start, around, tracer)


def make_channels(rank: Rank, executors: Sequence[Executor]) -> Mapping[str, CommunicationChannel]:
    """Build all channels in one order on every rank; the executors are initialised."""
    mine = {executor.name: executor for executor in executors}
    kinds = {
        CONTROL_TRAINER: BroadcastChannel,
        CONTROL_GENERATOR: BroadcastChannel,
        BATCH: ScatterChannel,
    }
    channels: dict[str, CommunicationChannel] = {}
    for index, edge in enumerate(EDGES):
        executor = mine.get(edge.outbound) or mine.get(edge.inbound) or executors[0]
        kind, tracer = kinds.get(edge.name, GatherChannel), rank.tracers[executor.name]
        channels[edge.name] = kind(edge, index, rank.world, executor, tracer)
    channels[WEIGHTS] = _weights_channel(rank, mine)
    return channels


def _weight_transport(
    rank: Rank, ranks: tuple[int, ...], device: torch.device, near: frozenset[int]
) -> Transport:
    """Return what weights travel over; ``near`` are the other ranks of this host.

    NCCL takes the short ways inside a host by itself.
    """
    world, weights = rank.world, rank.config.weights
    group = world.device_group("weights", ranks)
    control = world.subgroup("weights/control", ranks)
    window = Window(slots=weights.slots, chunk_bytes=int(weights.chunk_mib * 2**20))
    auto = weights.transport is WeightTransport.AUTO and device.type == "cpu"
    if auto or weights.transport is WeightTransport.IPC:
        return IpcTransport(group, device, near, wait=world.wait, window=window, control=control)
    return CollectiveTransport(group, device, wait=world.wait, window=window, control=control)


def _weights_channel(rank: Rank, mine: Mapping[str, Executor]) -> CommunicationChannel:
    world, config = rank.world, rank.config
    hosts = world.hosts()
    if REWARD in mine:
        return NoChannel(WEIGHTS)
    ends = [rank.topology.place(name).ranks for name in (TRAINER, GENERATOR)]
    ranks = tuple(dict.fromkeys(ends[0] + ends[1]))
    # Megatron's and vLLM's names have no prefix in common.
    params = {name: p for each in mine.values() for name, p in each.get_model().items()}
    device = next(iter(params.values())).device
    te = torch.cuda.is_available() and _installed("transformer_engine")
    seats = tuple((hosts[r], hosts[:r].count(hosts[r])) for r in ranks)
    transfer = weight_plan(config, run_spec(config), te=te, seats=seats)
    near = frozenset(r for r in ranks if hosts[r] == hosts[world.rank] and r != world.rank)
    transport = _weight_transport(rank, ranks, device, near)
    sync = WeightSync(transfer, world.rank, transport, params, verify=config.weights.verify)
    source = cast(WeightSource, mine.get(TRAINER))
    tracer = next(iter(rank.tracers.values()))
    if GENERATOR not in mine:
        return WeightsSendChannel(WEIGHTS, sync, source, tracer)
    target = cast(WeightTarget, mine[GENERATOR])
    inside = partial(world.inside, GENERATOR)
    return WeightsReceiveChannel(WEIGHTS, sync, target, tracer, inside, source)
