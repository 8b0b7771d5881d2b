"""Checksums against the definition, written out in Python integers."""

import pytest
import torch

from megarl.ddma.checksums import Verify, checksums


def test_a_full_checksum_is_the_weighted_sum_of_the_bits() -> None:
    regions = [torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([7.0])]
    bits = [[int(value) for value in region.view(torch.int32).flatten()] for region in regions]
    expected = [1 * bits[0][0] + 3 * bits[0][1] + 5 * bits[0][2] + 7 * bits[0][3], 1 * bits[1][0]]
    assert checksums(regions, [torch.float32] * 2, Verify.FULL).tolist() == expected


def test_the_wire_dtype_decides() -> None:
    region = torch.tensor([1.0, 1.0001])
    near = torch.tensor([1.0, 1.0])
    for verify in (Verify.FULL, Verify.SAMPLED):
        pair = [checksums([r], [torch.bfloat16], verify) for r in (region, near, region.bfloat16())]
        assert pair[0] == pair[1] == pair[2]
        assert checksums([region], [torch.float32], verify) != checksums(
            [near], [torch.float32], verify
        )


def test_a_checksum_is_that_of_the_region_alone() -> None:
    """Regions of two dtypes, batched together or apart, in any order."""
    torch.manual_seed(1)
    regions = [
        torch.randn(70, 33),
        torch.randn(5).bfloat16(),
        torch.randn(900, 1300),
        torch.ones(1),
    ]
    dtypes = [region.dtype for region in regions]
    for verify in (Verify.FULL, Verify.SAMPLED):
        together = checksums(regions, dtypes, verify)
        pairs = zip(regions, dtypes, strict=True)
        assert torch.equal(together, torch.cat([checksums([r], [d], verify) for r, d in pairs]))
        assert torch.equal(together.flip(0), checksums(regions[::-1], dtypes[::-1], verify))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_of_a_large_region_counts_in_full(dtype: torch.dtype) -> None:
    """More than one batch, a strided region, and swapped values."""
    torch.manual_seed(0)
    whole = torch.randn(1500, 2000).to(dtype)
    region = whole[:, 300:1500]

    def sums(changed: torch.Tensor) -> torch.Tensor:
        return checksums([changed, whole[:3]], [dtype, dtype], Verify.FULL)

    first = sums(region)
    assert torch.equal(first, sums(region.clone()))
    for row, column in ((0, 0), (700, 601), (1499, 1199)):
        changed = region.clone()
        changed[row, column] += 1
        assert sums(changed)[0] != first[0]
        assert sums(changed)[1] == first[1]
    swapped = region.clone()
    swapped[[3, 4]] = region[[4, 3]]
    assert sums(swapped)[0] != first[0]
