"""Cutting fused parameters: which rows or columns of which canonical tensors a rank holds.

A layout describes the unsharded fused parameter as `Segment`s and cuts a rank's part out of it.
Called by the layouts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bridge.box import Box
from megatron_bridge.spec import CanonicalTensor, LocalParam, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """``count`` rows of ``tensor`` from ``start``, lying at row ``at`` of a fused parameter."""

    tensor: CanonicalTensor
    start: int
    at: int
    count: int


def consecutive(pieces: Sequence[tuple[CanonicalTensor, int, int]]) -> list[Segment]:
    """Lay (tensor, first row, number of rows) one below the other."""
    segments: list[Segment] = []
    at = 0
    for tensor, start, count in pieces:
        segments.append(Segment(tensor=tensor, start=start, at=at, count=count))
        at += count
    return segments


def cut_rows(name: str, segments: Sequence[Segment], low: int, high: int) -> LocalParam:
    """Return the parameter that holds fused rows ``low`` to ``high``; rows in no segment are padding."""
    shards: list[Shard] = []
    for segment in segments:
        first = max(low, segment.at)
        stop = min(high, segment.at + segment.count)
        if first >= stop:
            continue
        width = segment.tensor.shape[1:]
        zeros = (0,) * len(width)
        offset = segment.start - segment.at
        shards.append(
            Shard(
                tensor=segment.tensor.name,
                box=Box((first + offset, *zeros), (stop + offset, *width)),
                param=name,
                local=Box((first - low, *zeros), (stop - low, *width)),
            )
        )
    shape = (high - low, *segments[0].tensor.shape[1:])
    return LocalParam(name=name, shape=shape, shards=tuple(shards))


def cut_columns(
    name: str, tensors: Sequence[CanonicalTensor], parts: int, index: int
) -> LocalParam:
    """Return part ``index`` of ``parts`` equal column blocks of matrices of one shape, stacked."""
    rows, columns = tensors[0].shape
    width = columns // parts
    shards = tuple(
        Shard(
            tensor=tensor.name,
            box=Box((0, index * width), (rows, (index + 1) * width)),
            param=name,
            local=Box((place * rows, 0), ((place + 1) * rows, width)),
        )
        for place, tensor in enumerate(tensors)
    )
    return LocalParam(name=name, shape=(len(tensors) * rows, width), shards=shards)


def whole(name: str, tensor: CanonicalTensor) -> LocalParam:
    """Return the parameter that is the whole tensor."""
    box = Box.of_shape(tensor.shape)
    shard = Shard(tensor=tensor.name, box=box, param=name, local=box)
    return LocalParam(name=name, shape=tensor.shape, shards=(shard,), dtype=tensor.dtype)
