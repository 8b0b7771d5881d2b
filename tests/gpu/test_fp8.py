"""FP8 weights on a GPU: the same bits as on a CPU, fast enough to hide, and live inside vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_bridge.quantize import BLOCK, FP8, quantize_blockwise, quantize_per_tensor
from tests.processes import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

SHARE_OF_HBM = 0.05  # of a copy's bandwidth: 3 bytes an element are counted, about 25 are moved
FP8_LOGPROB = 1e-3  # the same kernels on the same bits
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def _empty(weight: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(weight, dtype=FP8)
    num_blocks = [-(-size // BLOCK) for size in weight.shape]
    return out, torch.empty(num_blocks, device=weight.device, dtype=torch.float32)


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    out, scales = _empty(weight)
    quantize_blockwise(weight, out, scales)
    return out, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("exponent", [-125, -10, 3])
def test_cuda_and_cpu_write_the_same_bits(dtype: torch.dtype, exponent: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(777, 5000) * 2.0 ** torch.randint(-6, 6, (777, 5000))
    weight = (weight * 2.0**exponent).to(dtype)
    weight[:128, :128] = 0
    for cuda, cpu in zip(_quantized(weight.cuda()), _quantized(weight), strict=True):
        assert torch.equal(cuda.cpu().view(torch.uint8), cpu.view(torch.uint8))
    results = []
    for tensor in (weight.cuda(), weight):
        out, scale = torch.empty_like(tensor, dtype=FP8), torch.empty(1, device=tensor.device)
        quantize_per_tensor(tensor, out, scale)
        results.append((out.cpu().view(torch.uint8), scale.item()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def _seconds(action: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    action()
    start.record()
    for _ in range(10):
        action()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e4


def test_quantising_runs_at_a_share_of_memory_bandwidth(
    record_property: Callable[[str, object], None],
) -> None:
    weight = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)
    out, scales = _empty(weight)
    copied = torch.empty_like(weight)
    copy = 4 * weight.numel() / _seconds(lambda: copied.copy_(weight))
    quantise = 3 * weight.numel() / _seconds(lambda: quantize_blockwise(weight, out, scales))
    record_property("bytes_per_second", {"copy": copy, "quantise": quantise})
    assert quantise > SHARE_OF_HBM * copy


def _save_models(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """Save a random model in FP8; return its folder, and its tensors as vLLM names and joins them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    saved, joined = {}, dict(weights)
    for name, weight in weights.items():
        if "_proj" in name:
            saved[name], saved[f"{name}_scale_inv"] = _quantized(weight)
        else:
            saved[name] = weight
    for whole, parts in PARTS.items():
        for name in [name for name in weights if parts[0] in name]:
            named = [name.replace(parts[0], part) for part in parts]
            joined[name.replace(parts[0], whole)] = torch.cat([joined.pop(n) for n in named])
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder), joined


def _write(parameters: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Quantise on the GPU straight into the engine's own tensors."""
    for name, weight in weights.items():
        if "_proj" in name:
            scales = parameters[f"{name}_scale_inv"]
            quantize_blockwise(weight.cuda(), parameters[name], scales)
        else:
            parameters[name][: len(weight)].copy_(weight)


def _sample(rank: int, size: int, folder: str, weights: dict[str, Tensor] | None) -> list[object]:
    """Sample with vLLM's own loading of the checkpoint, or with weights written in place."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ["VLLM_USE_DEEP_GEMM"] = "0"  # DeepGEMM rounds scales to powers of two while loading
    from megarl.rollout.engine import SampleRequest
    from megarl.rollout.vllm_engine import EngineSettings, VllmEngine

    engine = VllmEngine(
        EngineSettings(
            model_path=folder,
            dtype="bfloat16",
            tp=1,
            max_model_len=128,
            max_running_sequences=8,
            kv_cache_bytes=256 << 20,
            seed=0,
            enforce_eager=True,
            prefix_caching=True,
            job="fp8-test",
            load_weights=weights is None,
        )
    )
    if weights is not None:
        _write(engine.parameters(), weights)
        engine.commit(1)
    request = SampleRequest(
        request_id=0,
        prompt=(5, 6, 7, 8),
        max_tokens=32,
        temperature=0.0,
        seed=0,
        eos_token_id=2,
    )
    engine.add([request])
    samples = []
    while engine.num_unfinished:
        samples += engine.step()
    engine.close()
    return [samples[0].tokens, samples[0].logprobs]


def test_quantised_weights_written_in_place_are_those_vllm_loads(tmp_path: Path) -> None:
    folder, weights = _save_models(tmp_path)
    tokens, logprobs = run_ranks(_sample, 1, folder, None)[0]
    written_tokens, written_logprobs = run_ranks(_sample, 1, folder, weights)[0]
    assert written_tokens == tokens
    assert (torch.tensor(written_logprobs) - torch.tensor(logprobs)).abs().max() < FP8_LOGPROB
