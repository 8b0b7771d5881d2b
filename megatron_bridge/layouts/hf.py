"""Where weights lie in a Hugging Face checkpoint: every tensor whole, under its own name."""

from __future__ import annotations

from megatron_bridge.layouts.segments import whole
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.spec import ModelSpec, RankManifest


def hf_manifest(spec: ModelSpec, rank: int) -> RankManifest:
    """Return the manifest of a rank that holds the whole checkpoint."""
    params = tuple(whole(tensor.name, tensor) for tensor in canonical_tensors(spec))
    return RankManifest(rank=rank, params=params)
