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

from megarl.ddma.transports.base import Transport
from megarl.ddma.transports.collective import CollectiveTransport
from megarl.ddma.transports.loopback import LoopbackHub, LoopbackTransport
from megarl.world import Group, Wait
from megatron_bridge.io.hf import HfWriter
from megatron_bridge.layouts.hf import hf_side
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.operations import Message
from megatron_bridge.plan import PlanPolicy, plan
from megatron_bridge.side import Side
from megatron_bridge.spec import ModelSpec

_EACH_ALONE = PlanPolicy(alone_bytes=1)  # no message carries regions of two tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class HfExport:
    """What to export and where to; alike on all trainer ranks."""

    spec: ModelSpec
    side: Side  # of all trainer ranks; ranks as in the group
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
        transport = LoopbackTransport(LoopbackHub(1), rank)
    else:
        transport = CollectiveTransport(group, device, wait=wait)
    dtype = str(export.dtype).removeprefix("torch.")
    messages: dict[str, list[Message]] = defaultdict(list)
    for message in plan(export.side, hf_side(export.spec, 0, dtype), _EACH_ALONE).messages(rank):
        messages[message.items[0].tensor].append(message)
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
            transport.register({**params, tensor.name: whole}, messages[tensor.name])
            transport.begin()
            transport.post(messages[tensor.name])
            transport.wait()
            if files is not None:
                files.add(tensor.name, whole)
    transport.close()
