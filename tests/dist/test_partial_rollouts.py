"""Responses that live through a commit, and ones continued by another request, on real vLLM.

Oracles: the uninterrupted run of the same request, and transformers with a KV cache that two
models filled.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.config import PartialKv
from megarl.rollout.engine import Sample, SampleRequest
from megarl.rollout.vllm_engine import VllmEngine
from tests.dist.vllm_cases import (
    enter_world,
    make_model,
    make_prompts,
    make_requests,
    make_settings,
    perturb,
    run,
    score,
    write,
)
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

RUNNING = 12  # sequences decoded together; the others wait
STEPS = 6  # before the commit


def _make_requests(first_id: int = 0) -> list[SampleRequest]:
    """Return 24: long prompts (several KV blocks) twice each, so that half of them wait."""
    long = make_prompts(4, 300, seed=2)
    prompts = [*long, *make_prompts(8, 9, seed=3), *long, *make_prompts(8, 9, seed=4)]
    return make_requests(prompts, first_id, max_tokens=24)


def _finish(engine: VllmEngine) -> dict[int, Sample]:
    samples: dict[int, Sample] = {}
    while engine.num_unfinished:
        samples |= {sample.request_id: sample for sample in engine.step()}
    return samples


def _start(
    engine: VllmEngine, requests: Sequence[SampleRequest], steps: int
) -> tuple[dict[int, Sample], list[Sample]]:
    """Decode some tokens; return what finished and what did not."""
    engine.add(requests)
    finished = {sample.request_id: sample for _ in range(steps) for sample in engine.step()}
    return finished, engine.unfinished()


def _continuation(request: SampleRequest, partial: Sample) -> SampleRequest:
    return dataclasses.replace(
        request,
        generated=partial.tokens,
        logprobs=partial.logprobs,
        versions=partial.versions,
    )


def _same_weights(engine: VllmEngine) -> dict[str, dict[int, Sample]]:
    """Sample the same requests three times: at once, over commits, and by continued requests."""
    requests = _make_requests()
    seen = {"at once": run(engine, requests)}

    seen["committed"], _ = _start(engine, requests, STEPS)
    for version in (1, 2):
        engine.poison()
        engine.commit(version)
        for _ in range(5):
            seen["committed"] |= {sample.request_id: sample for sample in engine.step()}
    seen["committed"] |= _finish(engine)

    seen["continued"], partials = _start(engine, requests, STEPS + 1)
    engine.abort([partial.request_id for partial in partials])
    engine.commit(3)
    seen["continued"] |= run(
        engine, [_continuation(requests[partial.request_id], partial) for partial in partials]
    )
    return seen


def _other_weights(engine: VllmEngine, model: Any) -> dict[str, Any]:
    """Commit other weights while requests run and wait, with newcomers of the same prompts."""
    old = copy.deepcopy(model)
    requests, newcomers = _make_requests(), _make_requests(first_id=100)
    _, partials = _start(engine, requests, STEPS)
    recomputed = engine.recomputed_tokens
    perturb(model)
    engine.poison()
    write(engine, model)
    engine.commit(8)
    seen: dict[str, Any] = {"recomputed": engine.recomputed_tokens - recomputed}
    seen["held"] = sum(
        len(requests[partial.request_id].prompt) + len(partial.tokens) - 1
        for partial in partials
        if partial.tokens
    )
    engine.add(newcomers)
    samples = _finish(engine)
    seen["partials"], seen["samples"] = partials, samples
    seen["errors"] = {
        partial.request_id: _errors(
            old, model, requests[partial.request_id], partial, samples[partial.request_id]
        )
        for partial in partials
    }
    seen["newcomers"] = {
        request.request_id: _distance(
            score(model, request, samples[request.request_id].tokens), samples[request.request_id]
        )
        for request in newcomers
    }
    perturb(model)
    write(engine, model)
    engine.commit(9)
    samples = run(engine, requests)
    seen["after all ended"] = max(
        _distance(
            score(model, request, samples[request.request_id].tokens), samples[request.request_id]
        )
        for request in requests
    )
    return seen


def _distance(expected: Tensor, sample: Sample, begin: int = 0, end: int | None = None) -> float:
    got = torch.tensor(sample.logprobs)
    return (expected - got)[begin:end].abs().max().item()


def _errors(
    old: Any, new: Any, request: SampleRequest, partial: Sample, sample: Sample
) -> dict[str, float]:
    """Compare log-probabilities before and after the commit with those of each hypothesis."""
    num_old = len(partial.tokens)
    errors = {"new": _distance(score(new, request, sample.tokens), sample, num_old)}
    if num_old:
        errors["old"] = _distance(score(old, request, sample.tokens), sample, 0, num_old)
        errors["mixed"] = _distance(
            _mixed_score(old, new, request, sample.tokens, num_old), sample, num_old
        )
    return errors


@torch.no_grad()
def _mixed_score(
    old: Any, new: Any, request: SampleRequest, tokens: Sequence[int], num_old: int
) -> Tensor:
    """Score with the new weights on the KV cache that the old ones left; [:num_old] is unused."""
    sequence = torch.tensor([[*request.prompt, *tokens]])
    cached = len(request.prompt) + num_old - 1  # the last token was sampled, not computed yet
    cache = old(sequence[:, :cached], use_cache=True).past_key_values
    logits = new(sequence[:, cached:-1], past_key_values=cache).logits[0]
    fresh = logits.log_softmax(-1).gather(-1, sequence[0, cached + 1 :, None])[:, 0]
    return torch.cat([torch.zeros(num_old), fresh])


def _one_replica(rank: int, size: int, path: str, partial_kv: PartialKv) -> dict[str, Any]:
    enter_world(rank, size)
    torch.manual_seed(5)
    engine = VllmEngine(
        make_settings(
            path,
            tp=size,
            load_weights=True,
            max_running_sequences=RUNNING,
            partial_kv=partial_kv,
        )
    )
    seen: dict[str, Any] = {"same": _same_weights(engine)}
    if size == 1:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        engine.commit(7)
        seen |= _other_weights(engine, model)
    engine.close()
    return seen


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models"), "llama_tied")


@pytest.fixture(scope="module")
def keep(path: str) -> dict[str, Any]:
    return run_ranks(_one_replica, 1, path, PartialKv.KEEP, timeout=300)[0]


@pytest.fixture(scope="module")
def recompute(path: str) -> dict[str, Any]:
    return run_ranks(_one_replica, 1, path, PartialKv.RECOMPUTE, timeout=300)[0]


def _check_same_weights(same: dict[str, dict[int, Sample]]) -> None:
    """Require the tokens of the uninterrupted run, its log-probabilities, and right versions."""
    assert len(same["at once"]) == 24
    for way in ("committed", "continued"):
        assert same[way].keys() == same["at once"].keys()
        for request_id, expected in same["at once"].items():
            sample = same[way][request_id]
            assert sample.tokens == expected.tokens, (way, request_id)
            assert sample.finished == expected.finished
            assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    long = [i for i, sample in same["at once"].items() if len(sample.tokens) == 24]
    assert min(long) < RUNNING <= max(long)
    for request_id in long[:1]:  # it ran from the first step on
        assert same["committed"][request_id].versions == (0,) * STEPS + (1,) * 5 + (2,) * 13
        assert same["continued"][request_id].versions == (2,) * (STEPS + 1) + (3,) * 17


def test_interrupted_responses_have_the_tokens_of_an_uninterrupted_one(
    keep: dict[str, Any], recompute: dict[str, Any]
) -> None:
    _check_same_weights(keep["same"])
    _check_same_weights(recompute["same"])


@pytest.mark.parametrize("partial_kv", list(PartialKv))
def test_replicas_of_two_ranks_interrupt_alike(path: str, partial_kv: PartialKv) -> None:
    first, second = run_ranks(_one_replica, 2, path, partial_kv, timeout=300)
    assert first == second
    _check_same_weights(first["same"])


def test_each_token_carries_the_version_that_sampled_it(
    keep: dict[str, Any], recompute: dict[str, Any]
) -> None:
    for seen in (keep, recompute):
        partials: list[Sample] = seen["partials"]
        ids = [partial.request_id for partial in partials]
        assert ids == sorted(ids)
        assert {len(partial.tokens) for partial in partials} >= {0, STEPS}
        for partial in partials:
            sample = seen["samples"][partial.request_id]
            num_old, num_new = len(partial.tokens), len(sample.tokens) - len(partial.tokens)
            assert not partial.finished
            assert num_new > 0
            assert sample.tokens[:num_old] == partial.tokens
            assert sample.logprobs[:num_old] == partial.logprobs
            assert sample.versions == (7,) * num_old + (8,) * num_new
            if num_old:
                assert seen["errors"][partial.request_id]["old"] < 1e-4


def test_recomputed_responses_go_on_as_if_the_new_weights_had_read_them(
    recompute: dict[str, Any],
) -> None:
    assert max(errors["new"] for errors in recompute["errors"].values()) < 1e-4
    assert recompute["recomputed"] == recompute["held"] > 600


def test_kept_responses_go_on_with_the_cache_of_the_old_weights(keep: dict[str, Any]) -> None:
    running = [errors for errors in keep["errors"].values() if "mixed" in errors]
    assert max(errors["mixed"] for errors in running) < 1e-4
    assert min(errors["new"] for errors in running) > 1e-2
    assert keep["recomputed"] == 0


def test_no_request_meets_a_block_of_older_weights(
    keep: dict[str, Any], recompute: dict[str, Any]
) -> None:
    for seen in (keep, recompute):
        waiting = [errors for errors in seen["errors"].values() if "mixed" not in errors]
        assert len(waiting) >= RUNNING - 4
        assert max(errors["new"] for errors in waiting) < 1e-4
        assert max(seen["newcomers"].values()) < 1e-4
        assert seen["after all ended"] < 1e-4
