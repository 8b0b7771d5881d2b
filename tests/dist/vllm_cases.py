"""Tiny models, requests and transformers' answers, for the tests of the vLLM engine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megarl.errors import ConfigError, WeightSyncError
from megarl.rollout.engine import Sample, SampleRequest
from megarl.rollout.vllm_engine import EngineSettings, VllmEngine

VOCAB, EOS, MAX_LEN = 32, 1, 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def _config(kind: Any, **changes: Any) -> PretrainedConfig:
    return kind(**SIZES | changes)


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama_tied": lambda: _config(LlamaConfig, tie_word_embeddings=True),
    "llama": lambda: _config(LlamaConfig, tie_word_embeddings=False),
    "qwen2": lambda: _config(Qwen2Config, num_attention_heads=2, tie_word_embeddings=False),
    "qwen3": lambda: _config(Qwen3Config, tie_word_embeddings=True),
    "qwen3_moe": lambda: _config(
        Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
}


def make_model(folder: Path, family: str) -> str:
    """Save a random model whose distributions are neither flat nor certain."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.1 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder / family)
    return str(folder / family)


def make_settings(model_path: str, **changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model_path": model_path,
        "dtype": "float32",
        "tp": 1,
        "max_model_len": MAX_LEN,
        "max_running_sequences": 64,
        "kv_cache_bytes": 64 << 20,
        "seed": 0,
        "enforce_eager": True,
        "prefix_caching": True,
        "job": "replica-0",
    }
    return EngineSettings(**values | changes)


def make_requests(
    prompts: Sequence[Sequence[int]], first_id: int = 0, **changes: Any
) -> list[SampleRequest]:
    values: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "eos_token_id": EOS}
    return [
        SampleRequest(
            request_id=first_id + index,
            prompt=tuple(prompt),
            **{**values, "seed": 100 + index, **changes},
        )
        for index, prompt in enumerate(prompts)
    ]


def make_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for _ in range(count)]


def run(engine: VllmEngine, requests: Sequence[SampleRequest]) -> dict[int, Sample]:
    engine.add(requests)
    samples: dict[int, Sample] = {}
    while engine.num_unfinished:
        samples |= {sample.request_id: sample for sample in engine.step()}
    return samples


def enter_world(rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))


@torch.no_grad()
def score(model: Any, request: SampleRequest, tokens: Sequence[int]) -> Tensor:
    """Return the log-probability of each token at the request's temperature, by transformers."""
    logits = model(torch.tensor([[*request.prompt, *tokens]])).logits[0]
    logits = logits[len(request.prompt) - 1 : -1] / (request.temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def largest_error(
    model: Any, requests: Sequence[SampleRequest], samples: dict[int, Sample]
) -> float:
    return max(
        (
            (
                score(model, request, samples[request.request_id].tokens)
                - torch.tensor(samples[request.request_id].logprobs)
            )
            .abs()
            .max()
            .item()
        )
        for request in requests
    )


@torch.no_grad()
def greedy(model: Any, request: SampleRequest) -> tuple[int, ...]:
    tokens = list(request.prompt)
    for _ in range(request.max_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == EOS:
            break
    return tuple(tokens[len(request.prompt) :])


def fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and join transformers' tensors as our engine shows vLLM's on one rank."""
    fused: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if "experts" in name:
            stack = name.replace("gate_up_proj", "routed_experts.w13_weight")
            stack = stack.replace("down_proj", "routed_experts.w2_weight")
            fused[stack] = tensor.flatten(0, 1)
            continue
        for parts, whole in (
            (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            (("gate_proj", "up_proj"), "gate_up_proj"),
        ):
            if parts[0] in name:
                fused[name.replace(parts[0], whole)] = torch.cat(
                    [state[name.replace(parts[0], part)] for part in parts]
                )
            if any(part in name for part in parts):
                break
        else:
            fused[name] = tensor
    return fused


def write(engine: VllmEngine, model: Any) -> None:
    weights = fused(dict(model.named_parameters()))
    for name, target in engine.parameters().items():
        weight = weights[name].detach()
        target[: len(weight)].copy_(weight)  # vLLM pads the vocabulary to a multiple of 64


def perturb(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except (WeightSyncError, ConfigError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def shared_memory() -> list[str]:
    """Return the shared memory that this process has mapped, locks of the test queue apart."""
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return [name for name in maps if name.startswith("/dev/shm/") and "/sem." not in name]
