"""The engine on vLLM: one tensor-parallel replica, stepped inside its own ranks, no server.

`megarl.train` builds a `VllmEngine` on each generator rank once torch's default process group is
the replica's world and RANK, LOCAL_RANK and WORLD_SIZE say this rank's place in it. vLLM is
imported when an engine is built, not with this file. Requests go straight to vLLM's engine core:
its front end (tokenizer, detokenizer, a dict of objects a token) would cost a quarter of a step.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import ConfigError, WeightSyncError
from megarl.rollout.engine import Engine, Sample, SampleRequest
from megatron_bridge.parallel import Quantization

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.llm_engine import LLMEngine

_LATENT_PARTS = ("W_UV", "W_UK_T")
_MIN_BATCHED_TOKENS = 8192  # prompt tokens prefilled in one step; vLLM's own default on GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How to build one replica; equal on all of its ranks."""

    model_path: str  # Hugging Face folder: config.json, and safetensors where load_weights
    dtype: str  # float32 or bfloat16
    tp: int
    max_model_len: int  # longest prompt and response together, in tokens
    max_running_sequences: int
    kv_cache_bytes: int  # of one rank
    seed: int  # of vLLM's dummy weights; sampling takes its seeds from the requests
    enforce_eager: bool
    prefix_caching: bool
    job: str  # name of this run and replica, for error messages
    quantization: Quantization = Quantization.NONE  # of the weights of linear layers
    ep: bool = False  # ranks divide the number of experts, not each expert
    load_weights: bool = False  # True: read them from model_path; False: wait for a commit

    def __post_init__(self) -> None:
        if self.ep and not torch.cuda.is_available():
            raise ConfigError(
                "generator.layout.ep needs GPUs: vLLM's CPU build has no kernel for it"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"engine dtype is {self.dtype!r}, expected float32 or bfloat16")
        for name in ("tp", "max_model_len", "max_running_sequences", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine {name} is {getattr(self, name)}, expected at least 1")


class _State(Enum):
    POISONED = "poisoned"
    COMMITTED = "committed"
    CLOSED = "closed"


@dataclass(slots=True, kw_only=True)
class _Partial:
    request: SampleRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class VllmEngine(Engine):
    """One rank's part of a replica: POISONED until the first `commit`, or at version 0 where the
    weights were loaded from disk; ends with `close`.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Build the engine; every rank of the replica enters.

        Raises:
            ConfigError: the default process group or the environment does not fit `settings`.
        """
        _check_world(settings)
        on_gpu = torch.cuda.is_available()
        _set_environment(on_gpu)
        from megarl.rollout.vllm_worker import (
            StatelessSampler,
            drop_message_queue,
            keep_cpu_weights_live,
            keep_default_group,
        )

        self._job, self._on_gpu = settings.job, on_gpu
        self._partials: dict[str, _Partial] = {}
        self._seeds: dict[str, int] = {}
        self._version = 0
        keep_default_group()
        if not on_gpu:
            keep_cpu_weights_live()
        with _own_random_state():
            self._llm = _build(settings, on_gpu)
        self._core = self._llm.engine_core
        runner = self._llm.model_executor.driver_worker.worker.model_runner
        self._model: torch.nn.Module = runner.model
        # Latent attention multiplies by matrices made of its kv_b_proj, anew at each commit.
        self._latent: list[tuple[str, Any]] = [
            (name, layer)
            for name, layer in self._model.named_modules()
            if all(hasattr(layer, part) for part in _LATENT_PARTS)
        ]
        self._max_model_len = settings.max_model_len
        self._vocab_size = self._llm.model_config.get_vocab_size()
        drop_message_queue()
        if not on_gpu:
            runner.sampler.topk_topp_sampler.forward = StatelessSampler(runner, self._seeds)
        self._state = _State.COMMITTED if settings.load_weights else _State.POISONED

    def parameters(self) -> dict[str, Tensor]:
        self._require_open()
        derived = {f"{name}.{part}" for name, _ in self._latent for part in _LATENT_PARTS}
        return {
            name: _matrix(weight.data)
            for name, weight in self._model.named_parameters()
            if name not in derived
        }

    def transforms(self) -> dict[str, str]:
        self._require_open()
        from megarl.rollout.vllm_worker import transformed_layers

        return transformed_layers(self._model)

    def poison(self) -> None:
        self._require_open()
        self._state = _State.POISONED

    def commit(self, version: int) -> None:
        self._require_open()
        if self._partials:
            raise WeightSyncError(
                f"{self._job}: cannot commit version {version}: {len(self._partials)} requests are unfinished "
                f"under version {self._version}; let them end or abort them first"
            )
        if not self._core.reset_prefix_cache():
            raise WeightSyncError(
                f"{self._job}: cannot commit version {version}: vLLM's prefix cache is in use and was not reset"
            )
        for _, attention in self._latent:
            attention.process_weights_after_loading(self._llm.model_config.dtype)
        self._core.reset_mm_cache()
        self._core.reset_encoder_cache()
        self._version = version
        self._state = _State.COMMITTED

    def add(self, requests: Sequence[SampleRequest]) -> None:
        self._require_committed("add requests")
        for request in requests:
            self._check(request)
            name = str(request.request_id)
            self._partials[name] = _Partial(request=request)
            self._seeds[name] = request.seed % 2**64
            self._core.add_request(_core_request(name, request, with_seed=self._on_gpu))

    def step(self) -> list[Sample]:
        self._require_committed("sample")
        samples = []
        for output in self._core.get_output().outputs:
            sample = self._take(output)
            if sample is not None:
                samples.append(sample)
        return samples

    def has_unfinished(self) -> bool:
        return bool(self._partials)

    def abort_all(self) -> None:
        self._require_open()
        self._core.abort_requests(list(self._partials))
        self._partials.clear()
        self._seeds.clear()

    def close(self) -> None:
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        self._partials.clear()
        self._core.shutdown()
        del self._llm, self._core, self._model, self._latent

    def _require_open(self) -> None:
        if self._state is _State.CLOSED:
            raise RuntimeError(f"{self._job}: the engine is closed")

    def _require_committed(self, action: str) -> None:
        self._require_open()
        if self._state is _State.POISONED:
            raise WeightSyncError(
                f"{self._job}: cannot {action}: weights are being written since version {self._version}, "
                "expected a commit first"
            )

    def _check(self, request: SampleRequest) -> None:
        where = f"request {request.request_id}"
        if str(request.request_id) in self._partials:
            raise ValueError(f"{where} is not finished yet, expected an unused request_id")
        if min(request.prompt) < 0 or max(request.prompt) >= self._vocab_size:
            raise ValueError(f"{where}: prompt tokens must lie in 0..{self._vocab_size - 1}")
        num_tokens = len(request.prompt) + request.max_tokens
        if num_tokens > self._max_model_len:
            raise ValueError(
                f"{where}: {len(request.prompt)} prompt tokens and max_tokens "
                f"{request.max_tokens} exceed max_model_len {self._max_model_len}"
            )

    def _take(self, output: EngineCoreOutput) -> Sample | None:
        """Collect one request's new tokens; return its sample where it ended."""
        partial = self._partials[output.request_id]
        partial.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            partial.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        if output.finish_reason is None:
            return None
        from vllm.v1.engine import FinishReason

        if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RuntimeError(
                f"{self._job}: vLLM ended request {output.request_id}: {output.finish_reason}"
            )
        if not math.isfinite(sum(partial.logprobs)):
            raise WeightSyncError(
                f"{self._job}: a log-probability of request {output.request_id} under version {self._version} "
                "is not finite; the weights are damaged"
            )
        del self._partials[output.request_id], self._seeds[output.request_id]
        return Sample(
            request_id=partial.request.request_id,
            tokens=tuple(partial.tokens),
            logprobs=tuple(partial.logprobs),
            finished=output.finish_reason is FinishReason.STOP,
            version=self._version,
        )


def _matrix(weight: Tensor) -> Tensor:
    """Return a weight as layouts describe it: a stack of matrices as one, [out, in], not a scalar."""
    if weight.dim() == 2 and not weight.is_contiguous():
        return weight.t()  # per-tensor FP8 is kept as a transposed view
    if weight.dim() == 0:
        return weight.view(1)
    return weight.view(-1, weight.shape[-1]) if weight.dim() > 2 else weight


def _check_world(settings: EngineSettings) -> None:
    if not dist.is_initialized() or dist.get_world_size() != settings.tp:
        size = dist.get_world_size() if dist.is_initialized() else "none"
        raise ConfigError(
            f"{settings.job}: torch's default process group has size {size}, "
            f"expected the replica's tp {settings.tp}"
        )
    expected = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(settings.tp)}
    got = {name: os.environ.get(name) for name in expected}
    if got != expected or "LOCAL_RANK" not in os.environ:
        raise ConfigError(
            f"{settings.job}: environment has {got}, expected {expected} and LOCAL_RANK"
        )


