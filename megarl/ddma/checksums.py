"""Checksums of regions, by which both ends of a transfer compare what arrived.

Called by `megarl.ddma.engine`. Both ends batch alike, since batches follow from shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

import torch
from torch import Tensor

_SAMPLES_PER_DIM = 32  # a sampled checksum reads at most about 32 x 32 elements of a region
_BATCH_NUMEL = 1 << 20  # elements that are widened to int64 at a time
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Verify(StrEnum):
    """How much of each region the checksums after a transfer read."""

    NONE = "none"
    SAMPLED = "sampled"
    FULL = "full"


@torch.no_grad()
def checksums(regions: Sequence[Tensor], wire_dtype: torch.dtype, verify: Verify) -> Tensor:
    """Return an int64 a region: the sum of its wire bits, each times an odd number of its place."""
    sums = torch.zeros(len(regions), dtype=torch.int64, device=regions[0].device)
    for batch in _batches(regions, verify):
        values = torch.cat([part.to(wire_dtype).flatten() for _, part in batch])
        bits = values.view(_BITS[wire_dtype.itemsize]).to(torch.int64)
        bits *= torch.arange(1, 2 * len(bits), 2, device=bits.device)
        owners = torch.tensor([index for index, _ in batch], device=bits.device)
        lengths = torch.tensor([part.numel() for _, part in batch], device=bits.device)
        sums.index_add_(0, owners.repeat_interleave(lengths, output_size=len(bits)), bits)
    return sums


def _batches(regions: Sequence[Tensor], verify: Verify) -> Iterator[list[tuple[int, Tensor]]]:
    batch: list[tuple[int, Tensor]] = []
    size = 0
    for index, region in enumerate(regions):
        for part in _parts(region, verify):
            if batch and size + part.numel() > _BATCH_NUMEL:
                yield batch
                batch, size = [], 0
            batch.append((index, part))
            size += part.numel()
    yield batch


def _parts(region: Tensor, verify: Verify) -> Sequence[Tensor]:
    if verify is Verify.SAMPLED:
        return [
            region[tuple(slice(None, None, max(1, n // _SAMPLES_PER_DIM)) for n in region.shape)]
        ]
    return region.split(max(1, _BATCH_NUMEL * len(region) // region.numel()))
