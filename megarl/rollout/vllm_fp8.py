"""FP8 weights in vLLM: how an engine holds them as they were sent, and which kernels read them so.

Used by `megarl.rollout.vllm_engine` and `vllm_worker`; importing this file imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
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
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

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


def quantization_overrides(how: Quantization) -> dict[str, Any]:
    """Return what an FP8 checkpoint's config.json would say; nothing where weights are plain."""
    if how is Quantization.NONE:
        return {}
    fp8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if how is Quantization.FP8_BLOCK:
        fp8["weight_block_size"] = [BLOCK, BLOCK]
    return {"quantization_config": fp8}


def _apply_scaled_back(
    self: CPUFp8BlockScaledMMKernel,
    layer: Any,
    x: Tensor,
    bias: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """Multiply [T, in] by a weight [out, in] that is scaled back at each call."""
    rows, columns = layer.weight.shape
    scales = layer.weight_scale_inv.repeat_interleave(BLOCK, 0)[:rows]
    scales = scales.repeat_interleave(BLOCK, 1)[:, :columns]
    weight = (layer.weight.float() * scales).to(x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def keep_fp8_weights_live() -> None:
    """Make vLLM's CPU build run block-wise FP8 linear layers on any CPU, from their live weights.

    Its own kernel needs AMX and packs the weights while loading: later writes would be lost.
    """
    kernel: Any = CPUFp8BlockScaledMMKernel
    kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    kernel.process_weights_after_loading = lambda self, layer: None
    kernel.apply_weights = _apply_scaled_back


def is_plain(method: Any) -> bool:
    """Whether a quantised linear layer computes with its weights as they lie."""
    return isinstance(method, Fp8LinearMethod) and isinstance(method.fp8_linear, _PLAIN_KERNELS)
