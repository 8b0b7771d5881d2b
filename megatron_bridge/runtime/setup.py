"""Megatron's process groups, device and optional accelerators; called by the trainer executor.

The default process group exists before: it is the executor world, counted from rank 0.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from megatron_bridge.errors import LayoutError
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.runtime.cpu import apply_substitutions


def acceleration() -> dict[str, bool]:
    """Report what Megatron can use here: cuda, transformer_engine, apex, flash_attn.

    Megatron imports Apex's fused kernels (norm, Adam, multi-tensor) by itself where Transformer
    Engine does not provide them; without either it falls back to torch.
    """
    cuda = torch.cuda.is_available()
    found = {"cuda": cuda}
    for package in ("transformer_engine", "apex", "flash_attn"):
        found[package] = cuda and importlib.util.find_spec(package) is not None
    return found


def device() -> torch.device:
    """Return where this rank's model lives."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def initialize(layout: TrainerLayout, seed: int, timeout_seconds: float = 600.0) -> None:
    """Build Megatron's groups over the executor world; every rank of it enters.

    A collective in one of them fails after ``timeout_seconds``.

    Raises:
        LayoutError: the world has another size than the layout, context parallelism is asked for
            without Transformer Engine, or expert tensor with expert parallelism without CUDA.
    """
    if not dist.is_initialized():
        raise LayoutError("torch's default process group must exist before Megatron's groups")
    if dist.get_world_size() != layout.world_size:
        raise LayoutError(
            f"layout {layout} needs {layout.world_size} ranks, the executor world has "
            f"{dist.get_world_size()}"
        )
    if layout.cp > 1 and not acceleration()["transformer_engine"]:
        raise LayoutError(
            f"context parallelism (cp={layout.cp}) needs CUDA and Transformer Engine's attention"
        )
    if layout.ep > 1 and layout.etp > 1 and not acceleration()["cuda"]:
        raise LayoutError(
            f"expert parallelism with expert tensor parallelism (ep={layout.ep}, etp={layout.etp}) "
            "needs CUDA: gloo cannot gather unequal numbers of tokens"
        )
    apply_substitutions()
    make_groups(layout, timeout_seconds)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def make_groups(layout: TrainerLayout, timeout_seconds: float = 600.0) -> None:
    """Build Megatron's groups in the order that `TrainerLayout.coordinate` counts ranks in."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_seconds / 60,  # pyright: ignore[reportArgumentType]
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )


def destroy() -> None:
    """Forget Megatron's groups, so that `initialize` may be called again."""
    parallel_state.destroy_model_parallel()


def barrier() -> None:
    """Wait until all ranks of the executor world are here; every one of them enters."""
    dist.barrier()


def gather(values: Tensor) -> Tensor:
    """Return ``values: [K]`` of all ranks as [ranks, K]; every one of the executor world enters."""
    mine = values.to(device())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).cpu()


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is set on any rank of the executor world; every one of them enters."""
    value = torch.tensor([int(flag)], device=device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)
