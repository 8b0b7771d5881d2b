"""Several real vLLM engines: one family after the other, and replicas beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megarl.rollout.vllm_engine import VllmEngine
from tests.dist.vllm_cases import (
    FAMILIES,
    enter_world,
    fused,
    largest_error,
    make_model,
    make_prompts,
    make_requests,
    make_settings,
    refusal,
    run,
    shared_memory,
    write,
)
from tests.processes import run_ranks

pytestmark = pytest.mark.dist


# -- families, loaded from disk as for evaluation ----------------------------------------------


def _families(rank: int, size: int, paths: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Build one engine after the other in this process."""
    enter_world(rank, size)
    seen: dict[str, dict[str, Any]] = {}
    seen["wrong world"] = {"refusal": refusal(lambda: VllmEngine(make_settings("", tp=2)))}
    for family, path in paths.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        engine = VllmEngine(make_settings(path, load_weights=True))
        expected, got = fused(dict(model.named_parameters())), engine.parameters()
        requests = make_requests(make_prompts(16, 9, seed=1))
        samples = run(engine, requests)
        seen[family] = {
            "names": (sorted(expected), sorted(got)),
            "unequal": [
                name
                for name, weight in expected.items()
                if not torch.equal(got[name][: len(weight)], weight)
            ],
            "error": largest_error(model, requests, samples),
            "versions": set(samples[0].versions),
        }
        for name, weight in model.named_parameters():
            if any(part in name for part in ("lm_head", "bias", "q_norm", "experts", "mlp.gate.")):
                weight.data.add_(torch.randn_like(weight) * 0.1)
        engine.poison()
        write(engine, model)
        engine.commit(1)
        seen[family]["written error"] = largest_error(model, requests, run(engine, requests))
        engine.close()
    return seen


def test_families_load_bit_for_bit_and_take_writes(tmp_path: Path) -> None:
    paths = {family: make_model(tmp_path, family) for family in FAMILIES if family != "llama_tied"}
    (seen,) = run_ranks(_families, 1, paths, timeout=400)
    assert "expected the replica's tp 2" in seen.pop("wrong world")["refusal"]
    for family, found in seen.items():
        expected, got = found["names"]
        assert got == expected, family
        assert found["unequal"] == [], family
        assert found["error"] < 1e-4, family
        assert found["versions"] == {0}, family
        assert found["written error"] < 1e-4, family


# -- replicas of one host ----------------------------------------------------------------------

REPLICAS = ((0,), (1,), (2, 3))  # global ranks: tp 1, tp 1, tp 2


def _replica(rank: int, size: int, path: str, folder: str) -> dict[str, Any]:
    """Enter the replica's world, then sample the same requests everywhere."""
    index = next(i for i, ranks in enumerate(REPLICAS) if rank in ranks)
    ranks = REPLICAS[index]
    local = ranks.index(rank)
    meeting_point = f"file://{folder}/replica-{index}"
    dist.init_process_group("gloo", meeting_point, rank=local, world_size=len(ranks))
    enter_world(local, len(ranks))
    engine = VllmEngine(make_settings(path, tp=len(ranks), load_weights=True))
    mapped = shared_memory()
    samples = run(engine, make_requests(make_prompts(32, 9, seed=1)))
    dist.barrier()
    engine.close()
    return {"samples": samples, "shared memory": mapped}


def test_replicas_of_tp_1_and_2_share_a_host_and_sample_alike(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama")
    seen = run_ranks(_replica, 4, path, str(tmp_path), timeout=400, default_group=False)
    first = seen[0]["samples"]
    for rank, found in enumerate(seen):
        assert found["shared memory"] == [], rank
        assert len(found["samples"]) == 32
        for request_id, sample in found["samples"].items():
            assert sample.tokens == first[request_id].tokens, rank
            assert sample.logprobs == pytest.approx(first[request_id].logprobs, abs=1e-4)
