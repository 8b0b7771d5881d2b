"""Composition of the reinforcement-learning run: configuration -> executors and channels.

Called by `megarl.train` on every rank. Components are wired here and never look each other up.
Executors are imported where they are built: Megatron-Core, vLLM and transformers each take seconds
to import, and no rank needs all three.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from megarl.channels.base import CommunicationChannel
from megarl.channels.collective import BroadcastChannel, Edge, GatherChannel, ScatterChannel
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
    EVAL_ROLLOUTS,
    GENERATOR_METRICS,
    ROLLOUTS,
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
from megarl.types import Control, MetricValues, Rollouts, TrainBatch
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
    Edge(name=ROLLOUTS, outbound=GENERATOR, inbound=REWARD, message_type=Rollouts),
    Edge(name=EVAL_ROLLOUTS, outbound=GENERATOR, inbound=REWARD, message_type=Rollouts),
    Edge(name=GENERATOR_METRICS, outbound=GENERATOR, inbound=REWARD, message_type=MetricValues),
    Edge(name=BATCH, outbound=REWARD, inbound=TRAINER, message_type=TrainBatch),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What every component of this rank is built from."""

    config: RunConfig
    topology: Topology
    world: World
    tracer: Tracer
    start: StartPoint
    began: float  # monotonic seconds when the process began


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def make_engine(rank: Rank, *, load_weights: bool) -> VllmEngine:
    """Start this rank's vLLM; all ranks of its replica enter."""
    from megarl.rollout.vllm_engine import EngineSettings, VllmEngine

    config = rank.config
    replica = rank.world.place.group_index(rank.world.rank)
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
            job=f"{config.name}-{rank.world.run_id}-{replica}",
            load_weights=load_weights,
        )
    )


def export_link(world: World) -> ExportLink:
    """Return what the trainer's ranks send their shards over when they export."""
    from megarl.executors.policy import ExportLink

    ranks = world.place.ranks
    group = world.device_group("trainer/export", ranks) if len(ranks) > 1 else None
    return ExportLink(group=group, wait=world.wait)


def make_executor(rank: Rank, sink: MetricSink | None, work: RunConfig | None = None) -> Executor:
    """Build this rank's executor.

    Args:
        work: what the executors do, where that is less than ``rank.config`` says; engines are
            built as that says.
    """
    config, world, start = work or rank.config, rank.world, rank.start
    match world.place.name:
        case name if name == TRAINER:
            from megarl.executors.trainer import TrainerExecutor

            return TrainerExecutor(config, start, world.rank, export_link(world), rank.tracer)
        case name if name == GENERATOR:
            from megarl.executors.generator import GeneratorExecutor, Replica

            place, layout = world.place, config.generator.layout
            index = place.group_index(world.rank)
            local_rank = place.groups[index].index(world.rank)
            manifest = vllm_manifest(
                run_spec(config),
                layout.tp,
                local_rank,
                global_rank=world.rank,
                layout=layout,
            )
            replica = Replica(index=index, count=len(place.groups), manifest=manifest)
            engine = partial(make_engine, rank, load_weights=False)
            return GeneratorExecutor(config, start, replica, engine, rank.tracer)
        case _:
            from megarl.executors.reward import RewardExecutor

            assert sink is not None
            return RewardExecutor(config, start.step, sink, world.stop_requested, rank.tracer)


def make_channels(rank: Rank, executor: Executor) -> Mapping[str, CommunicationChannel]:
    """Build all channels in one order on every rank; the executor is initialised."""
    world, tracer = rank.world, rank.tracer
    kinds = {
        CONTROL_TRAINER: BroadcastChannel,
        CONTROL_GENERATOR: BroadcastChannel,
        BATCH: ScatterChannel,
    }
    channels: dict[str, CommunicationChannel] = {
        edge.name: kinds.get(edge.name, GatherChannel)(edge, index, world, executor, tracer)
        for index, edge in enumerate(EDGES)
    }
    channels[WEIGHTS] = _weights_channel(rank, executor)
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


def _weights_channel(rank: Rank, executor: Executor) -> CommunicationChannel:
    world, config = rank.world, rank.config
    hosts = world.hosts()
    if world.place.name == REWARD:
        return NoChannel(WEIGHTS)
    ranks = rank.topology.place(TRAINER).ranks + rank.topology.place(GENERATOR).ranks
    params = executor.get_model()
    device = next(iter(params.values())).device
    te = torch.cuda.is_available() and _installed("transformer_engine")
    seats = tuple((hosts[r], hosts[:r].count(hosts[r])) for r in ranks)
    transfer = weight_plan(config, run_spec(config), te=te, seats=seats)
    near = frozenset(r for r in ranks if hosts[r] == hosts[world.rank] and r != world.rank)
    transport = _weight_transport(rank, ranks, device, near)
    sync = WeightSync(transfer, world.rank, transport, params, verify=config.weights.verify)
    if world.place.name == TRAINER:
        return WeightsSendChannel(WEIGHTS, sync, cast(WeightSource, executor), rank.tracer)
    return WeightsReceiveChannel(WEIGHTS, sync, cast(WeightTarget, executor), rank.tracer)
