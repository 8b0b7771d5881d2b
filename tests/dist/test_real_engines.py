"""Every family from end to end: Megatron's model, a transfer, vLLM's model, on ranks of their own.

A real engine that vLLM filled with dummy weights, poisoned with NaN, gets two models one after the
other from a real trainer. Each must sample as the trainer and transformers score, the second must
leave the parameters that vLLM's own loader makes of the trainer's export, and the export must be
the folder that the trainer was filled from.

vLLM's CPU build runs latent attention of 512 + 64 features only, has no kernel for divided experts
(`generator.layout.ep`), and vLLM's external launcher refuses pipeline stages: those need GPUs or
cannot run.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megarl.ddma.engine import WeightSync
from megarl.ddma.export import HfExport, export_hf
from megarl.ddma.transports.collective import CollectiveTransport
from megarl.rollout.engine import SampleRequest
from megarl.rollout.vllm_engine import VllmEngine
from megarl.world import timed_wait
from megatron_bridge.io.hf import load_hf
from megatron_bridge.layouts.megatron import megatron_manifest, megatron_side
from megatron_bridge.layouts.vllm import vllm_side
from megatron_bridge.models.families import load_spec
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.plan import plan
from tests.dist.test_step_across_layouts import _Meeting, load_by_vllm
from tests.dist.vllm_cases import make_settings
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

VOCAB, EOS, WAIT = 100, 2, timed_wait(120.0)
TOLERANCE = 1e-4
PROMPTS = ((5, 17, 40), (3, 99, 8, 64, 21, 7, 33), tuple(range(10, 50)))
VERSIONS = (1, 2)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,  # vLLM pads it to 128, Megatron to 120 or 144
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
V3: dict[str, Any] = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, head_dim=32),
    "llama_tied": LlamaConfig(**{**SIZES, "tie_word_embeddings": True}, head_dim=64),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    # one key/value head: two trainer ranks cut its group, two generator ranks hold copies
    "qwen2": Qwen2Config(**{**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_experts=4, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": Qwen3MoeConfig(**{**SIZES, **EXPERTS, "head_dim": 64}, num_experts=4),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    "deepseek_v2": DeepseekV2Config(
        **{**SIZES, **LATENT, "scoring_func": "softmax"},
        q_lora_rank=None,
        n_shared_experts=2,
        topk_method="greedy",
    ),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, **LATENT, **V3}, q_lora_rank=48, n_shared_experts=1
    ),
}


# vLLM makes matrices of their parameters when it loads them: what a commit makes must be the same.
DERIVED = ("deepseek_v2", "deepseek_v3")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Trainer ranks, then the ranks of one replica; equal numbers of both."""

    port: int
    folder: Path
    families: tuple[str, ...]
    tp: int

    @property
    def trainer(self) -> TrainerLayout:
        return TrainerLayout(tp=self.tp, sequence_parallel=self.tp > 1, vocab_divisor=24)

    def checkpoint(self, family: str, version: int) -> Path:
        return self.folder / f"{family}-{version}"

    def exported(self, family: str) -> Path:
        return self.folder / f"{family}-exported"

    def samples(self, family: str, version: int) -> Path:
        return self.folder / f"{family}-{version}.samples"


def _save_models(world: World) -> None:
    torch.manual_seed(3)
    for family in world.families:
        model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32)
        biases = [bias for key, bias in model.named_buffers() if key.endswith("correction_bias")]
        for version in VERSIONS:
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.copy_(torch.randn_like(weight) * 0.1 + ("norm" in name))
                for bias in biases:
                    bias.normal_(std=0.3)
            model.save_pretrained(world.checkpoint(family, version))


def _sync(world: World, meeting: _Meeting, family: str, params: dict[str, Tensor]) -> WeightSync:
    spec = load_spec(world.checkpoint(family, 1))
    target = vllm_side(spec, GeneratorLayout(tp=world.tp), first_rank=world.tp)
    group = meeting.group(f"weights/{family}", tuple(range(2 * world.tp)))
    transport = CollectiveTransport(group, torch.device("cpu"), wait=WAIT)
    return WeightSync(
        plan(megatron_side(spec, world.trainer), target), meeting.rank, transport, params
    )


def _train(world: World, meeting: _Meeting) -> dict[str, float]:
    """Send, score what was sampled, export; return the largest error of each family."""
    from megatron_bridge.runtime import setup
    from megatron_bridge.runtime.batch import MicroBatch
    from megatron_bridge.runtime.model import MegatronModel, ModelSettings

    layout = world.trainer
    meeting.enter_world("trainer", tuple(range(world.tp)))
    group = meeting.group("export", tuple(range(world.tp))) if world.tp > 1 else None
    setup.initialize(layout, seed=1)
    errors = dict.fromkeys(world.families, 0.0)
    for family in world.families:
        spec = load_spec(world.checkpoint(family, 1))
        model = MegatronModel(spec, layout, ModelSettings(dtype="float32"))
        params = model.parameters()
        sync = _sync(world, meeting, family, params)
        for version in VERSIONS:
            manifest = megatron_manifest(spec, layout, meeting.rank)
            load_hf(world.checkpoint(family, version), manifest, params)
            sync.send(version)
            meeting.await_(world.samples(family, version).name)
            samples = torch.load(world.samples(family, version))
            whole = [torch.tensor([*prompt, *tokens]) for prompt, tokens, _ in samples]
            lengths = torch.tensor([len(tokens) for tokens in whole])
            batch = MicroBatch(lengths=lengths, tokens=torch.cat(whole), columns={})
            logprobs = model.logprobs([batch], 1.0)
            assert logprobs is not None
            errors[family] = max(errors[family], _largest_error(samples, logprobs[0], lengths))
        export = HfExport(
            spec=spec,
            side=megatron_side(spec, layout),
            dtype=torch.float32,
            source_folder=world.checkpoint(family, 2),
            target_folder=world.exported(family),
        )
        export_hf(export, params, group, WAIT)
        if meeting.rank == 0:
            meeting.announce(world.exported(family).name)
    return errors


