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
from pathlib import Path
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
from megarl.config import RunConfig
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
from megarl.ddma.transports import CollectiveTransport
from megarl.executors.base import Executor
from megarl.observe.trace import Tracer
from megarl.topology import GENERATOR, REWARD, TRAINER, Topology
from megarl.types import Control, MetricValues, Rollouts, TrainBatch
from megarl.world import World
from megatron_bridge.layouts.megatron import megatron_manifest
from megatron_bridge.layouts.vllm import vllm_manifest
from megatron_bridge.models.families import load_spec
from megatron_bridge.plan import TransferPlan, plan

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


def weight_plan(config: RunConfig, topology: Topology) -> TransferPlan:
    """Return the plan from all trainer ranks to all generator ranks; the same on every rank."""
    spec = load_spec(Path(config.model.path))
    fused_norms = torch.cuda.is_available() and _installed("transformer_engine")
    source = [
        megatron_manifest(spec, config.trainer.layout, rank, fused_norms=fused_norms)
        for rank in range(config.trainer.layout.world_size)
    ]
    tp = config.generator.layout.tp
    target = [
        vllm_manifest(spec, tp, index, global_rank=rank)
        for replica in topology.place(GENERATOR).worlds
        for index, rank in enumerate(replica)
    ]
    return plan(source, target)


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


def make_executor(rank: Rank, sink: MetricSink | None) -> Executor:
    """Build this rank's executor."""
    config, world, start = rank.config, rank.world, rank.start
    match world.place.name:
        case name if name == TRAINER:
            from megarl.executors.trainer import TrainerExecutor

            return TrainerExecutor(config, start, world.rank, export_link(world), rank.tracer)
        case name if name == GENERATOR:
            from megarl.executors.generator import GeneratorExecutor, Replica

            place = world.place
            replica = Replica(index=place.group_index(world.rank), count=len(place.groups))
            engine = partial(make_engine, rank, load_weights=False)
            return GeneratorExecutor(config, start.step, replica, engine, rank.tracer)
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


def _weights_channel(rank: Rank, executor: Executor) -> CommunicationChannel:
    world = rank.world
    if world.place.name == REWARD:
        return NoChannel(WEIGHTS)
    ranks = rank.topology.place(TRAINER).ranks + rank.topology.place(GENERATOR).ranks
    group = world.device_group("weights", ranks)
    params = executor.get_model()
    device = next(iter(params.values())).device
    dtype = getattr(torch, rank.config.generator_dtype)
    transport = CollectiveTransport(group, dtype, device, wait=world.wait)
    transfer = weight_plan(rank.config, rank.topology)
    sync = WeightSync(transfer, world.rank, transport, params)
    if world.place.name == TRAINER:
        return WeightsSendChannel(WEIGHTS, sync, cast(WeightSource, executor), rank.tracer)
    return WeightsReceiveChannel(WEIGHTS, sync, cast(WeightTarget, executor), rank.tracer)
