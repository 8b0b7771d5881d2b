"""Mixtures with shared experts and latent attention: the oracle of vLLM's parameters against what
vLLM's own loader leaves in its live ones.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from megarl.rollout.vllm_engine import EngineSettings, VllmEngine
from megatron_bridge.models.families import load_spec
from tests.processes import run_ranks
from tests.unit.megatron_bridge.oracle import vllm_derived, vllm_tensors

pytestmark = pytest.mark.dist

SIZES: dict = {
    "vocab_size": 100,  # vLLM pads it to 128
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT: dict = {
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # with 64 rotary features: all that the CPU's decoding kernel is built for
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen2_moe": Qwen2MoeConfig(**SIZES, num_experts=4, shared_expert_intermediate_size=64),
    "deepseek_v2": DeepseekV2Config(
        **{**SIZES, **LATENT, "q_lora_rank": None},
        n_shared_experts=2,
        topk_method="greedy",
        scoring_func="softmax",
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        **LATENT,
        n_shared_experts=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        num_nextn_predict_layers=0,
    ),
}


def _save_models(folder: Path) -> dict[str, str]:
    torch.manual_seed(3)
    for name, config in FAMILIES.items():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        biases = [bias for key, bias in model.named_buffers() if key.endswith("correction_bias")]
        for weight in [*model.parameters(), *biases]:
            torch.nn.init.normal_(weight)
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in FAMILIES}


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(0, 1) if weight.dim() > 2 else weight


def _is_view(name: str, model: torch.nn.Module) -> bool:
    """Whether a derived matrix lies in the storage of its ``kv_b_proj``, and so is never stale."""
    source = f"{name.split('mla_attn.')[0]}kv_b_proj.weight"
    found, weight = model.get_parameter(name), model.get_parameter(source)
    return found.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def _compare(rank: int, size: int, paths: dict[str, str]) -> dict[str, list[str]]:
    """Return, for each model, the parameters that only one side has or that differ."""
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
            job=f"families-{family}",
            load_weights=True,
        )
        engine, wrong[family] = VllmEngine(settings), []
        # not `parameters`, which would miss what vLLM derives from them
        live = {name: _matrix(weight.data) for name, weight in engine._model.named_parameters()}
        spec = load_spec(Path(path))
        expected = vllm_tensors(spec, load_file(Path(path) / "model.safetensors"), size, rank)
        if spec.mla:
            derived = vllm_derived(spec, expected)
            expected |= {name: _matrix(tensor) for name, tensor in derived.items()}
            wrong[family] += [name for name in derived if not _is_view(name, engine._model)]
        wrong[family] += sorted(set(live) ^ set(expected))
        wrong[family] += [
            name
            for name in set(live) & set(expected)
            if live[name].dtype != expected[name].dtype
            or not torch.equal(live[name], expected[name])
        ]
        engine.close()
    return wrong


@pytest.mark.parametrize("tp", [1, 2])
def test_the_oracle_equals_the_parameters_that_vllm_loads(tp: int, tmp_path: Path) -> None:
    paths = _save_models(tmp_path)
    for wrong in run_ranks(_compare, tp, paths, timeout=400):
        assert wrong == {name: [] for name in FAMILIES}
