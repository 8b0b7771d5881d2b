"""One real vLLM engine on a CPU against transformers: one launch, whose results the tests look at.

vLLM changes the process that imports it, so engines only live in children of `run_ranks`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megarl.rollout.engine import sample_all
from megarl.rollout.vllm_engine import VllmEngine
from tests.dist.vllm_cases import (
    EOS,
    VOCAB,
    enter_world,
    greedy,
    largest_error,
    make_model,
    make_prompts,
    make_requests,
    make_settings,
    perturb,
    refusal,
    run,
    shared_memory,
    write,
)
from tests.processes import run_ranks

pytestmark = pytest.mark.dist


def _one_engine(rank: int, size: int, path: str) -> dict[str, Any]:
    enter_world(rank, size)
    torch.manual_seed(5)
    random.seed(5)
    set_num_threads = torch.set_num_threads
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    settings = make_settings(path)
    before = torch.get_rng_state(), random.getstate()
    engine = VllmEngine(settings)
    seen: dict[str, Any] = {}
    seen["step before commit"] = refusal(engine.step)
    seen["add before commit"] = refusal(lambda: engine.add(make_requests([[2]])))
    write(engine, model)
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
    seen["shared memory"] = shared_memory()
    seen["children"] = [" ".join(c.cmdline()) for c in psutil.Process().children(recursive=True)]
    return seen


def _refusal_runtime(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "accepted"


def _sampling(engine: VllmEngine, model: Any, seen: dict[str, Any]) -> None:
    prompts = make_prompts(32, 9, seed=1)
    warm = make_requests(prompts)
    cool = make_requests(prompts, first_id=1000, temperature=0.7)
    cold = make_requests(prompts[:8], first_id=2000, temperature=0.0)
    together = run(engine, [*warm, *cool, *cold])
    seen["error at 1.0"] = largest_error(model, warm, together)
    seen["error at 0.7"] = largest_error(model, cool, together)
    seen["greedy"] = [together[request.request_id].tokens for request in cold]
    seen["greedy expected"] = [greedy(model, request) for request in cold]
    seen["together"] = [together[request.request_id] for request in warm]
    seen["reversed"] = [run(engine, warm[::-1])[request.request_id] for request in warm]
    seen["alone"] = [run(engine, [request])[request.request_id] for request in warm[:6]]
    reseeded = run(engine, make_requests(prompts, seed=9))
    seen["reseeded"] = [reseeded[request.request_id] for request in warm]

    long = make_requests(make_prompts(30, 300, seed=2), max_tokens=3)  # 9000 prompt tokens
    chunked = run(engine, long)
    seen["chunked"] = [chunked[request.request_id].tokens for request in long]
    seen["not chunked"] = [run(engine, [request])[request.request_id].tokens for request in long]

    same = make_requests([(3, 4, 5)] * 4000, max_tokens=1)  # seeds 100, 101, ...
    drawn = [sample.tokens[0] for sample in run(engine, same).values()]
    seen["counts"] = torch.bincount(torch.tensor(drawn), minlength=VOCAB).tolist()
    with torch.no_grad():
        seen["probabilities"] = model(torch.tensor([[3, 4, 5]])).logits[0, -1].softmax(-1).tolist()


def _limits(engine: VllmEngine, seen: dict[str, Any]) -> None:
    requests = make_requests(make_prompts(64, 9, seed=3), max_tokens=12)
    seen["limited"] = list(run(engine, requests).values())
    engine.add(make_requests([[2]]))
    seen["used id"] = refusal(lambda: engine.add(make_requests([[2]])))
    seen["unknown id"] = refusal(lambda: engine.abort([0, 7]))
    seen["unfinished after a refused abort"] = engine.num_unfinished
    engine.abort([0])
    seen["unfinished after abort"] = engine.num_unfinished
    seen["long"] = refusal(lambda: engine.add(make_requests([[2] * 500], max_tokens=13)))
    seen["foreign token"] = refusal(lambda: engine.add(make_requests([[VOCAB]])))
    seen["foreign generated"] = refusal(
        lambda: engine.add(make_requests([[2]], generated=(-1,), logprobs=(-1.0,), versions=(0,)))
    )


def _held(engine: VllmEngine) -> int:
    runner = engine._llm.model_executor.driver_worker.worker.model_runner
    return sum(cache.untyped_storage().nbytes() for cache in runner.kv_caches)


def _updates(engine: VllmEngine, model: Any, seen: dict[str, Any]) -> None:
    """Change every weight (the tied embedding too) with and without a commit."""
    long = make_requests(make_prompts(1, 300, seed=4), max_tokens=4)
    seen["fresh error"] = largest_error(model, long, run(engine, long))
    perturb(model)
    write(engine, model)
    seen["stale error"] = largest_error(model, long, run(engine, long))
    engine.poison()
    seen["step while poisoned"] = refusal(engine.step)
    engine.commit(2)
    after = run(engine, long)
    seen["committed error"] = largest_error(model, long, after)
    seen["committed versions"] = after[0].versions

    short = make_requests(make_prompts(8, 9, seed=5))
    engine.poison()
    engine.parameters()["model.embed_tokens.weight"].mul_(1.5)  # tied: the head too
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    engine.commit(3)
    seen["tied error"] = largest_error(model, short, run(engine, short))

    engine.add(short)
    samples = engine.step()
    engine.sleep()
    seen["asleep bytes"], seen["step while asleep"] = _held(engine), refusal(engine.step)
    engine.commit(3)
    seen["awake bytes"] = _held(engine)
    samples += sample_all(engine, [])
    seen["slept error"] = largest_error(model, short, {s.request_id: s for s in samples})

    engine.poison()
    engine.parameters()["model.norm.weight"].fill_(float("nan"))
    engine.commit(4)
    seen["nan"] = refusal(lambda: run(engine, short))
    seen["nan so far"] = refusal(engine.unfinished)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = make_model(tmp_path_factory.mktemp("models"), "llama_tied")
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
    assert "0..31" in seen["foreign generated"]


def test_weights_written_in_place_take_effect_and_commit_drops_stale_prefixes(
    seen: dict[str, Any],
) -> None:
    assert seen["fresh error"] < 1e-4
    assert seen["stale error"] > 1e-2  # without a commit the prefix cache of old weights is used
    assert seen["committed error"] < 1e-4
    assert set(seen["committed versions"]) == {2}
    assert seen["tied error"] < 1e-4


def test_an_engine_asleep_holds_no_cache_and_goes_on_where_it_was(seen: dict[str, Any]) -> None:
    assert seen["asleep bytes"] == 0
    assert seen["awake bytes"] > 0
    assert "commit" in seen["step while asleep"]
    assert seen["slept error"] < 1e-4


def test_an_abort_of_an_unknown_id_drops_nothing(seen: dict[str, Any]) -> None:
    assert "['7']" in seen["unknown id"]
    assert seen["unfinished after a refused abort"] == 1
    assert seen["unfinished after abort"] == 0


def test_damaged_weights_are_an_error_and_not_a_sample(seen: dict[str, Any]) -> None:
    assert seen["nan"].startswith("WeightSyncError")
    assert seen["nan so far"].startswith("WeightSyncError")


def test_the_process_is_left_as_it_was(seen: dict[str, Any]) -> None:
    assert seen["random state kept"]
    assert seen["threads kept"]
    assert seen["default group works"]
    assert seen["step after close"] == "replica-0: the engine is closed"
    assert seen["shared memory"] == []
    assert seen["children"] == []
