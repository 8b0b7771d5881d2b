"""Checksums of regions, by which both ends of a transfer compare what arrived.

Called by `megarl.ddma.engine`. Both ends batch alike, since batches follow from shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megarl.config import Verify

_SAMPLES = 64  # elements of a region that a sampled checksum reads, along its diagonal
_BATCH_NUMEL = 1 << 20  # elements that are widened to int64 at a time
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(regions: Sequence[Tensor], dtypes: Sequence[torch.dtype], verify: Verify) -> Tensor:
    """Return an int64 a region: the sum of its bits on the wire, each times an odd number of its
    place in the region; ``dtypes`` are those on the wire.
    """
    if verify is Verify.SAMPLED:
        return SampledChecksums(regions, dtypes).read()
    sums = torch.zeros(len(regions), dtype=torch.int64, device=regions[0].device)
    for dtype in dict.fromkeys(dtypes):
        mine = [(index, regions[index]) for index, other in enumerate(dtypes) if other == dtype]
        for batch in _batches(mine):
            bits = _bits([part for _, _, part in batch], dtype)
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


class SampledChecksums:
    """Sampled checksums of regions that stay where they are: their samples are found once."""

    def __init__(self, regions: Sequence[Tensor], dtypes: Sequence[torch.dtype]):
        self._count, self._device = len(regions), regions[0].device
        kinds = list(zip((region.dtype for region in regions), dtypes, strict=True))
        self._groups: list[tuple[torch.dtype, list[Tensor], Tensor, Tensor]] = []
        for kind in dict.fromkeys(kinds):
            mine = [index for index, other in enumerate(kinds) if other == kind]
            samples = [_diagonal(regions[index]) for index in mine]
            lengths = torch.tensor([len(sample) for sample in samples], device=self._device)
            owners = torch.tensor(mine, device=self._device).repeat_interleave(lengths)
            weights = torch.cat([torch.arange(len(sample)) for sample in samples]) * 2 + 1
            self._groups.append((kind[1], samples, owners, weights.to(self._device)))

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return the checksums of what the regions hold now."""
        sums = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        for dtype, samples, owners, weights in self._groups:
            sums.index_add_(0, owners, _bits(samples, dtype).mul_(weights))
        return sums


def _bits(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the parts' elements, one behind the other, as integers of their bits on the wire."""
    flat = torch.cat([part.flatten() for part in parts]) if len(parts) > 1 else parts[0].flatten()
    return flat.to(dtype).view(_BITS[dtype.itemsize]).to(torch.int64)


def _diagonal(region: Tensor) -> Tensor:
    """View elements of all parts of a region as one dimension, without a copy."""
    count = min(_SAMPLES, max(region.shape))
    steps = zip(region.shape, region.stride(), strict=True)
    return region.as_strided((count,), (sum(size // count * step for size, step in steps),))


_Batch = list[tuple[int, int, Tensor]]  # region's index, place of the part in it, the part


def _batches(regions: Sequence[tuple[int, Tensor]]) -> Iterator[_Batch]:
    batch: _Batch = []
    size = 0
    for index, region in regions:
        offset = 0
        for part in region.split(max(1, _BATCH_NUMEL * len(region) // region.numel())):
            if batch and size + part.numel() > _BATCH_NUMEL:
                yield batch
                batch, size = [], 0
            batch.append((index, offset, part))
            size += part.numel()
            offset += part.numel()
    yield batch
