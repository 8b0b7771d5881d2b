"""Comparing two checkpoints of any formats, tensor by tensor, in the canonical space.

Called by the command line. Both sides are read as a Hugging Face checkpoint would hold them, by the
plans that would convert them, window by window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import prod

import torch
from torch import Tensor

from megatron_bridge.box import Box
from megatron_bridge.io.coverage import check_stored
from megatron_bridge.io.gather import Gather, Reader
from megatron_bridge.io.output import in_threads
from megatron_bridge.io.store import Stored
from megatron_bridge.layouts.hf import hf_side
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.plan import plan
from megatron_bridge.spec import CanonicalTensor, ModelSpec

_WINDOW_NUMEL = 2 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a tensor differs, or one of the model's sizes."""

    name: str  # of a tensor, or a field of `ModelSpec`
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two checkpoints have in common and what not."""

    num_tensors: int  # of both together
    num_elements: int  # that were compared
    sizes: tuple[Difference, ...]  # of the models
    differences: tuple[Difference, ...]  # of tensors, in the model's order
    dtypes: tuple[
        Difference, ...
    ]  # tensors whose values are equal as far as the narrower dtype goes

    @property
    def is_equal(self) -> bool:
        return not self.sizes and not self.differences


def verify(
    first: Stored, second: Stored, advance: Callable[[int], None], workers: int = 2
) -> Comparison:
    """Compare every tensor; calls ``advance`` from any thread with numbers of elements compared.

    Equal dtypes are compared bit by bit. Where one is narrower, the other's values are rounded to it
    first; FP8 counts as float32, its elements times their scales.

    Raises:
        ConversionError: a checkpoint is damaged.
    """
    tensors = [_tensors(stored) for stored in (first, second)]
    gathers = [_gather(stored) for stored in (first, second)]
    names = list(tensors[0] | tensors[1])
    found: dict[str, Difference] = {}
    dtypes: dict[str, Difference] = {}
    common: list[CanonicalTensor] = []
    for name in names:
        shapes = [held[name].shape if name in held else None for held in tensors]
        if shapes[0] == shapes[1]:
            common.append(tensors[0][name])
        else:
            said = " and ".join("absent" if shape is None else str(list(shape)) for shape in shapes)
            found[name] = Difference(name=name, what=f"is {said}")

    def compare(tensor: CanonicalTensor, stop: threading.Event) -> None:
        name = tensor.name
        with gathers[0].reader(name) as one, gathers[1].reader(name) as other:
            what = _compare(tensor, (one, other), advance, stop)
            if what:
                found[name] = Difference(name=name, what=what)
            elif one.dtype != other.dtype:
                dtypes[name] = Difference(name=name, what=f"is {one.dtype} and {other.dtype}")

    in_threads(common, compare, workers)
    return Comparison(
        num_tensors=len(names),
        num_elements=sum(prod(tensor.shape) for tensor in common),
        sizes=tuple(_of_sizes(first.spec, second.spec)),
        differences=tuple(found[name] for name in names if name in found),
        dtypes=tuple(dtypes[name] for name in names if name in dtypes),
    )


def _tensors(stored: Stored) -> dict[str, CanonicalTensor]:
    return {tensor.name: tensor for tensor in canonical_tensors(stored.spec)}


def _of_sizes(first: ModelSpec, second: ModelSpec) -> Iterator[Difference]:
    """Yield what differs of the two models, but for how their weights were drawn."""
    for field in fields(ModelSpec):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if one != other and field.name != "initializer_range":
            yield Difference(name=field.name, what=f"is {one} and {other}")


def _gather(stored: Stored) -> Gather:
    check_stored(stored)
    return Gather(stored, plan(stored.side, hf_side(stored.spec, 0, stored.side.dtype)))


class _Tally:
    """Counts the elements of one tensor that differ."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""
        self.largest = 0.0

    def add(self, box: Box, one: Tensor, other: Tensor) -> None:
        """Compare a window; both are of one dtype. NaNs of the same bits are equal."""
        bits = _BITS[one.itemsize]
        unequal = one.view(bits) != other.view(bits)
        if not unequal.any():
            return
        places = unequal.nonzero()
        if not self.count:
            at = places[0].tolist()
            values = [float(tensor[tuple(at)]) for tensor in (one, other)]
            index = [low + offset for low, offset in zip(box.start, at, strict=True)]
            self.first = f"{values[0]:.9g} and {values[1]:.9g} at {index}"
        self.count += len(places)
        distance = (one[unequal].float() - other[unequal].float()).abs().max()
        self.largest = max(self.largest, float(distance))


def _compare(
    tensor: CanonicalTensor,
    readers: tuple[Reader, Reader],
    advance: Callable[[int], None],
    stop: threading.Event,
) -> str:
    """Return how two tensors of one shape differ; empty where they do not."""
    dtypes = [_plain(reader.dtype) for reader in readers]
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    if dtypes[0] != dtypes[1] and dtypes[0].itemsize == dtypes[1].itemsize:
        narrow = torch.float32  # neither float16 nor bfloat16 has all values of the other
    whole, tally = Box.of_shape(tensor.shape), _Tally()
    rows = max(1, _WINDOW_NUMEL * whole.shape[0] // whole.numel)
    for box in readers[0].windows(whole, rows):
        if stop.is_set():
            break
        one, other = (
            reader.window(box, dtype).to(narrow)
            for reader, dtype in zip(readers, dtypes, strict=True)
        )
        tally.add(box, one, other)
        advance(box.numel)
    if not tally.count:
        return ""
    return (
        f"differs in {tally.count} of {whole.numel} elements, by up to {tally.largest:.3g}; the "
        f"first are {tally.first}"
    )


def _plain(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "float8_e4m3fn" else getattr(torch, dtype)
