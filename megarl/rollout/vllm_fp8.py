"""FP8 weights in vLLM: how an engine holds them as they were sent, and which kernels read them so.

Used by `megarl.rollout.vllm_engine` and `vllm_worker`; importing this file imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe
from torch import Tensor
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import (
    CutlassFp8BlockScaledMMKernel,
    CutlassFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.triton import (
    TritonFp8BlockScaledMMKernel,
    TritonFP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod

from megatron_bridge.operations import BLOCK
from megatron_bridge.parallel import Quantization

# These read [out, in] elements and fp32 scales; DeepGEMM's and Marlin's rewrite both after loading.
_PLAIN_KERNELS = (
    CutlassFp8BlockScaledMMKernel,
    CutlassFP8ScaledMMLinearKernel,
    TritonFp8BlockScaledMMKernel,
    TritonFP8ScaledMMLinearKernel,
    CPUFp8BlockScaledMMKernel,  # as `keep_fp8_weights_live` leaves it
)
_PLAIN_EXPERTS = (Fp8MoeBackend.TRITON, Fp8MoeBackend.BATCHED_TRITON, Fp8MoeBackend.CPU)


def quantization_overrides(how: Quantization) -> dict[str, Any]:
    """Return what an FP8 checkpoint's config.json would say; nothing where weights are plain."""
    if how is Quantization.NONE:
        return {}
    fp8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if how is Quantization.FP8_BLOCK:
        fp8["weight_block_size"] = [BLOCK, BLOCK]
    return {"quantization_config": fp8}


def _scaled_back(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [..., out, in] times the scales of its blocks."""
    rows, columns = weight.shape[-2:]
    scales = scales.repeat_interleave(BLOCK, -2)[..., :rows, :]
    scales = scales.repeat_interleave(BLOCK, -1)[..., :columns]
    return (weight.float() * scales).to(dtype)


def _multiply(
    self: CPUFp8BlockScaledMMKernel,
    layer: Any,
    x: Tensor,
    bias: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """Multiply [T, in] by a weight [out, in] that is scaled back at each call."""
    weight = _scaled_back(layer.weight, layer.weight_scale_inv, x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def keep_fp8_weights_live(apply_experts: Callable[..., None]) -> None:
    """Make vLLM's CPU build run block-wise FP8 layers on any CPU, from their live weights.

    Its own kernels need AMX and pack the weights while loading: later writes would be lost.

    Args:
        apply_experts: adds up the chosen ones of unquantised experts.
    """

    def apply(
        self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, **routing: Any
    ) -> None:
        w1 = _scaled_back(w1, self.w1_scale, hidden_states.dtype)
        w2 = _scaled_back(w2, self.w2_scale, hidden_states.dtype)
        apply_experts(self, output, hidden_states, w1, w2, **routing)

    kernel: Any = CPUFp8BlockScaledMMKernel
    kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    kernel.process_weights_after_loading = lambda self, layer: None
    kernel.apply_weights = _multiply
    experts: Any = cpu_moe.CPUExpertsFp8
    experts._supports_current_device = staticmethod(lambda: True)
    experts.apply = apply
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)


def is_plain(method: Any) -> bool:
    """Whether a quantised layer computes with its weights as they lie."""
    if isinstance(method, Fp8MoEMethod):
        return method.fp8_backend in _PLAIN_EXPERTS
    return isinstance(method, Fp8LinearMethod) and isinstance(method.fp8_linear, _PLAIN_KERNELS)