def _set_environment(on_gpu: bool) -> None:
    """Set what vLLM reads from the environment when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if on_gpu:
        os.environ["VLLM_USE_DEEP_GEMM"] = "0"  # its kernels rewrite FP8 weights and scales
        return
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # else the first step compiles for 15 s
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # `auto` fails for tp 2 on one NUMA node
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override kv_cache_bytes
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@contextmanager
def _own_random_state() -> Iterator[None]:
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


def _build(settings: EngineSettings, on_gpu: bool) -> LLMEngine:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from megarl.rollout.vllm_fp8 import quantization_overrides
    from megarl.rollout.vllm_worker import GlooExecutor

    arguments = EngineArgs(
        model=settings.model_path,
        load_format="auto" if settings.load_weights else "dummy",
        dtype=settings.dtype,  # type: ignore[arg-type]
        seed=settings.seed,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_running_sequences,
        max_num_batched_tokens=max(_MIN_BATCHED_TOKENS, settings.max_running_sequences),
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        enable_prefix_caching=settings.prefix_caching,
        enforce_eager=settings.enforce_eager or not on_gpu,
        tensor_parallel_size=settings.tp,
        enable_expert_parallel=settings.ep,
        hf_overrides=quantization_overrides(settings.quantization),
        distributed_executor_backend="external_launcher" if on_gpu else GlooExecutor,
        logprobs_mode="processed_logprobs",  # after the temperature
        skip_tokenizer_init=True,
        generation_config="vllm",  # no sampling defaults from the model folder
        async_scheduling=False,  # a step returns its own tokens, so a commit has none in flight
        disable_log_stats=True,
        use_tqdm_on_load=False,
        # the CPU build's own rotation of latent attention's queries is wrong: torch's is used
        compilation_config={} if on_gpu else {"custom_ops": ["-rotary_embedding"]},  # type: ignore
        # other kernels swap or shuffle the rows of experts, which would arrive in another order
        moe_backend="triton" if on_gpu else "auto",
    )
    return LLMEngine.from_engine_args(arguments)


def _core_request(name: str, request: SampleRequest, with_seed: bool) -> EngineCoreRequest:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(request.prompt),
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            stop_token_ids=[request.eos_token_id],
            seed=request.seed if with_seed else None,
            logprobs=0,  # of the sampled token only
            detokenize=False,
        ),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
