"""The contract against a real vLLM: as megarl starts it, and as it would start by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.contract import compare_manifest
from megarl.rollout.vllm_engine import VllmEngine
from megatron_bridge.layouts.vllm import vllm_manifest
from megatron_bridge.models.families import load_spec
from tests.dist.vllm_cases import enter_world, make_model, make_settings
from tests.processes import run_ranks

pytestmark = pytest.mark.dist


def _differences(rank: int, size: int, path: str) -> list[list[str]]:
    """Compare engines that pack their weights, as vLLM's default is on CPUs, and that do not."""
    from megarl.rollout import vllm_worker

    enter_world(rank, size)
    keep_live = vllm_worker.keep_cpu_weights_live
    found = []
    for prepare in (lambda: None, keep_live):
        vllm_worker.keep_cpu_weights_live = prepare
        engine = VllmEngine(make_settings(path))
        manifest = vllm_manifest(load_spec(Path(path)), 1, 0, global_rank=0)
        live = engine.parameters()
        found.append(compare_manifest(manifest, live, torch.float32, engine.transforms()))
        engine.close()
    return found


def test_an_engine_that_transforms_its_weights_after_loading_is_told_apart(tmp_path: Path) -> None:
    ((packed, live),) = run_ranks(_differences, 1, make_model(tmp_path, "llama"), timeout=200)
    assert live == []
    for part, shape in (("self_attn.qkv_proj", (256, 64)), ("mlp.down_proj", (64, 192))):
        layer = f"model.layers.0.{part}"
        assert f"wrong shape: {layer}.weight is (0,), expected {shape}" in packed
        assert (
            f"transformed: {layer} by packing its weights, expected to compute with its weights "
            "as they lie"
        ) in packed
