"""The engine on vLLM: one tensor-parallel replica, stepped inside its own ranks, no server.

`megarl.train` builds a `VllmEngine` on each generator rank once torch's default process group is
the replica's world and RANK, LOCAL_RANK and WORLD_SIZE say this rank's place in it. vLLM is
imported when an engine is built, not with this file. Requests go straight to vLLM's engine core:
its front end (tokenizer, detokenizer, a dict of objects a token) would cost a quarter of a step.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config import MIN_BATCHED_TOKENS, PartialKv
from megarl.errors import ConfigError, WeightSyncError
from megarl.rollout.engine import Engine, Sample, SampleRequest
from megatron_bridge.parallel import Quantization

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest, FinishReason
    from vllm.v1.engine.llm_engine import LLMEngine

_LATENT_PARTS = ("W_UV", "W_UK_T")


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
    partial_kv: PartialKv = PartialKv.RECOMPUTE  # of requests that are unfinished at a commit

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
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


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
        set_environment(on_gpu)
        from megarl.rollout import vllm_worker as worker

        self._job, self._on_gpu = settings.job, on_gpu
        self._partials: dict[str, _Partial] = {}
        self._seeds: dict[str, int] = {}
        self._version = self._commits = self._recomputed_tokens = 0
        self._keep_kv = settings.partial_kv is PartialKv.KEEP
        worker.keep_default_group()
        if not on_gpu:
            worker.keep_cpu_weights_live()
        with worker.own_random_state():
            self._llm = _build(settings, on_gpu)
        self._core: Any = self._llm.engine_core
        self._scheduled: dict[str, Any] = self._core.engine_core.scheduler.requests
        runner = self._llm.model_executor.driver_worker.worker.model_runner
        self._model: torch.nn.Module = runner.model
        self._cache = worker.CacheMemory(runner.kv_caches)
        # Latent attention multiplies by matrices made of its kv_b_proj, anew at each commit.
        self._latent: list[tuple[str, Any]] = [
            (name, layer)
            for name, layer in self._model.named_modules()
            if all(hasattr(layer, part) for part in _LATENT_PARTS)
        ]
        self._max_model_len = settings.max_model_len
        self._vocab_size = self._llm.model_config.get_vocab_size()
        worker.drop_message_queue()
        if not on_gpu:
            runner.sampler.topk_topp_sampler.forward = worker.StatelessSampler(runner, self._seeds)
        self._state = _State.COMMITTED if settings.load_weights else _State.POISONED

    def parameters(self) -> dict[str, Tensor]:
        self._require_open()
        from megarl.rollout.vllm_worker import as_matrix

        derived = {f"{name}.{part}" for name, _ in self._latent for part in _LATENT_PARTS}
        return {
            name: as_matrix(weight.data)
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
        self._cache.restore()
        for _, attention in self._latent:
            attention.process_weights_after_loading(self._llm.model_config.dtype)
        self._commits += 1
        if self._keep_kv:
            self._leave_blocks(version)
        else:
            self._reset_blocks(version)
        self._version = version
        self._state = _State.COMMITTED

    def _leave_blocks(self, version: int) -> None:
        """Keep the KV of running requests from all others: a request meets only blocks of its salt.

        Requests that hold none yet start anew, under the new salt.
        """
        waiting = [name for name, held in self._scheduled.items() if not held.num_computed_tokens]
        self._core.abort_requests(waiting)
        if len(waiting) == len(self._partials):
            self._reset_blocks(version)
        for name in waiting:
            self._queue(name)

    def _reset_blocks(self, version: int) -> None:
        """Empty the prefix cache; what still runs is preempted and prefilled again."""
        self._recomputed_tokens += sum(r.num_computed_tokens for r in self._scheduled.values())
        if not self._core.reset_prefix_cache(reset_running_requests=True):
            raise WeightSyncError(
                f"{self._job}: cannot commit version {version}: vLLM's prefix cache was not reset"
            )

    def add(self, requests: Sequence[SampleRequest]) -> None:
        self._require_committed("add requests")
        for request in requests:
            self._check(request)
            name = str(request.request_id)
            self._partials[name] = _Partial(
                request=request,
                tokens=list(request.generated),
                logprobs=list(request.logprobs),
                versions=list(request.versions),
            )
            self._seeds[name] = request.seed % 2**64
            self._queue(name)

    def _queue(self, name: str) -> None:
        salt = str(self._commits) if self._keep_kv else None
        self._core.add_request(_core_request(name, self._partials[name], salt, self._on_gpu))

    def step(self) -> list[Sample]:
        self._require_committed("sample")
        from megarl.rollout.vllm_scheduler import Decoded

        samples = []
        for output in self._core.get_output().outputs:
            partial = self._partials[output.request_id]
            if type(output) is Decoded:
                partial.tokens.append(output.token)
                partial.logprobs.append(output.logprob)
                partial.versions.append(self._version)
            else:
                partial.tokens += output.new_token_ids
                partial.versions += [self._version] * len(output.new_token_ids)
                if output.new_logprobs is not None:
                    partial.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                samples.append(self._finish(output.request_id, output.finish_reason))
        return samples

    @property
    def num_unfinished(self) -> int:
        return len(self._partials)

    @property
    def recomputed_tokens(self) -> int:
        return self._recomputed_tokens

    def unfinished(self) -> list[Sample]:
        partials = sorted(self._partials.values(), key=lambda partial: partial.request.request_id)
        return [self._sample(partial, finished=False) for partial in partials]

    def abort(self, request_ids: Sequence[int]) -> None:
        self._require_open()
        names = [str(request_id) for request_id in request_ids]
        if unknown := [name for name in names if name not in self._partials]:
            raise ValueError(f"{self._job}: no unfinished request has the ids {unknown}")
        self._core.abort_requests(names)
        for name in set(names):
            del self._partials[name], self._seeds[name]

    def sleep(self) -> None:
        self.poison()
        self._reset_blocks(self._version)
        self._cache.release()

    def close(self) -> None:
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        self._partials.clear()
        self._core.shutdown()
        del self._llm, self._core, self._scheduled, self._model, self._latent, self._cache

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
        tokens = request.prompt + request.generated
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise ValueError(f"{where}: tokens must lie in 0..{self._vocab_size - 1}")
        num_tokens = len(request.prompt) + request.max_tokens
        if num_tokens > self._max_model_len:
            raise ValueError(
                f"{where}: {len(request.prompt)} prompt tokens and max_tokens "
                f"{request.max_tokens} exceed max_model_len {self._max_model_len}"
            )

    def _finish(self, name: str, reason: FinishReason) -> Sample:
        from vllm.v1.engine import FinishReason

        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RuntimeError(f"{self._job}: vLLM ended request {name}: {reason}")
        sample = self._sample(self._partials[name], finished=reason is FinishReason.STOP)
        del self._partials[name], self._seeds[name]
        return sample

    def _sample(self, partial: _Partial, finished: bool) -> Sample:
        request_id = partial.request.request_id
        if not math.isfinite(sum(partial.logprobs)):
            raise WeightSyncError(
                f"{self._job}: a log-probability of request {request_id} is not finite "
                f"at version {self._version}; the weights are damaged"
            )
        return Sample(
            request_id=request_id,
            tokens=tuple(partial.tokens),
            logprobs=tuple(partial.logprobs),
            versions=tuple(partial.versions),
            finished=finished,
        )


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


def set_environment(on_gpu: bool) -> None:
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


def _build(settings: EngineSettings, on_gpu: bool) -> LLMEngine:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from megarl.rollout.vllm_fp8 import quantization_overrides
    from megarl.rollout.vllm_kernels import cpu_kernels
    from megarl.rollout.vllm_scheduler import DecodeScheduler
    from megarl.rollout.vllm_worker import GlooExecutor

    arguments = EngineArgs(
        model=settings.model_path,
        load_format="auto" if settings.load_weights else "dummy",
        dtype=settings.dtype,  # type: ignore[arg-type]
        seed=settings.seed,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_running_sequences,
        max_num_batched_tokens=max(MIN_BATCHED_TOKENS, settings.max_running_sequences),
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
        scheduler_cls=DecodeScheduler,
        async_scheduling=False,  # a step returns its own tokens, so a commit has none in flight
        disable_log_stats=True,
        use_tqdm_on_load=False,
        # other kernels swap or shuffle the rows of experts, which would arrive in another order
        moe_backend="triton" if on_gpu else "auto",
        **({} if on_gpu else cpu_kernels(settings.model_path)),
    )
    return LLMEngine.from_engine_args(arguments)


def _core_request(
    name: str, partial: _Partial, cache_salt: str | None, on_gpu: bool
) -> EngineCoreRequest:
    """Return what vLLM is to go on with: tokens sampled so far belong to its prompt.

    On CPUs the noise is that of `StatelessSampler`, a function of the position. On GPUs vLLM draws
    it from the seed on, so that a continuation needs a seed of its own to not repeat the noise.
    """
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    request = partial.request
    seed = zlib.crc32(f"{request.seed}/{len(partial.tokens)}".encode())
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[*request.prompt, *partial.tokens],
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens - len(partial.tokens),
            stop_token_ids=[request.eos_token_id],
            seed=seed if on_gpu else None,
            logprobs=0,  # of the sampled token only
            detokenize=False,
        ),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
    )
