"""Small worlds for tests of weight transfers: sides, plans, and what each rank must hold.

Expected tensors come from the dense oracle of the layouts, which shares no code with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.layouts.vllm import vllm_side
from megatron_bridge.models.checks import layers_of_stage
from megatron_bridge.parallel import GeneratorLayout, Quantization, TrainerLayout
from megatron_bridge.plan import PlanPolicy, TransferPlan, plan
from megatron_bridge.quantize import quantize_blockwise, quantize_per_tensor
from megatron_bridge.spec import ModelSpec
from tests.unit.megatron_bridge.oracle import (
    Tensors,
    hf_tensors,
    make_spec,
    megatron_tensors,
    vllm_tensors,
)


@dataclass(frozen=True, kw_only=True)
class WeightCase:
    """A trainer in float32 and generators in ``dtype``; ranks follow one another."""

    spec: ModelSpec = field(default_factory=lambda: make_spec(num_layers=2, qkv_bias=True))
    trainer: TrainerLayout
    generator: GeneratorLayout
    policy: PlanPolicy = field(default_factory=PlanPolicy)
    dtype: str = "float32"
    is_exact: bool = False  # weights are numbers that ``dtype`` has too

    @cached_property
    def plan(self) -> TransferPlan:
        source = megatron_side(self.spec, self.trainer)
        first = self.trainer.world_size
        target = vllm_side(self.spec, self.generator, first_rank=first, dtype=self.dtype)
        return plan(source, target, self.policy)

    @property
    def trainers(self) -> range:
        return range(self.trainer.world_size)

    @property
    def generators(self) -> range:
        return range(self.trainer.world_size, self.size)

    @property
    def size(self) -> int:
        return self.trainer.world_size + self.generator.world_size

    def whole(self, version: int) -> Tensors:
        """Return the checkpoint, float32."""
        tensors = hf_tensors(self.spec, torch.float64)
        dtype = getattr(torch, self.dtype) if self.is_exact else torch.float32
        return {name: (t + version).sin().to(dtype).float() for name, t in tensors.items()}

    def expected(self, rank: int, version: int) -> Tensors:
        """Return what ``rank`` holds, or must hold, of a version; padding is zero."""
        return self.all_expected(version, (rank,))[rank]

    def all_expected(self, version: int, ranks: tuple[int, ...] = ()) -> dict[int, Tensors]:
        whole, found = self.whole(version), {}
        if not ranks or min(ranks) in self.trainers:
            stages = range(self.trainer.pp)
            layers = [list(layers_of_stage(self.spec, self.trainer, pp)) for pp in stages]
            found = megatron_tensors(self.spec, whole, self.trainer, layers)
        whole = {name: t.to(getattr(torch, self.dtype)) for name, t in whole.items()}
        for rank in ranks or self.generators:
            if rank in self.generators:
                tp, pp, ep = self.generator.tp, self.generator.pp, self.generator.ep
                local = (rank - len(self.trainers)) % (tp * pp)
                tensors = vllm_tensors(self.spec, whole, tp, local, ep=ep, pp=pp)
                found[rank] = quantized_tensors(tensors, self.generator.quantization)
        return found


_LINEAR = ("_proj.weight", "_proj_with_mqa.weight", "w13_weight", "w2_weight")


def quantized_tensors(tensors: Tensors, how: Quantization) -> Tensors:
    """Return what a quantised generator holds instead of plain tensors: each one quantised whole."""
    if how is Quantization.NONE:
        return tensors
    blockwise = how is Quantization.FP8_BLOCK
    quantize = quantize_blockwise if blockwise else quantize_per_tensor
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(_LINEAR):
            out[name] = tensor
            continue
        elements = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
        grid = [-(-size // 128) for size in tensor.shape] if blockwise else [1]
        scales = torch.empty(grid)
        quantize(tensor, elements, scales)
        out |= {name: elements, f"{name}_scale{'_inv' if blockwise else ''}": scales}
    return out


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def spoil(tensors: Tensors) -> None:
    """Fill with what no transfer may leave."""
    for tensor in tensors.values():
        bits(tensor).fill_(0x5A)


def differing(got: Tensors, expected: Tensors) -> list[str]:
    """Return the names that differ bitwise, zero padding included."""
    assert got.keys() == expected.keys()
    return [
        name for name, tensor in expected.items() if not torch.equal(bits(got[name]), bits(tensor))
    ]
