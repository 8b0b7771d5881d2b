"""The real vLLM on CPUs against transformers: three launches, whose results the tests look at.

vLLM changes the process that imports it, so engines only live in children of `run_ranks`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
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
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

VOCAB, EOS, MAX_LEN = 32, 1, 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama_tied": lambda: LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SIZES | {"hidden_size": 128}, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
}


def _make_model(folder: Path, family: str) -> str:
    """Save a random model whose distributions are neither flat nor certain."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.1 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder / family)
    return str(folder / family)


def _make_settings(model_path: str, **changes: Any) -> EngineSettings:
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


def _make_requests(
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


def _make_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for _ in range(count)]


def _run(engine: VllmEngine, requests: Sequence[SampleRequest]) -> dict[int, Sample]:
    engine.add(requests)
    samples: dict[int, Sample] = {}
    while engine.has_unfinished():
        samples |= {sample.request_id: sample for sample in engine.step()}
    return samples


def _enter_world(rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))


@torch.no_grad()
def _score(model: Any, request: SampleRequest, tokens: Sequence[int]) -> Tensor:
    """Return the log-probability of each token at the request's temperature, by transformers."""
    logits = model(torch.tensor([[*request.prompt, *tokens]])).logits[0]
    logits = logits[len(request.prompt) - 1 : -1] / (request.temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def _largest_error(
    model: Any, requests: Sequence[SampleRequest], samples: dict[int, Sample]
) -> float:
    return max(
        (
            (
                _score(model, request, samples[request.request_id].tokens)
                - torch.tensor(samples[request.request_id].logprobs)
            )
            .abs()
            .max()
            .item()
        )
        for request in requests
    )


@torch.no_grad()
def _greedy(model: Any, request: SampleRequest) -> tuple[int, ...]:
    tokens = list(request.prompt)
    for _ in range(request.max_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == EOS:
            break
    return tuple(tokens[len(request.prompt) :])


def _fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and join transformers' tensors as vLLM's Llama and Qwen hold them on one rank."""
    fused: dict[str, Tensor] = {}
    for name, tensor in state.items():
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


def _write(engine: VllmEngine, model: Any) -> None:
    weights = _fused(dict(model.named_parameters()))
    for name, target in engine.parameters().items():
        weight = weights[name].detach()
        target[: len(weight)].copy_(weight)  # vLLM pads the vocabulary to a multiple of 64


def _perturb(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)


def _refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except (WeightSyncError, ConfigError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


# -- one engine, tied Llama, weights written as a weight transfer would -------------------------


def _one_engine(rank: int, size: int, path: str) -> dict[str, Any]:
    _enter_world(rank, size)
    torch.manual_seed(5)
    random.seed(5)
    set_num_threads = torch.set_num_threads
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    settings = _make_settings(path)
    before = torch.get_rng_state(), random.getstate()
    engine = VllmEngine(settings)
    seen: dict[str, Any] = {}
    seen["step before commit"] = _refusal(engine.step)
    seen["add before commit"] = _refusal(lambda: engine.add(_make_requests([[2]])))
    _write(engine, model)
    engine.commit(1)
    _sampling(engine, model, seen)
    _limits(engine, seen)
    seen["random state kept"] = bool(
        torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    )
    seen["threads kept"] = torch.set_num_threads is set_num_threads
    _updates(engine, model, seen)
    engine.close()
    engine.close()
    seen["step after close"] = _refusal_runtime(engine.step)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    seen["default group works"] = ones.item() == size
    seen["shared memory"] = _shared_memory()
    seen["children"] = [" ".join(c.cmdline()) for c in psutil.Process().children(recursive=True)]
    return seen


def _shared_memory() -> list[str]:
    """Return the shared memory that this process has mapped, locks of the test queue apart."""
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return [name for name in maps if name.startswith("/dev/shm/") and "/sem." not in name]


def _refusal_runtime(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "accepted"


def _sampling(engine: VllmEngine, model: Any, seen: dict[str, Any]) -> None:
    prompts = _make_prompts(32, 9, seed=1)
    warm = _make_requests(prompts)
    cool = _make_requests(prompts, first_id=1000, temperature=0.7)
    greedy = _make_requests(prompts[:8], first_id=2000, temperature=0.0)
    together = _run(engine, [*warm, *cool, *greedy])
    seen["error at 1.0"] = _largest_error(model, warm, together)
    seen["error at 0.7"] = _largest_error(model, cool, together)
    seen["greedy"] = [together[request.request_id].tokens for request in greedy]
    seen["greedy expected"] = [_greedy(model, request) for request in greedy]
    seen["together"] = [together[request.request_id] for request in warm]
    seen["reversed"] = [_run(engine, warm[::-1])[request.request_id] for request in warm]
    seen["alone"] = [_run(engine, [request])[request.request_id] for request in warm[:6]]
    reseeded = _run(engine, _make_requests(prompts, seed=9))
    seen["reseeded"] = [reseeded[request.request_id] for request in warm]

    long = _make_requests(_make_prompts(30, 300, seed=2), max_tokens=3)  # 9000 prompt tokens
    chunked = _run(engine, long)
    seen["chunked"] = [chunked[request.request_id].tokens for request in long]
    seen["not chunked"] = [_run(engine, [request])[request.request_id].tokens for request in long]

    same = _make_requests([(3, 4, 5)] * 4000, max_tokens=1)  # seeds 100, 101, ...
    drawn = [sample.tokens[0] for sample in _run(engine, same).values()]
    seen["counts"] = torch.bincount(torch.tensor(drawn), minlength=VOCAB).tolist()
    with torch.no_grad():
        seen["probabilities"] = model(torch.tensor([[3, 4, 5]])).logits[0, -1].softmax(-1).tolist()


def _limits(engine: VllmEngine, seen: dict[str, Any]) -> None:
    requests = _make_requests(_make_prompts(64, 9, seed=3), max_tokens=12)
    seen["limited"] = list(_run(engine, requests).values())
    engine.add(_make_requests([[2]]))
    seen["used id"] = _refusal(lambda: engine.add(_make_requests([[2]])))
    engine.abort_all()
    seen["long"] = _refusal(lambda: engine.add(_make_requests([[2] * 500], max_tokens=13)))
    seen["foreign token"] = _refusal(lambda: engine.add(_make_requests([[VOCAB]])))


def _updates(engine: VllmEngine, model: Any, seen: dict[str, Any]) -> None:
    """Change every weight (the tied embedding too) with and without a commit."""
    long = _make_requests(_make_prompts(1, 300, seed=4), max_tokens=4)
    seen["fresh error"] = _largest_error(model, long, _run(engine, long))
    _perturb(model)
    _write(engine, model)
    seen["stale error"] = _largest_error(model, long, _run(engine, long))
    engine.poison()
    seen["step while poisoned"] = _refusal(engine.step)
    engine.commit(2)
    after = _run(engine, long)
    seen["committed error"] = _largest_error(model, long, after)
    seen["committed version"] = after[0].version

    short = _make_requests(_make_prompts(8, 9, seed=5))
    engine.add(short)
    engine.step()
    seen["commit while running"] = _refusal(lambda: engine.commit(3))
    engine.abort_all()
    seen["unfinished after abort"] = engine.has_unfinished()
    engine.poison()
    engine.parameters()["model.embed_tokens.weight"].mul_(1.5)  # tied: the head too
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    engine.commit(3)
    seen["tied error"] = _largest_error(model, short, _run(engine, short))

    engine.poison()
    engine.parameters()["model.norm.weight"].fill_(float("nan"))
    engine.commit(4)
    seen["nan"] = _refusal(lambda: _run(engine, short))
    engine.abort_all()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = _make_model(tmp_path_factory.mktemp("models"), "llama_tied")
    return run_ranks(_one_engine, 1, path, timeout=400)[0]


def test_an_engine_without_a_committed_version_refuses_to_sample(seen: dict[str, Any]) -> None:
    for action in ("step before commit", "add before commit", "step while poisoned"):
        assert seen[action].startswith("WeightSyncError"), action


def test_logprobs_are_those_of_transformers_after_the_temperature(seen: dict[str, Any]) -> None:
    assert seen["error at 1.0"] < 1e-4
    assert seen["error at 0.7"] < 1e-4


def test_greedy_equals_transformers_greedy(seen: dict[str, Any]) -> None:
    assert seen["greedy"] == seen["greedy expected"]


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(seen: dict[str, Any]) -> None:
    tokens = [sample.tokens for sample in seen["together"]]
    assert [sample.tokens for sample in seen["reversed"]] == tokens
    assert [sample.tokens for sample in seen["alone"]] == tokens[:6]
    assert [sample.tokens for sample in seen["reseeded"]] != tokens


def test_prompts_prefilled_in_chunks_give_the_same_tokens(seen: dict[str, Any]) -> None:
    assert seen["chunked"] == seen["not chunked"]


def test_tokens_are_drawn_from_the_model_distribution(seen: dict[str, Any]) -> None:
    drawn = torch.tensor(seen["counts"], dtype=torch.float64)
    expected = torch.tensor(seen["probabilities"], dtype=torch.float64) * drawn.sum()
    common = expected >= 5
    chi_squared = ((drawn - expected) ** 2 / expected)[common].sum().item()
    assert common.sum() > 10
    assert chi_squared < common.sum() + 5 * (2 * common.sum()) ** 0.5  # mean + 5 deviations


def test_a_sample_is_finished_only_where_it_ends_with_eos(seen: dict[str, Any]) -> None:
    finished = [sample for sample in seen["limited"] if sample.finished]
    cut = [sample for sample in seen["limited"] if not sample.finished]
    assert finished
    assert cut
    assert all(sample.tokens.index(EOS) == len(sample.tokens) - 1 for sample in finished)
    assert all(EOS not in sample.tokens and len(sample.tokens) == 12 for sample in cut)


def test_requests_that_cannot_be_honoured_are_refused(seen: dict[str, Any]) -> None:
    assert "request 0 is not finished" in seen["used id"]
    assert "exceed max_model_len 512" in seen["long"]
    assert "0..31" in seen["foreign token"]


def test_weights_written_in_place_take_effect_and_commit_drops_stale_prefixes(
    seen: dict[str, Any],
) -> None:
    assert seen["fresh error"] < 1e-4
    assert seen["stale error"] > 1e-2  # without a commit the prefix cache of old weights is used
    assert seen["committed error"] < 1e-4
    assert seen["committed version"] == 2
    assert seen["tied error"] < 1e-4


def test_commit_refuses_while_requests_run_and_works_after_an_abort(seen: dict[str, Any]) -> None:
    assert seen["commit while running"].startswith("WeightSyncError")
    assert seen["unfinished after abort"] is False


def test_damaged_weights_are_an_error_and_not_a_sample(seen: dict[str, Any]) -> None:
    assert seen["nan"].startswith("WeightSyncError")


def test_the_process_is_left_as_it_was(seen: dict[str, Any]) -> None:
    assert seen["random state kept"]
    assert seen["threads kept"]
    assert seen["default group works"]
    assert seen["step after close"] == "replica-0: the engine is closed"
    assert seen["shared memory"] == []
    assert seen["children"] == []


# -- families, loaded from disk as for evaluation ----------------------------------------------


def _families(rank: int, size: int, paths: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Build one engine after the other in this process."""
    _enter_world(rank, size)
    seen = {"wrong world": {"refusal": _refusal(lambda: VllmEngine(_make_settings("", tp=2)))}}
    mixture = paths.pop("qwen3_moe")
    for family, path in paths.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        engine = VllmEngine(_make_settings(path, load_weights=True))
        expected, got = _fused(dict(model.named_parameters())), engine.parameters()
        requests = _make_requests(_make_prompts(16, 9, seed=1))
        samples = _run(engine, requests)
        seen[family] = {
            "names": (sorted(expected), sorted(got)),
            "unequal": [
                name
                for name, weight in expected.items()
                if not torch.equal(got[name][: len(weight)], weight)
            ],
            "error": _largest_error(model, requests, samples),
            "version": samples[0].version,
        }
        for name, weight in model.named_parameters():
            if "lm_head" in name or "bias" in name or "q_norm" in name:
                weight.data.add_(torch.randn_like(weight) * 0.1)
        engine.poison()
        _write(engine, model)
        engine.commit(1)
        seen[family]["written error"] = _largest_error(model, requests, _run(engine, requests))
        engine.close()
    seen["mixture"] = {"refusal": _refusal(lambda: VllmEngine(_make_settings(mixture)))}
    return seen


def test_families_load_bit_for_bit_and_take_writes(tmp_path: Path) -> None:
    paths = {family: _make_model(tmp_path, family) for family in FAMILIES if family != "llama_tied"}
    (seen,) = run_ranks(_families, 1, paths, timeout=400)
    assert "expected the replica's tp 2" in seen.pop("wrong world")["refusal"]
    assert seen.pop("mixture")["refusal"].startswith("ConfigError: mixture-of-experts")
    for family, found in seen.items():
        expected, got = found["names"]
        assert got == expected, family
        assert found["unequal"] == [], family
        assert found["error"] < 1e-4, family
        assert found["version"] == 0, family
        assert found["written error"] < 1e-4, family


# -- replicas of one host ----------------------------------------------------------------------

REPLICAS = ((0,), (1,), (2, 3))  # global ranks: tp 1, tp 1, tp 2


def _replica(rank: int, size: int, path: str, folder: str) -> dict[str, Any]:
    """Leave the common world for the replica's own, then sample the same requests everywhere."""
    index = next(i for i, ranks in enumerate(REPLICAS) if rank in ranks)
    ranks = REPLICAS[index]
    local = ranks.index(rank)
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/{index}", len(ranks))
    dist.init_process_group("gloo", store=store, rank=local, world_size=len(ranks))
    _enter_world(local, len(ranks))
    engine = VllmEngine(_make_settings(path, tp=len(ranks), load_weights=True))
    shared_memory = _shared_memory()
    samples = _run(engine, _make_requests(_make_prompts(32, 9, seed=1)))
    dist.barrier()
    engine.close()
    return {"samples": samples, "shared memory": shared_memory}


def test_replicas_of_tp_1_and_2_share_a_host_and_sample_alike(tmp_path: Path) -> None:
    path = _make_model(tmp_path, "llama")
    seen = run_ranks(_replica, 4, path, str(tmp_path), timeout=400)
    first = seen[0]["samples"]
    for rank, found in enumerate(seen):
        assert found["shared memory"] == [], rank
        assert len(found["samples"]) == 32
        for request_id, sample in found["samples"].items():
            assert sample.tokens == first[request_id].tokens, rank
            assert sample.logprobs == pytest.approx(first[request_id].logprobs, abs=1e-4)
