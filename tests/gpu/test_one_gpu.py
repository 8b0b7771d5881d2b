"""The paths that only a GPU has: Transformer Engine with packed attention, NCCL, vLLM's kernels.

`python -m pytest -m gpu` runs them; without CUDA they are skipped. Tolerances are those of bfloat16.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_bridge.io.hf import load_hf
from megatron_bridge.layouts.megatron import megatron_manifest, megatron_side
from megatron_bridge.layouts.vllm import vllm_manifest, vllm_side
from megatron_bridge.models.families import load_spec
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.plan import plan
from tests.processes import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

LENGTHS = (17, 40, 3)
BF16_LOGPROB = 0.25  # largest difference of one token's log-probability between two bf16 engines


def _save_model(folder: Path) -> Path:
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
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    return folder / "model"


def _tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 512, (length,), generator=generator) for length in LENGTHS]


def _reference_logprobs(folder: str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for tokens in _tokens():
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        found += [torch.zeros(1), logprobs.gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(found).detach()


def _train_and_measure(rank: int, size: int, folder: str) -> dict[str, object]:
    """Log-probabilities, then a step whose loss is their negative sum; on one GPU with TE."""
    from megatron_bridge.runtime import setup
    from megatron_bridge.runtime.batch import MicroBatch, TokenOutputs
    from megatron_bridge.runtime.model import MegatronModel, ModelSettings
    from megatron_bridge.runtime.train import LossOutputs, MegatronTrainer, OptimizerSettings

    setup.initialize(TrainerLayout(), 0)
    spec = load_spec(Path(folder))
    model = MegatronModel(spec, TrainerLayout(), ModelSettings(dtype="bfloat16"))
    manifest = megatron_manifest(spec, TrainerLayout(), 0, te=model.fused_norms)
    load_hf(Path(folder), manifest, model.parameters())
    trainer = MegatronTrainer(model, OptimizerSettings(lr=1e-3))
    trainer.reload_master_weights()
    device = setup.device()
    batch = MicroBatch(
        lengths=torch.tensor(LENGTHS, device=device),
        tokens=torch.cat(_tokens()).to(device),
        columns={},
    )
    logprobs = model.logprobs([batch], 1.0)
    assert logprobs is not None

    def loss(outputs: TokenOutputs, part: MicroBatch) -> LossOutputs:
        num_tokens = torch.tensor(float(len(part.tokens)), device=device)
        return LossOutputs(
            loss_sum=-outputs.logprobs.sum(), num_tokens=num_tokens, sums={}, maxima={}
        )

    steps = [trainer.train_step([batch], loss, temperature=1.0, entropy=False) for _ in range(8)]
    return {
        "fused": model.fused_norms,
        "logprobs": logprobs[0].float().cpu(),
        "losses": [step.loss for step in steps],
    }


def test_transformer_engine_agrees_with_transformers_and_learns(tmp_path: Path) -> None:
    folder = str(_save_model(tmp_path))
    result = run_ranks(_train_and_measure, 1, folder)[0]
    assert result["fused"]
    assert (result["logprobs"] - _reference_logprobs(folder)).abs().max() < BF16_LOGPROB
    assert result["losses"][-1] < result["losses"][0] - 0.5


def _sample(rank: int, size: int, folder: str) -> dict[str, object]:
    """Write the weights in place into a live engine of random ones, then sample."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
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
            job="gpu-test",
        )
    )
    manifest = vllm_manifest(load_spec(Path(folder)), 1, 0, global_rank=0)
    load_hf(Path(folder), manifest, engine.parameters())
    engine.commit(3)
    prompt = tuple(_tokens()[0].tolist())
    engine.add(
        [
            SampleRequest(
                request_id=seed,
                prompt=prompt,
                max_tokens=32,
                temperature=1.0,
                seed=seed,
                eos_token_id=2,
            )
            for seed in range(8)
        ]
    )
    samples = []
    while engine.num_unfinished:
        samples += engine.step()
    engine.close()
    return {"prompt": prompt, "samples": [(s.tokens, s.logprobs, s.versions) for s in samples]}


def test_vllm_samples_from_weights_written_in_place(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = str(_save_model(tmp_path))
    result = run_ranks(_sample, 1, folder)[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = result["prompt"]
    for tokens, logprobs, versions in result["samples"]:
        assert versions == (3,) * len(tokens)
        whole = torch.tensor([*prompt, *tokens])
        expected = model(whole[None]).logits[0, :-1].log_softmax(-1)
        expected = expected.gather(1, whole[1:, None])[len(prompt) - 1 :, 0].detach()
        assert (torch.tensor(logprobs) - expected).abs().max() < BF16_LOGPROB


def _exchange(rank: int, size: int, folder: str, store: str) -> bool:
    import torch.distributed as dist

    from megarl.ddma.engine import WeightSync
    from megarl.ddma.transports.collective import CollectiveTransport
    from megarl.world import timed_wait

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    spec = load_spec(Path(folder))
    source = megatron_side(spec, TrainerLayout(), dtype="bfloat16")
    target = vllm_side(spec, GeneratorLayout(), first_rank=1, dtype="bfloat16")
    mine = (source, target)[rank].manifest(rank)
    params = {
        param.name: torch.full(param.shape, torch.nan, device=device, dtype=torch.bfloat16)
        for param in mine.params
    }
    expected = {name: tensor.clone() for name, tensor in params.items()}
    load_hf(Path(folder), mine, expected)
    if rank == 0:
        params = expected
    options = dist.ProcessGroupNCCL.Options()
    kept = dist.FileStore(store, size)
    group = dist.ProcessGroupNCCL(dist.PrefixStore("weights", kept), rank, size, options)
    control = dist.ProcessGroupGloo(dist.PrefixStore("control", kept), rank, size)
    transport = CollectiveTransport(group, device, wait=timed_wait(60.0), control=control)
    sync = WeightSync(plan(source, target), rank, transport, params)
    if rank == 0:
        sync.send(1)
        return True
    assert sync.receive() == 1
    return all(torch.equal(params[name], tensor) for name, tensor in expected.items())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_moves_weights_bit_for_bit(tmp_path: Path) -> None:
    folder = str(_save_model(tmp_path))
    assert all(run_ranks(_exchange, 2, folder, str(tmp_path / "store"), default_group=False))
