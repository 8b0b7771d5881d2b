"""What Megatron-Core needs replaced where there is no CUDA; called by `setup` only.

Megatron-Core 0.16 names CUDA outright in places that our use runs through: dense models and
mixtures of experts, tensor, pipeline, expert and sequence parallelism, the distributed optimizer,
recomputation. Each substitution
below says which place and why, and has a test that shows the fault without it. What options or
layer specs can express (no fusions, our attention, our norm) is not here but in `model`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

_applied = False


def apply_substitutions() -> None:
    """Make Megatron-Core run on CPUs; does nothing with CUDA or when already applied."""
    global _applied
    if _applied or torch.cuda.is_available():
        return
    _applied = True
    _substitute_current_device()
    _substitute_random_state()
    _substitute_factories()
    _substitute_type_names()
    _substitute_step_counter()
    _substitute_router_product()
    _substitute_dispatch_stream()


def _substitute_current_device() -> None:
    """Buffers, pipeline messages and rotary tables are placed on `torch.cuda.current_device()`.

    `synchronize` guards the pipeline's receive buffers; CPU operations are synchronous.
    `Tensor.cuda` moves the last stage's copy of tied embeddings.
    """
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def _substitute_random_state() -> None:
    """The tracker of random states (forked by sequence parallelism, saved by recomputation)
    reads and writes the CUDA generator; here it is given the CPU's.
    """

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    torch.cuda.get_rng_state = get_state
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state


class _CpuTorch(ModuleType):
    """`torch` as some of Megatron's modules see it: ``device="cuda"`` means the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, **_on_cpu(kwargs))

    @staticmethod
    def tensor(*content: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*content, **_on_cpu(kwargs))


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs


def _substitute_factories() -> None:
    """Token counters of the schedules and scalars of optimizers are made with device="cuda".

    Only these modules' name `torch` is replaced: a mode over all of torch would cost every call.
    """
    for module in (schedules, optimizer, clip_grads, utils):
        module.torch = _CpuTorch()  # pyright: ignore


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    original = torch.Tensor.type

    def cuda_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.type = cuda_name
    try:
        yield
    finally:
        torch.Tensor.type = original


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return wrapped


def _substitute_type_names() -> None:
    """Optimizers sort parameters by names such as "torch.cuda.FloatTensor", clipping asserts one.

    CPU tensors bear these names while the three functions that look at them run.
    """
    mixed = optimizer.Float16OptimizerWithFloat16Params
    sharded = distrib_optimizer.DistributedOptimizer
    for owner in (mixed, sharded):
        owner.__init__ = _with_cuda_type_names(owner.__init__)
    optimizer.clip_grad_by_total_norm_fp32 = _with_cuda_type_names(
        optimizer.clip_grad_by_total_norm_fp32
    )


def _substitute_step_counter() -> None:
    """A distributed optimizer over torch's AdamW (there is no fused Adam on CPUs) cannot load the
    "fully_reshardable" format: it seeks each parameter's step among the saved tensors, where it is
    not; and it has set one counter for all parameters, which every one of them would advance.
    """
    sharded = distrib_optimizer.DistributedOptimizer
    original = sharded._set_main_param_and_optimizer_states

    def with_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        state["step"] = state["step"].clone()
        original(self, model_param, {**tensors, "step": state["step"]})

    sharded._set_main_param_and_optimizer_states = with_step


def _substitute_router_product() -> None:
    """The router asks whether Transformer Engine's matrix product is None, a name that exists only
    where Transformer Engine does; None makes it use torch's.
    """
    moe_utils.te_general_gemm = None


def _substitute_dispatch_stream() -> None:
    """The dispatcher of tokens copies how many go where to the host, on a stream of its own.

    Here they are on the host; gloo wants them as lists.
    """

    def to_lists(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point and self.input_splits is not None:
            self.input_splits = self.input_splits.tolist()
            self.output_splits = self.output_splits.tolist()
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()  # pyright: ignore
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = to_lists
