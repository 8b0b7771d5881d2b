"""RMSNorm and SwiGLU of the local layer spec, with gradients in closed form.

Called by the layers that `architecture` builds. Autograd's own backward of either makes more
passes over memory on a CPU, and its halves of a gated input are not contiguous, which torch computes
more slowly. On GPUs torch's and Megatron's fused kernels do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vecdot(x, x).unsqueeze(-1)
        scale.div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        (grad,) = grads
        size = weight.shape[0]
        products = (grad * normed).reshape(-1, size)
        along = (products @ weight).div_(-size).view_as(scale)
        grad_x = (grad * weight).addcmul_(normed, along).mul_(scale)
        return grad_x, products.sum(0), None


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm for Megatron's specs; unlike Megatron's wrapper of torch's, it knows sequence
    parallelism: its weight is marked, so that its gradient is summed over the tensor-parallel group.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or x.dtype != torch.float32:
            return super().forward(x)
        return _RmsNorm.apply(x, self.weight, self.eps)  # pyright: ignore


class _SwiGlu(torch.autograd.Function):
    """y = silu(a) b for x = [a, b] along the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, linear = (half.contiguous() for half in x.chunk(2, -1))
        silu = torch.nn.functional.silu(gate)
        ctx.save_for_backward(gate, linear, silu)
        return silu * linear

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate, linear, silu = ctx.saved_tensors
        (grad,) = grads
        return torch.cat([torch.ops.aten.silu_backward(grad * linear, gate), grad * silu], -1)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(a) b [..., f] for x = [a, b] [..., 2f]."""
    return _SwiGlu.apply(x)  # pyright: ignore
