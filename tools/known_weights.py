"""The weights that the benchmark of their transfer moves: every element's value in closed form.

So any rank can check its own part bit for bit. Called by the benchmark's ranks and schemes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_bridge.box import Box
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.spec import ModelSpec, RankManifest
from tools.weight_cases import DTYPE as DTYPE_NAME

DTYPE: torch.dtype = getattr(torch, DTYPE_NAME)


def empty_params(manifest: RankManifest) -> dict[str, Tensor]:
    """Return the rank's parameters, all zero."""
    return {param.name: torch.zeros(param.shape, dtype=DTYPE) for param in manifest.params}


def _values(shape: tuple[int, ...], box: Box, salt: int) -> Tensor:
    """Return a region of a tensor of known values: integers below 126, exact in every dtype."""
    flat = torch.zeros((), dtype=torch.int64)
    stride = 1
    for dim in reversed(range(len(shape))):
        index = torch.arange(box.start[dim], box.stop[dim]) * stride
        flat = flat + index.view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return (flat * 7919 + salt * 104_729) % 251 - 125


class KnownWeights:
    """The values that the trainer holds."""

    def __init__(self, spec: ModelSpec):
        self._tensors = {t.name: (n, t.shape) for n, t in enumerate(canonical_tensors(spec))}

    def _of(self, tensor: str, box: Box) -> Tensor:
        salt, shape = self._tensors[tensor]
        return _values(shape, box, salt)

    def fill(self, manifest: RankManifest, params: Mapping[str, Tensor]) -> None:
        """Write a rank's part of them."""
        for param in manifest.params:
            for shard in param.shards:
                params[param.name][shard.local.slices].copy_(self._of(shard.tensor, shard.box))

    def differing(self, manifest: RankManifest, params: Mapping[str, Tensor]) -> list[str]:
        """Return the parameters that are not a rank's part of them, padding being zero."""
        wrong: list[str] = []
        for param in manifest.params:
            expected = torch.zeros(param.shape, dtype=DTYPE)
            self.fill(RankManifest(rank=manifest.rank, params=(param,)), {param.name: expected})
            if not torch.equal(expected.view(torch.int16), params[param.name].view(torch.int16)):
                wrong.append(param.name)
        return wrong
