"""Arithmetic of a training step, for the utilisation that the metrics report; no torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.spec import ModelSpec


def training_flops(spec: ModelSpec, lengths: Iterable[int]) -> float:
    """Return the floating-point operations of a forward and a backward pass over sequences.

    6 per weight and token (2 forward, 4 backward), and causal attention's two products,
    2 x 2 x length^2 / 2 a layer and query feature forward, thrice that in all (PaLM, appendix B,
    halved for the causal mask; with latent attention a value has fewer features than a query). Of a layer's experts only those that a token goes through count.
    Recomputation is not counted: it is not model work.
    """
    used = spec.experts_per_token / spec.num_experts if spec.num_experts else 1.0
    weights = sum(
        prod(tensor.shape) * (1.0 if tensor.expert is None else used)
        for tensor in canonical_tensors(spec)
        if len(tensor.shape) > 1
    )
    features = (spec.head_dim + spec.mla.v_head_dim) / 2 if spec.mla else spec.head_dim
    attention = 6 * spec.num_layers * spec.num_heads * features
    return float(sum(6 * weights * length + attention * length**2 for length in lengths))
