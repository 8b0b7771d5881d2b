"""FP8 weights from end to end: Megatron's bfloat16 model, a transfer, vLLM on the FP8 it received.

A real engine that vLLM filled with dummy weights gets a real trainer's. Its memory must hold the
bits of quantising each whole parameter, and it must sample as transformers scores the scaled-back
weights: not as the unquantised ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megarl.contract import compare_manifest, first_difference
from megarl.ddma.engine import WeightSync
from megarl.ddma.transports.collective import CollectiveTransport
from megarl.rollout.engine import SampleRequest
from megarl.rollout.vllm_engine import VllmEngine
from megarl.world import timed_wait
from megatron_bridge.io.hf import load_hf
from megatron_bridge.layouts.megatron import megatron_manifest, megatron_side
from megatron_bridge.layouts.vllm import vllm_manifest, vllm_side
from megatron_bridge.models.families import load_spec
from megatron_bridge.parallel import GeneratorLayout, Quantization, TrainerLayout
from megatron_bridge.plan import plan
from megatron_bridge.quantize import BLOCK, dequantize_blockwise, quantize_blockwise
from megatron_bridge.spec import RankManifest
from tests.dist.test_step_across_layouts import _Meeting
from tests.dist.vllm_cases import make_settings
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

FP8 = GeneratorLayout(quantization=Quantization.FP8_BLOCK)
TRAINER = TrainerLayout(vocab_divisor=16)
PROMPTS = ((5, 17, 40), (3, 99, 8, 64, 21, 7, 33), tuple(range(10, 50)))
Samples = list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]


def _save_model(folder: Path) -> None:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        initializer_range=0.06,
        tie_word_embeddings=False,
        eos_token_id=2,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def _sync(meeting: _Meeting, folder: Path, params: dict[str, Tensor]) -> WeightSync:
    spec = load_spec(folder)
    target = vllm_side(spec, FP8, first_rank=1, dtype="bfloat16")
    transport = CollectiveTransport(
        meeting.group("weights", (0, 1)), torch.device("cpu"), wait=timed_wait(60.0)
    )
    return WeightSync(plan(megatron_side(spec, TRAINER), target), meeting.rank, transport, params)


def _train(meeting: _Meeting, folder: Path) -> None:
    from megatron_bridge.runtime import setup
    from megatron_bridge.runtime.model import MegatronModel, ModelSettings

    meeting.enter_world("trainer", (0,))
    setup.initialize(TRAINER, seed=1)
    spec = load_spec(folder)
    model = MegatronModel(spec, TRAINER, ModelSettings(dtype="bfloat16"))
    params = model.parameters()
    load_hf(folder, megatron_manifest(spec, TRAINER, 0), params)
    _sync(meeting, folder, params).send(1)


def _wrong_bits(folder: Path, manifest: RankManifest, live: dict[str, Tensor]) -> list[str]:
    """Return the parameters that do not hold the bits of quantising the dense ones whole."""
    dense = vllm_manifest(load_spec(folder), 1, 0, global_rank=1)
    expected = {p.name: torch.empty(p.shape, dtype=torch.bfloat16) for p in dense.params}
    load_hf(folder, dense, expected)
    scales_of = {param.name: param.scales for param in manifest.params if param.quantization}
    for name, scales in scales_of.items():
        weight = expected[name]
        expected[name] = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        expected[scales] = torch.empty([size // BLOCK for size in weight.shape])
        quantize_blockwise(weight, expected[name], expected[scales])
    assert expected.keys() == live.keys()
    assert len(scales_of) == 2 * 4  # qkv, o, gate_up and down of each layer; nothing else
    return [
        name
        for name, tensor in expected.items()
        if not torch.equal(tensor.view(torch.uint8), live[name].view(torch.uint8))
    ]


def _generate(meeting: _Meeting, folder: Path) -> dict[str, Any]:
    meeting.enter_world("replica", (1,))
    engine = VllmEngine(
        make_settings(
            str(folder),
            dtype="bfloat16",
            max_model_len=64,
            max_running_sequences=8,
            kv_cache_bytes=8 << 20,
            job="fp8",
            quantization=Quantization.FP8_BLOCK,
        )
    )
    manifest = vllm_manifest(load_spec(folder), 1, 0, global_rank=1, layout=FP8)
    live = engine.parameters()
    found: dict[str, Any] = {
        "manifest": compare_manifest(manifest, live, torch.bfloat16, engine.transforms())
    }
    engine.poison()
    _sync(meeting, folder, live).receive()
    engine.commit(1)
    found["wrong"] = _wrong_bits(folder, manifest, live)
    found["checkpoint"] = first_difference(folder, manifest, live, torch.bfloat16)
    live["model.layers.1.mlp.down_proj.weight"].view(torch.uint8)[3, 130] ^= 1
    found["spoilt"] = first_difference(folder, manifest, live, torch.bfloat16)
    live["model.layers.1.mlp.down_proj.weight"].view(torch.uint8)[3, 130] ^= 1
    found["samples"] = _sample(engine)
    engine.close()
    return found


def _sample(engine: VllmEngine) -> Samples:
    engine.add(
        [
            SampleRequest(
                request_id=index,
                prompt=prompt,
                max_tokens=16,
                temperature=1.0,
                seed=index,
                eos_token_id=2,
            )
            for index, prompt in enumerate(PROMPTS)
        ]
    )
    samples = []
    while engine.num_unfinished:
        samples += engine.step()
    samples.sort(key=lambda sample: sample.request_id)
    pairs = zip(PROMPTS, samples, strict=True)
    return [(prompt, sample.tokens, sample.logprobs) for prompt, sample in pairs]


def _run(rank: int, size: int, port: int, folder: Path) -> dict[str, Any] | None:
    meeting = _Meeting(rank, port)
    return _generate(meeting, folder) if rank else _train(meeting, folder)


@torch.no_grad()
def _mean_error(model: torch.nn.Module, samples: Samples) -> float:
    errors = []
    for prompt, tokens, found in samples:
        logprobs = model(torch.tensor([[*prompt, *tokens]])).logits[0, :-1].float().log_softmax(-1)
        chosen = logprobs[len(prompt) - 1 :].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        errors.append((chosen - torch.tensor(found)).abs())
    return float(torch.cat(errors).mean())


@torch.no_grad()
def _scale_back(model: torch.nn.Module) -> None:
    for name, weight in model.named_parameters():
        if "_proj" in name:
            elements = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
            scales = torch.empty([size // BLOCK for size in weight.shape])
            quantize_blockwise(weight, elements, scales)
            dequantize_blockwise(elements, scales, weight)


def test_vllm_computes_with_the_fp8_bits_that_megatron_sent(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = tmp_path / "model"
    _save_model(folder)
    _, found = run_ranks(_run, 2, store.port, folder, timeout=200, default_group=False)
    assert found["manifest"] == []
    assert found["wrong"] == []
    assert found["checkpoint"] is None
    assert found["spoilt"].startswith("model.layers.1.mlp.down_proj.weight[3, 130] (in ")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    plain = _mean_error(model, found["samples"])
    _scale_back(model)
    scaled_back = _mean_error(model, found["samples"])
    assert scaled_back < 0.03 < plain  # 0.009 and 0.088: bfloat16, and what quantising changes
