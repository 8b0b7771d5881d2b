"""Which of vLLM's kernels its CPU engine computes with; `vllm_engine` asks while it builds one.

vLLM's CPU build has kernels of RMSNorm that its operations do not know of outside GPUs: torch's own
operations, which it takes instead, make seven passes over memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

_PROVIDER = "megarl_cpu"


def cpu_kernels(model_path: str) -> dict[str, Any]:
    """Return arguments of vLLM's engine; call it before the engine is built."""
    current_platform.import_kernels()
    if _PROVIDER not in ir.ops.rms_norm.impls:
        _register_norms()
    config = json.loads((Path(model_path) / "config.json").read_text())
    # the CPU build rotates latent attention's queries wrongly
    custom_ops = ["-rotary_embedding"] if config.get("kv_lora_rank") else []
    norms = {op: [_PROVIDER, "native"] for op in ("rms_norm", "fused_add_rms_norm")}
    return {"compilation_config": {"custom_ops": custom_ops}, "ir_op_priority": norms}


def _register_norms() -> None:
    @ir.ops.rms_norm.register_impl(_PROVIDER, supports_args=_supports_norm)
    def rms_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(
        _PROVIDER, supports_args=_supports_fused_norm, inplace=True
    )
    def fused_add_rms_norm(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual


def _supports_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return (
        x.dim() == 2
        and x.is_contiguous()
        and variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
    )


def _supports_fused_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return x_residual.is_contiguous() and _supports_norm(x, weight, epsilon, variance_size)
