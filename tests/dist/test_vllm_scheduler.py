"""The short way of decoding steps against vLLM's own scheduler: same samples, from the same steps.

Blocks hold 128 tokens on CPUs: prompts begin on both sides of their edges, and sequences cross them.
"""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import PartialKv
from megarl.rollout.engine import Sample
from megarl.rollout.vllm_engine import VllmEngine
from tests.dist.vllm_cases import (
    enter_world,
    make_model,
    make_prompts,
    make_requests,
    make_settings,
)
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

_LENGTHS = (5, 126, 127, 128, 129, 200, 254, 255, 256)
_TIGHT = 14 << 17  # bytes of 14 blocks: the requests together need more


def _requests(first_id: int) -> list[Any]:
    requests = []
    for place, length in enumerate(_LENGTHS):
        prompts = make_prompts(1, length, seed=place)
        tokens = 40 + 30 * (place % 4)
        requests += make_requests(prompts, first_id + place, max_tokens=tokens, seed=place)
    return requests


def _rollout(engine: VllmEngine, plain: bool) -> dict[str, Any]:
    """Sample in two waves with an abort and a commit between; count steps and preemptions."""
    scheduler = engine._core.engine_core.scheduler
    scheduler._can_decode = not plain
    counts = {"short": 0, "steps": 0, "preempted": 0}
    decode, preempt = scheduler._decode, scheduler._preempt_request

    def counted(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return run

    scheduler._decode = counted("short", decode)
    scheduler._preempt_request = counted("preempted", preempt)
    engine.add(_requests(0))
    samples: list[tuple[int, Sample]] = []
    while engine.num_unfinished:
        samples += [(counts["steps"], sample) for sample in engine.step()]
        counts["steps"] += 1
        if counts["steps"] == 7:
            engine.abort([4])
        if counts["steps"] == 15:
            engine.poison()
            engine.commit(2)
            engine.add(_requests(100))
    scheduler._decode, scheduler._preempt_request = decode, preempt
    return counts | {"samples": samples}


def _both(rank: int, size: int, path: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
    enter_world(rank, size)
    engine = VllmEngine(make_settings(path, load_weights=True, **changes))
    try:
        results = []
        for plain in (True, False):
            engine.poison()
            engine.commit(1)
            results.append(_rollout(engine, plain))
        return results
    finally:
        engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kv_cache_bytes": _TIGHT}, id="preempted"),
        pytest.param({"kv_cache_bytes": _TIGHT, "prefix_caching": False}, id="no-prefixes"),
        pytest.param({"partial_kv": PartialKv.KEEP}, id="keep"),
        pytest.param({"max_running_sequences": 6}, id="waiting"),
    ],
)
def test_decoding_steps_are_those_of_vllm(tmp_path: Any, changes: dict[str, Any]) -> None:
    path = make_model(tmp_path, "qwen3")
    ((plain, short),) = run_ranks(_both, 1, path, changes)
    assert short["samples"] == plain["samples"]
    assert len(short["samples"]) == 2 * len(_LENGTHS) - 1
    assert (short["steps"], short["preempted"]) == (plain["steps"], plain["preempted"])
    assert plain["short"] == 0
    assert short["short"] > (0.3 if short["preempted"] else 0.8) * short["steps"]
    if "kv_cache_bytes" in changes:
        assert short["preempted"] > len(_LENGTHS)  # more than the commit's
