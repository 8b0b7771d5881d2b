"""Checksums of regions, by which both ends of a transfer compare what arrived.

Called by `megarl.ddma.engine`. Both ends batch alike, since batches follow from shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megarl.config import Verify

_SAMPLES_PER_DIM = 32  # a sampled checksum reads at most about 32 x 32 elements of a region
_BATCH_NUMEL = 1 << 20  # elements that are widened to int64 at a time
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(regions: Sequence[Tensor], dtypes: Sequence[torch.dtype], verify: Verify) -> Tensor:
    """Return an int64 a region: the sum of its bits on the wire, each times an odd number of its
    place in the region; ``dtypes`` are those on the wire.
    """
    sums = torch.zeros(len(regions), dtype=torch.int64, device=regions[0].device)
    for dtype in dict.fromkeys(dtypes):
        mine = [(index, regions[index]) for index, other in enumerate(dtypes) if other == dtype]
        for batch in _batches(mine, verify):
            values = torch.cat([part.to(dtype).flatten() for _, _, part in batch])
            bits = values.view(_BITS[dtype.itemsize]).to(torch.int64)
            owners, offsets, lengths = torch.tensor(
                [(index, offset, part.numel()) for index, offset, part in batch],
                device=bits.device,
            ).unbind(1)
            begins = offsets - lengths.cumsum(0) + lengths
            places = torch.arange(len(bits), device=bits.device)
            places += begins.repeat_interleave(lengths, output_size=len(bits))
            bits *= 2 * places + 1
            sums.index_add_(0, owners.repeat_interleave(lengths, output_size=len(bits)), bits)
    return sums


_Batch = list[tuple[int, int, Tensor]]  # region's index, place of the part in it, the part


def _batches(regions: Sequence[tuple[int, Tensor]], verify: Verify) -> Iterator[_Batch]:
    batch: _Batch = []
    size = 0
    for index, region in regions:
        offset = 0
        for part in _parts(region, verify):
            if batch and size + part.numel() > _BATCH_NUMEL:
                yield batch
                batch, size = [], 0
            batch.append((index, offset, part))
            size += part.numel()
            offset += part.numel()
    yield batch


def _parts(region: Tensor, verify: Verify) -> Sequence[Tensor]:
    if verify is Verify.SAMPLED:
        return [
            region[tuple(slice(None, None, max(1, n // _SAMPLES_PER_DIM)) for n in region.shape)]
        ]
    return region.split(max(1, _BATCH_NUMEL * len(region) // region.numel()))
