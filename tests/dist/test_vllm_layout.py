"""The vLLM manifest against what vLLM's own loader leaves in its live parameters.

vLLM changes the process that imports it, so engines only live in children of `run_ranks`.
"""

import os
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megarl.rollout.vllm_engine import EngineSettings, VllmEngine
from megatron_bridge.io.hf import load_hf
from megatron_bridge.layouts.vllm import vllm_manifest
from megatron_bridge.models.families import load_spec
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

SIZES: dict = {
    "vocab_size": 100,  # vLLM pads it to 128
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
}


def _save_models(folder: Path) -> dict[str, str]:
    """Save random models: biases and norms too, which transformers would leave at 0 and 1."""
    torch.manual_seed(3)
    for name, config in FAMILIES.items():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            torch.nn.init.normal_(weight)
        model.save_pretrained(folder / name, max_shard_size="200KB")
    return {name: str(folder / name) for name in FAMILIES}


def _compare(rank: int, size: int, paths: dict[str, str]) -> dict[str, list[str]]:
    """Load each model with vLLM and, by the manifest, over NaN; return what differs."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    wrong: dict[str, list[str]] = {}
    for family, path in paths.items():
        settings = EngineSettings(
            model_path=path,
            dtype="float32",
            tp=size,
            max_model_len=128,
            max_running_sequences=4,
            kv_cache_bytes=8 << 20,
            seed=0,
            enforce_eager=True,
            prefix_caching=False,
            job=f"layout-{family}",
            load_weights=True,
        )
        engine = VllmEngine(settings)
        live = engine.parameters()
        # vLLM leaves what no token reads (padding) as it was allocated or zero: ours is zero.
        manifest = vllm_manifest(load_spec(Path(path)), size, rank, global_rank=rank)
        ours = {name: torch.full_like(tensor, torch.nan) for name, tensor in live.items()}
        load_hf(Path(path), manifest, ours)  # raises where names or shapes differ
        wrong[family] = [name for name in live if not torch.equal(live[name], ours[name])]
        assert sorted(ours) == sorted(param.name for param in manifest.params)
        engine.close()
    return wrong


@pytest.mark.parametrize("tp", [1, 2])
def test_manifest_equals_the_parameters_that_vllm_loads(tp: int, tmp_path: Path) -> None:
    paths = _save_models(tmp_path)
    if tp == 2:  # one key/value head on both ranks, biases, a tied padded embedding; experts
        paths = {family: paths[family] for family in ("qwen2", "mixtral")}
    for wrong in run_ranks(_compare, tp, paths, timeout=400):
        assert wrong == {name: [] for name in paths}
