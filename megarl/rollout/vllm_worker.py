"""What megarl changes inside vLLM's worker: live CPU weights, stateless seeds, a clean end.

`megarl.rollout.vllm_engine` uses it, mostly while it builds an engine, and imports it late,
since importing it imports vLLM. On GPUs only what concerns process groups is used.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm.distributed.parallel_state as parallel_state
import vllm.model_executor.layers.utils as layer_utils
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from megarl.errors import ConfigError
from megarl.rollout.vllm_fp8 import is_plain, keep_fp8_weights_live

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# Kernels that read experts' weights as they lie (on CPUs: once left unpacked, see below).
_PLAIN_EXPERTS = (
    UnquantizedMoeBackend.TRITON,
    UnquantizedMoeBackend.BATCHED_TRITON,
    UnquantizedMoeBackend.CPU,
)


def _use_weight_in_place(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # called with the layer's current weight


def _leave_experts_unpacked(self: CPUUnquantizedExperts, layer: torch.nn.Module) -> None:
    if self.moe_config.activation is not MoEActivation.SILU:
        raise ConfigError(
            f"experts with activation {self.moe_config.activation.value!r} are not supported on "
            "CPUs, expected 'silu'"
        )


def _apply_unpacked_experts(
    self: CPUUnquantizedExperts,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    **routing: Any,
) -> None:
    """Add up the chosen experts of each token.

    Args:
        output, hidden_states: [T, H]
        w1: [E, 2 F, H]; gate rows, then up rows
        w2: [E, H, F]
        routing: "topk_weights" and "topk_ids" [T, k], and what concerns other kinds of experts
    """
    topk_weights, topk_ids = routing["topk_weights"], routing["topk_ids"]
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, places = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden_states[rows] @ w1[expert].t()).chunk(2, dim=-1)
        out = (torch.nn.functional.silu(gate) * up) @ w2[expert].t()
        output.index_add_(0, rows, out * topk_weights[rows, places, None].to(out.dtype))


def keep_cpu_weights_live() -> None:
    """Make vLLM's CPU linear layers and experts read their weights at each call.

    By default they pack them once while loading: later writes are lost without an error. What
    reads packed experts is replaced as well, by torch's products.
    """
    layer_utils.dispatch_cpu_unquantized_gemm = _use_weight_in_place
    CPUUnquantizedExperts.process_weights_after_loading = _leave_experts_unpacked
    CPUUnquantizedExperts.apply = _apply_unpacked_experts  # pyright: ignore
    keep_fp8_weights_live(_apply_unpacked_experts)


def transformed_layers(model: torch.nn.Module) -> dict[str, str]:
    """Return layer -> method, where vLLM does not compute with a layer's weights as they lie."""
    found: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not layer._parameters:  # of an attention layer, the method concerns the KV cache
            continue
        method: Any = getattr(layer, "quant_method", None)
        product = getattr(layer, "cpu_linear", torch.nn.functional.linear)
        if isinstance(method, UnquantizedFusedMoEMethod):
            if method.unquantized_backend not in _PLAIN_EXPERTS:
                found[name] = f"the {method.unquantized_backend.value} kernel"
        elif product is not torch.nn.functional.linear:
            found[name] = "packing its weights"
        elif (
            method is not None
            and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
            and not is_plain(method)
        ):
            found[name] = type(method).__name__
    return found


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as layouts describe it: a stack of matrices as one, [out, in], not a scalar."""
    if weight.dim() == 2 and not weight.is_contiguous():
        return weight.t()  # per-tensor FP8 is kept as a transposed view
    if weight.dim() == 0:
        return weight.view(1)
    return weight.view(-1, weight.shape[-1]) if weight.dim() > 2 else weight


def _destroy_own_groups() -> None:
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


def keep_default_group() -> None:
    """Let vLLM's shutdown destroy its own process groups only, not torch's default group."""
    parallel_state.destroy_distributed_environment = _destroy_own_groups


class GlooExecutor(ExecutorWithExternalLauncher):
    """The external launcher whose tensor-parallel ranks talk over gloo.

    The CPU build prefers busy-waiting shared memory, named after what follows the last colon of
    the init method: one name for all engines of a host, left behind by a killed one, and a rank
    whose peer died spins for ever. Ranks that disagree on the name use their process group, which
    exists already, so that nothing else reads the method.
    """

    def _distributed_args(self) -> tuple[str, int, int]:
        _, rank, local_rank = super()._distributed_args()
        return f"tcp://megarl:no-shared-memory-{rank}", rank, local_rank


def drop_message_queue() -> None:
    """Free the shared memory that vLLM makes for driver processes, which megarl has not."""
    parallel_state.get_tp_group().mq_broadcaster = None


@contextmanager
def own_random_state() -> Iterator[None]:
    """Undo what building vLLM does to the process: global seeds, a dead `set_num_threads`."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class StatelessSampler:
    """Sampling with a uniform number that is a function of (request seed, position) alone.

    It replaces the forward of vLLM's CPU sampler, which keeps a torch generator for each request:
    a Python loop in each step (15 % of it), a draw from the global generator, and an error when
    a seeded prompt is prefilled in chunks, since CPU generators cannot be rewound. A row takes the
    token in whose part of the summed probabilities its number falls (one number a row: noise for
    each token would cost more than the model's head).
    """

    def __init__(self, runner: GPUModelRunner, seeds: dict[str, int]) -> None:
        self._runner = runner
        self._seeds = seeds

    def __call__(
        self, logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sample one token a row of ``logits: [B, V]``; return tokens [B], logprobs [B, V]."""
        assert (k, p) == (None, None), "top-k and top-p are never requested"
        batch = self._runner.input_batch
        num_rows = logits.shape[0]
        assert num_rows == batch.num_reqs, "one row of logits a request"
        seeds = np.array([self._seeds[row] for row in batch.req_ids], dtype=np.uint64)
        uniforms = uniform(seeds, batch.num_tokens_no_spec[:num_rows].astype(np.uint64))
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        sums = logprobs.double().exp_().cumsum(-1)
        # right: where a token's probability is zero, its part is empty and is never hit
        drawn = torch.from_numpy(uniforms)[:, None] * sums[:, -1:]
        tokens = torch.searchsorted(sums, drawn, right=True)
        # a row of NaN has no parts: its log-probability is NaN, which the engine refuses
        return tokens[:, 0].clamp(max=logits.shape[1] - 1), logprobs


class CacheMemory:
    """The memory of a KV cache, which an engine asleep does without.

    Its tensors stay where they are known; CUDA graphs would remember where their memory was.
    """

    def __init__(self, caches: Iterable[Tensor]):
        whole = {cache.untyped_storage().data_ptr(): cache for cache in caches}
        self._storages = [cache.untyped_storage() for cache in whole.values()]
        self._sizes = [storage.nbytes() for storage in self._storages]

    def release(self) -> None:
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Take it again, zeroed: kernels multiply what is in a block's unused slots by zero."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if not storage.nbytes():
                storage.resize_(size)
                storage.fill_(0)  # pyright: ignore


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Hash [B] uint64 seeds and positions to [B] float64 in [0, 1) (SplitMix64's finalizer, twice)."""

    def finalize(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    gamma = np.uint64(0x9E3779B97F4A7C15)
    mixed = finalize(finalize(seeds + gamma) + positions * gamma)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
