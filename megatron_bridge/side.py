"""What all ranks of one world hold, said once for those that hold alike; no torch.

Layouts make a `Side`, the planner matches two. A layer's parameters are written once for each kind
of layer and each place in the parallel grid: a model of a hundred equal layers on a thousand ranks
costs as much as one layer on one replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_bridge.spec import LocalParam, RankManifest, Shard

Variant = tuple[LocalParam, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Parameters that stand together: of one layer, or of none.

    Names in the variants lack the two prefixes, so blocks of one kind share one ``variants`` object.
    """

    canonical: str  # prefix of its tensors' names, such as "model.layers.3."
    local: str  # prefix of its parameters' names
    variants: tuple[Variant, ...]  # what each place in the grid holds
    ranks: tuple[tuple[int, ...], ...]  # who holds each variant: replicas of one another
    is_copy: bool = False  # another block holds the same elements, which are read there

    def expand(self, variant: int) -> Iterator[LocalParam]:
        """Yield a variant's parameters under their full names."""
        canonical, local = self.canonical, self.local
        for param in self.variants[variant]:
            # Not by `replace`, which takes four times as long: a mixture has tens of thousands.
            shards = [
                Shard(tensor=canonical + s.tensor, box=s.box, param=local + s.param, local=s.local)
                for s in param.shards
            ]
            yield LocalParam(
                name=local + param.name,
                shape=param.shape,
                shards=tuple(shards),
                dtype=param.dtype,
                quantization=param.quantization,
                scales=local + param.scales if param.scales else "",
                derived=param.derived,
            )


@dataclass(frozen=True)
class Side:
    """One world's blocks; ``dtype`` is that of every parameter that names none itself."""

    blocks: tuple[Block, ...]
    dtype: str = "float32"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        groups = {ranks for block in self.blocks for ranks in block.ranks}
        return tuple(sorted({rank for ranks in groups for rank in ranks}))

    def manifest(self, rank: int) -> RankManifest:
        """Return all that ``rank`` holds."""
        params = [
            param
            for block in self.blocks
            for variant, ranks in enumerate(block.ranks)
            if rank in ranks
            for param in block.expand(variant)
        ]
        return RankManifest(rank=rank, params=tuple(params))

    def manifests(self) -> tuple[RankManifest, ...]:
        """Return the manifests of all ranks, ascending; for small worlds."""
        return tuple(self.manifest(rank) for rank in self.ranks)
