"""Megatron-Core's own resharding planner on a run's layouts, to compare with: loop time and load.

Calls the functions with which `megatron.core.resharding` 0.16.1 plans (`select_src_metadata_balanced`
and `_determine_source_ranks_for_dst_param`) on the metadata that its ranks would gather, in the loop
of its rank 0. Left out are its collectives, pickles and operation objects. It knows Megatron layouts
only, so generators are a Megatron model of the same tp. Called by `tools.plan_reshard --peer`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from megatron.core.resharding.planner import _determine_source_ranks_for_dst_param
from megatron.core.resharding.utils import ParameterMetadata, select_src_metadata_balanced

from megarl.config import RunConfig
from megarl.errors import ConfigError
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.parallel import TrainerCoordinate, TrainerLayout
from megatron_bridge.spec import LocalParam, ModelSpec

CANNOT = (
    "It cannot plan vocabularies padded to other sizes, interleaved pipelines beyond the first "
    "model chunk, replicated key/value heads, vLLM's fused parameters and names, or another dtype "
    "on the wire."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """What Megatron-Core's planner took and made."""

    refused: str  # why it has no plan; empty where it has one
    loop_seconds: float
    loop_process_seconds: float
    imbalance: float  # busiest trainer's bytes over the trainers' mean
    busiest_bytes: int
    num_senders: int  # trainers that send a megabyte or more
    num_operations: int
    cannot: str = CANNOT


_COLUMN_CUT = ("linear_proj.weight", "linear_fc2.weight")
_GATED = "linear_fc1.weight"


def _metadata(
    spec: ModelSpec, layout: TrainerLayout, first_rank: int
) -> Iterator[tuple[int, ParameterMetadata]]:
    """Yield (rank, metadata) of every parameter of every rank; ranks count from ``first_rank``."""

    def group(rank: int, axis: str, size: int) -> list[int]:
        at = layout.coordinate(rank)
        places = {"tp": at.tp, "cp": at.cp, "dp": at.dp, "pp": at.pp}
        return [
            first_rank + layout.rank_of(TrainerCoordinate(**(places | {axis: index})))
            for index in range(size)
        ]

    ranks = range(layout.world_size)
    tp_groups = {first_rank + rank: group(rank, "tp", layout.tp) for rank in ranks}
    dp_groups = {first_rank + rank: group(rank, "dp", layout.dp) for rank in ranks}
    pp_groups = {first_rank + rank: group(rank, "pp", layout.pp) for rank in ranks}
    for block in megatron_side(spec, layout).blocks:
        for variant, holders in zip(block.variants, block.ranks, strict=True):
            for param in variant:
                for local_rank in holders:
                    rank = first_rank + local_rank
                    meta = _one(block.local, param)
                    meta.owner_rank = rank
                    meta.tensor_parallel_group_ranks = tp_groups[rank] if meta.is_tp else None
                    meta.data_parallel_group_ranks = dp_groups[rank]
                    meta.pipeline_parallel_group_ranks = pp_groups[rank]
                    yield rank, meta


def _one(prefix: str, param: LocalParam) -> ParameterMetadata:
    name = prefix + param.name
    is_tp = "norm" not in param.name  # Megatron marks its parallel layers so also where tp is 1
    return ParameterMetadata(
        name=name,
        shape=param.shape,
        dtype=torch.bfloat16,
        element_size=2,
        is_tp=is_tp,
        partition_dim=1 if is_tp and name.endswith(_COLUMN_CUT) else 0,
        partition_stride=2 if name.endswith(_GATED) else 1,
        resolved_name=name,
    )


def peer_figures(spec: ModelSpec, config: RunConfig) -> PeerFigures:
    """Plan the run's transfer with Megatron-Core; generators are Megatron models of the same tp.

    Raises:
        ConfigError: a mixture of experts, latent attention, or generators with pipeline stages.
    """
    layout, generator = config.trainer.layout, config.generator.layout
    if spec.num_experts or spec.mla or generator.pp > 1:
        raise ConfigError("--peer compares dense models and generators without pipeline stages")
    target_layout = TrainerLayout(
        tp=generator.tp, dp=generator.replicas, vocab_divisor=layout.vocab_divisor
    )
    sources: dict[str, list[ParameterMetadata]] = defaultdict(list)
    for _, meta in _metadata(spec, layout, 0):
        sources[meta.name].append(meta)
    wanted: dict[int, list[ParameterMetadata]] = defaultdict(list)
    for rank, meta in _metadata(spec, target_layout, layout.world_size):
        wanted[rank].append(meta)
    return _plan_all(sources, wanted, layout.world_size)


def _plan_all(
    sources: dict[str, list[ParameterMetadata]],
    wanted: dict[int, list[ParameterMetadata]],
    num_trainers: int,
) -> PeerFigures:
    sent = [0] * num_trainers
    wall = process = 0.0
    operations, refused = 0, ""
    for rank, params in wanted.items():
        begin, began = time.perf_counter(), time.process_time()
        try:
            found = [
                (
                    meta,
                    _determine_source_ranks_for_dst_param(
                        meta.name,
                        select_src_metadata_balanced(sources[meta.name], meta, rank),
                        meta,
                        rank,
                    ),
                )
                for meta in params
            ]
        except RuntimeError as error:
            refused = " ".join(str(error).split())
            break
        wall += time.perf_counter() - begin
        process += time.process_time() - began
        for meta, parts in found:
            operations += len(parts)
            for source, _, cut in parts:
                sent[source] += _bytes(meta, cut)
    return PeerFigures(
        refused=refused,
        loop_seconds=wall,
        loop_process_seconds=process,
        imbalance=0.0 if refused else max(sent) * len(sent) / sum(sent),
        busiest_bytes=max(sent),
        num_senders=sum(nbytes >= 1e6 for nbytes in sent),
        num_operations=operations,
    )


def _bytes(meta: ParameterMetadata, cut: tuple[slice, ...]) -> int:
    lengths = (len(range(size)[part]) for size, part in zip(meta.shape, cut, strict=True))
    return prod(lengths) * meta.element_size
