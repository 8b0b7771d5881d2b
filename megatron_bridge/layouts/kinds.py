"""Layers by kind: layouts lay out each kind once, whatever the number of layers.

Called by the layouts only. Tensor names of a kind lack the layer's prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from megatron_bridge.models.families import layer_tensors, outer_tensors
from megatron_bridge.spec import CanonicalTensor, ModelSpec, Part

Parts = dict[Part, CanonicalTensor]


@dataclass(slots=True)
class Kind:
    """The tensors of one layer, or of what stands outside the layers."""

    parts: Parts = field(default_factory=dict)
    experts: dict[int, Parts] = field(default_factory=dict)


def layer_prefix(layer: int) -> str:
    """Return the prefix of a layer's canonical names, which is the same in all families."""
    return f"model.layers.{layer}."


@lru_cache(maxsize=8)
def kinds_of(spec: ModelSpec) -> tuple[Kind, tuple[Kind, ...]]:
    """Return what stands outside the layers, and each layer's kind; equal layers share one object."""
    known: dict[tuple[bool, bool], Kind] = {}
    kinds: list[Kind] = []
    for layer in range(spec.num_layers + spec.num_mtp_layers):
        key = (spec.has_experts(layer), layer >= spec.num_layers)
        if key not in known:
            prefix = len(layer_prefix(layer))
            tensors = layer_tensors(spec, layer)
            known[key] = _kind([replace(t, name=t.name[prefix:], layer=None) for t in tensors])
        kinds.append(known[key])
    return _kind(outer_tensors(spec)), tuple(kinds)


def _kind(tensors: list[CanonicalTensor]) -> Kind:
    kind = Kind()
    for tensor in tensors:
        if tensor.expert is None:
            kind.parts[tensor.part] = tensor
        else:
            kind.experts.setdefault(tensor.expert, {})[tensor.part] = tensor
    return kind
