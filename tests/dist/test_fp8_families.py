"""FP8 generators of mixtures and latent attention: what they hold, and what they compute with it.

A real engine with dummy weights, poisoned, gets a real bfloat16 trainer's. It must hold the bits
of quantising each whole parameter of the dense oracle, and be, to the bit, the engine that vLLM's
own loader fills from an FP8 checkpoint of the same weights.
"""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen2MoeConfig

from megarl.contract import compare_manifest, first_difference, poison
from megarl.ddma.engine import WeightSync
from megarl.ddma.transports.collective import CollectiveTransport
from megarl.rollout.vllm_engine import VllmEngine
from megarl.world import timed_wait
from megatron_bridge.io.hf import load_hf
from megatron_bridge.layouts.megatron import megatron_manifest, megatron_side
from megatron_bridge.layouts.vllm import vllm_manifest, vllm_side
from megatron_bridge.models.families import load_spec
from megatron_bridge.parallel import GeneratorLayout, Quantization, TrainerLayout
from megatron_bridge.plan import plan
from tests.dist.test_fp8_engine import _sample
from tests.dist.test_real_engines import LATENT, SIZES, V3
from tests.dist.test_step_across_layouts import _Meeting
from tests.dist.vllm_cases import make_settings
from tests.processes import run_ranks
from tests.unit.megatron_bridge.oracle import vllm_tensors
from tests.weights import differing, quantized_tensors

pytestmark = pytest.mark.dist

BLOCKS = Quantization.FP8_BLOCK
TRAINER = TrainerLayout(vocab_divisor=16)
BLOCK_SIZES: dict[str, Any] = {
    **SIZES,
    "vocab_size": 128,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen2_moe": Qwen2MoeConfig(
        **{**BLOCK_SIZES, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2},
        num_experts=4,
        shared_expert_intermediate_size=256,
    ),
    "deepseek_v3": DeepseekV3Config(
        **{**LATENT, **V3, **BLOCK_SIZES}, q_lora_rank=128, n_shared_experts=1
    ),
}


def _save_models(folder: Path) -> None:
    """Save each family in bfloat16, and in FP8 as DeepSeek's checkpoints are."""
    torch.manual_seed(3)
    for family, config in FAMILIES.items():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(torch.randn_like(weight) * 0.1 + ("norm" in name))
        model.save_pretrained(folder / family)
        fp8 = folder / f"{family}-fp8"
        shutil.copytree(folder / family, fp8)
        saved = load_file(fp8 / "model.safetensors")
        save_file(quantized_tensors(saved, BLOCKS), fp8 / "model.safetensors", {"format": "pt"})
        said = json.loads((fp8 / "config.json").read_text())
        said["quantization_config"] = {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }
        (fp8 / "config.json").write_text(json.dumps(said))


def _sync(meeting: _Meeting, folder: Path, tp: int, params: dict[str, torch.Tensor]) -> WeightSync:
    spec, layout = load_spec(folder), GeneratorLayout(tp=tp, quantization=BLOCKS)
    transfer = plan(
        megatron_side(spec, TRAINER, dtype="bfloat16"),
        vllm_side(spec, layout, first_rank=1, dtype="bfloat16"),
    )
    group = meeting.group(f"weights/{folder.name}", tuple(range(1 + tp)))
    transport = CollectiveTransport(group, torch.device("cpu"), wait=timed_wait(120.0))
    kinds = {item.quantization for m in transfer.messages(0) for item in m.items}
    assert kinds == {"", "block"}  # all that is quantised is quantised by the trainer
    return WeightSync(transfer, meeting.rank, transport, params)


def _train(meeting: _Meeting, folder: Path, tp: int) -> None:
    from megatron_bridge.runtime import setup
    from megatron_bridge.runtime.model import MegatronModel, ModelSettings

    meeting.enter_world("trainer", (0,))
    setup.initialize(TRAINER, seed=1)
    for family in FAMILIES:
        spec = load_spec(folder / family)
        model = MegatronModel(spec, TRAINER, ModelSettings(dtype="bfloat16"))
        params = model.parameters()
        load_hf(folder / family, megatron_manifest(spec, TRAINER, 0), params)
        _sync(meeting, folder / family, tp, params).send(1)


def _start(path: Path, tp: int, *, load_weights: bool) -> VllmEngine:
    gc.freeze()  # vLLM collects garbage several times a start: 0.5 s for all that is imported
    return VllmEngine(
        make_settings(
            str(path),
            dtype="bfloat16",
            tp=tp,
            max_model_len=64,
            max_running_sequences=8,
            kv_cache_bytes=8 << 20,
            job=path.name,
            quantization=BLOCKS,
            load_weights=load_weights,
        )
    )


def _generate(meeting: _Meeting, folder: Path, tp: int) -> dict[str, list[str]]:
    """Return what is wrong with each family."""
    meeting.enter_world("replica", tuple(range(1, 1 + tp)))
    local_rank, wrong = meeting.rank - 1, {}
    for family in FAMILIES:
        spec = load_spec(folder / family)
        layout = GeneratorLayout(tp=tp, quantization=BLOCKS)
        manifest = vllm_manifest(spec, tp, local_rank, global_rank=meeting.rank, layout=layout)
        engine = _start(folder / family, tp, load_weights=False)
        live = engine.parameters()
        found = compare_manifest(manifest, live, torch.bfloat16, engine.transforms())
        engine.poison()
        poison(live)
        _sync(meeting, folder / family, tp, live).receive()
        engine.commit(1)
        dense = load_file(folder / family / "model.safetensors")
        dense = {n: t.float() if "correction" in n else t for n, t in dense.items()}
        expected = quantized_tensors(vllm_tensors(spec, dense, tp, local_rank), BLOCKS)
        found += differing(live, expected)
        found += filter(None, [first_difference(folder / family, manifest, live, torch.bfloat16)])
        received, samples = {n: t.clone() for n, t in live.items()}, _sample(engine)
        engine.close()
        loaded = _start(folder / f"{family}-fp8", tp, load_weights=True)
        found += differing(received, loaded.parameters())
        found += [] if _sample(loaded) == samples else ["samples"]
        loaded.close()
        wrong[family] = found
    return wrong


def _run(rank: int, size: int, port: int, folder: Path) -> dict[str, list[str]] | None:
    meeting = _Meeting(rank, port)
    return (_generate if rank else _train)(meeting, folder, size - 1)


def test_an_fp8_generator_is_the_engine_that_vllm_loads_from_an_fp8_checkpoint(
    tmp_path: Path,
) -> None:
    tp = 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _save_models(tmp_path)
    results = run_ranks(_run, 1 + tp, store.port, tmp_path, timeout=300, default_group=False)
    for wrong in results[1:]:
        assert wrong == {family: [] for family in FAMILIES}