def _largest_error(samples: list, logprobs: Tensor, lengths: Tensor) -> float:
    parts = logprobs.split(lengths.tolist())
    return max(
        float((part[-len(found) :] - torch.tensor(found)).abs().max())
        for part, (_, _, found) in zip(parts, samples, strict=True)
    )


def _start(path: Path, tp: int, *, load_weights: bool) -> VllmEngine:
    gc.freeze()  # vLLM collects garbage several times a start: 0.5 s for all that is imported
    return VllmEngine(
        make_settings(
            str(path),
            tp=tp,
            max_model_len=64,
            max_running_sequences=8,
            kv_cache_bytes=8 << 20,
            job=f"{path.name}-{load_weights}",
            load_weights=load_weights,
        )
    )


def _sample(engine: VllmEngine) -> list[tuple[tuple[int, ...], tuple[int, ...], list[float]]]:
    engine.add(
        [
            SampleRequest(
                request_id=index,
                prompt=prompt,
                max_tokens=12,
                temperature=1.0,
                seed=index,
                eos_token_id=EOS,
            )
            for index, prompt in enumerate(PROMPTS)
        ]
    )
    samples = []
    while engine.num_unfinished:
        samples += engine.step()
    samples.sort(key=lambda sample: sample.request_id)
    return [
        (prompt, sample.tokens, list(sample.logprobs))
        for prompt, sample in zip(PROMPTS, samples, strict=True)
    ]


def _generate(world: World, meeting: _Meeting) -> dict[str, list[str]]:
    """Receive and sample; return the parameters of each family that vLLM's loader has otherwise."""
    meeting.enter_world("replica", tuple(range(world.tp, 2 * world.tp)))
    wrong: dict[str, list[str]] = {}
    for family in world.families:
        engine = _start(world.checkpoint(family, 1), world.tp, load_weights=False)
        params = engine.parameters()
        for tensor in params.values():
            tensor.fill_(torch.nan)
        sync = _sync(world, meeting, family, params)
        for version in VERSIONS:
            engine.poison()
            assert sync.receive() == version
            engine.commit(version)
            samples = _sample(engine)
            if meeting.rank == world.tp:
                torch.save(samples, world.samples(family, version))
                meeting.announce(world.samples(family, version).name)
        received = {name: tensor.clone() for name, tensor in params.items()}
        meeting.await_(world.exported(family).name)
        if family in DERIVED:
            engine.close()
            engine = _start(world.exported(family), world.tp, load_weights=True)
        else:
            engine.poison()
            load_by_vllm(engine, world.exported(family))
            engine.commit(VERSIONS[-1] + 1)
        expected = engine.parameters()
        assert received.keys() == expected.keys()
        wrong[family] = [n for n, t in expected.items() if not torch.equal(received[n], t)]
        assert samples == _sample(engine)
        engine.close()
    return wrong


def _run(rank: int, size: int, world: World) -> dict[str, Any]:
    meeting = _Meeting(rank, world.port)
    return _train(world, meeting) if rank < world.tp else _generate(world, meeting)


@torch.no_grad()
def _dense_error(world: World, family: str, version: int) -> float:
    """Return how far samples' log-probabilities are from transformers' of the same folder."""
    folder = world.checkpoint(family, version)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    errors = []
    for prompt, tokens, found in torch.load(world.samples(family, version)):
        logprobs = model(torch.tensor([[*prompt, *tokens]])).logits[0, :-1].log_softmax(-1)
        chosen = logprobs[len(prompt) - 1 :].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        errors.append(float((chosen - torch.tensor(found)).abs().max()))
    return max(errors)


@pytest.mark.parametrize(
    ("tp", "families"),
    [(1, tuple(FAMILIES)), (2, ("qwen2", "qwen2_moe", "deepseek_v2", "deepseek_v3"))],
    ids=["tp1", "tp2"],
)
def test_what_megatron_sends_vllm_computes_as_if_it_had_loaded_it(
    tp: int, families: tuple[str, ...], tmp_path: Path
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = World(port=store.port, folder=tmp_path, families=families, tp=tp)
    _save_models(world)
    results = run_ranks(_run, 2 * tp, world, timeout=400, default_group=False)
    for family in families:
        exported = load_file(world.exported(family) / "model.safetensors")
        original = load_file(world.checkpoint(family, 2) / "model.safetensors")
        assert exported.keys() == original.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
        for version in VERSIONS:
            assert _dense_error(world, family, version) < TOLERANCE, (family, version)
    for errors in results[:tp]:
        assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
    for wrong in results[tp:]:
        assert wrong == {family: [] for family in families}
