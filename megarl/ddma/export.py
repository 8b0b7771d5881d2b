"""Writing the trainer's weights as a Hugging Face folder, tensor by tensor.

Called by the trainer executor on every one of its ranks at the same time. The plan is that of a
weight transfer whose only target is rank 0's view of the checkpoint; rank 0 holds one whole tensor
and one file's worth of tensors at a time, never the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.ddma.transports import (
    CollectiveTransport,
    Group,
    LoopbackHub,
    LoopbackTransport,
    Transport,
    Wait,
)
from megatron_bridge.io.hf import HfWriter
from megatron_bridge.layouts.hf import hf_manifest
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.operations import Operation, schedule
from megatron_bridge.plan import plan
from megatron_bridge.spec import ModelSpec, RankManifest

_ROUND_NUMEL = 1 << 24
_ROUND_OPERATIONS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HfExport:
    """What to export and where to; alike on all trainer ranks."""

    spec: ModelSpec
    manifests: tuple[RankManifest, ...]  # of all trainer ranks; ranks as in the group
    dtype: torch.dtype  # of the written tensors
    source_folder: Path  # gives config.json and the tokenizer
    target_folder: Path  # must not exist
    max_shard_bytes: int = 4 << 30


def export_hf(
    export: HfExport, params: Mapping[str, Tensor], group: Group | None, wait: Wait
) -> None:
    """Write the folder on rank 0; every rank of ``group`` enters (None for a trainer of one rank).

    Raises:
        ConversionError: the target exists or the source has no config.json.
        ChannelTimeout, ChannelError: a peer did not take part.
    """
    rank = 0 if group is None else group.rank()
    device = next(iter(params.values())).device
    transport: Transport
    if group is None:
        transport = LoopbackTransport(LoopbackHub(), rank, export.dtype)
    else:
        transport = CollectiveTransport(group, export.dtype, device, wait=wait)
    operations: dict[str, list[Operation]] = defaultdict(list)
    for item in plan(export.manifests, [hf_manifest(export.spec, 0)]).operations:
        operations[item.tensor].append(item)
    writer = (
        HfWriter(export.source_folder, export.target_folder, export.max_shard_bytes)
        if rank == 0
        else nullcontext()
    )
    with writer as files:
        for tensor in canonical_tensors(export.spec):
            whole = torch.empty(
                tensor.shape if rank == 0 else (0,), dtype=export.dtype, device=device
            )
            transport.register({**params, tensor.name: whole})
            for items in schedule(operations[tensor.name], _ROUND_OPERATIONS, _ROUND_NUMEL):
                transport.post(items)
            transport.wait()
            if files is not None:
                files.add(tensor.name, whole)
    transport.close()
