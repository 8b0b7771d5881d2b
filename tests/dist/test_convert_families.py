"""Every family through the commands: to Megatron and back, bit for bit, and vLLM loads the result.

The folders are those that transformers saves. Megatron's own reading of what is written is in
`test_torch_dist`.
"""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig, PretrainedConfig

from megarl.convert import main
from megarl.rollout.vllm_engine import VllmEngine
from megatron_bridge.models.families import load_spec
from tests.dist.test_real_engines import FAMILIES, LATENT, PROMPTS, SIZES
from tests.dist.vllm_cases import enter_world, largest_error, make_requests, make_settings, run
from tests.processes import run_ranks
from tests.weights import differing

pytestmark = pytest.mark.dist

# Two ranks where the family's sizes allow it.
LAYOUTS = {"deepseek_v3": ("--tp", "2", "--ep", "2"), "qwen3_moe": ("--tp", "2", "--pp", "2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where one family's checkpoints lie."""

    source: Path  # as transformers saves it
    megatron: Path
    exported: Path


def _save(config: PretrainedConfig, folder: Path) -> None:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.1 + ("norm" in name))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")


def _convert(*words: object) -> tuple[int, str]:
    said = io.StringIO()
    code = main([str(word) for word in words], Console(file=said, width=200))
    return code, said.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    torch.set_num_threads(1)
    made: dict[str, Folders] = {}
    for family, config in FAMILIES.items():
        at = tmp_path_factory.mktemp(family)
        found = Folders(source=at / "hf", megatron=at / "megatron", exported=at / "again")
        _save(config, found.source)
        layout = LAYOUTS.get(family, ("--tp", "2"))
        assert _convert("hf-to-megatron", found.source, found.megatron, *layout)[0] == 0
        assert _convert("megatron-to-hf", found.megatron, found.exported)[0] == 0
        made[family] = found
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_comes_back_from_megatron_bit_for_bit(
    folders: dict[str, Folders], family: str
) -> None:
    found = folders[family]
    before, after = (
        load_file(folder / "model.safetensors") for folder in (found.source, found.exported)
    )
    assert differing(before, after) == []
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (found.exported / name).read_bytes() == (found.source / name).read_bytes()
    code, said = _convert("verify", found.source, found.megatron)
    assert code == 0
    assert f"{len(before)} of {len(before)} tensors agree" in said


@pytest.mark.parametrize("family", FAMILIES)
def test_megatrons_arguments_alone_say_which_model_it_is(
    folders: dict[str, Folders], family: str, tmp_path: Path
) -> None:
    found = folders[family]
    shutil.copytree(found.megatron, tmp_path / "megatron")
    (tmp_path / "megatron" / "config.json").unlink()
    assert _convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "hf")[0] == 0
    assert load_spec(tmp_path / "hf") == load_spec(found.source)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert differing(load_file(found.source / "model.safetensors"), weights) == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")  # what made config.json
    tokens = torch.tensor([PROMPTS[1]])
    expected = AutoModelForCausalLM.from_pretrained(found.source)(tokens).logits
    assert torch.equal(model(tokens).logits, expected)


def _sample(rank: int, size: int, folders: dict[str, Folders]) -> dict[str, float]:
    """Return the largest error of log-probabilities that vLLM gives with each exported folder."""
    enter_world(rank, size)
    errors: dict[str, float] = {}
    for family, found in folders.items():
        folder = str(found.exported)
        settings = make_settings(folder, job=family, load_weights=True, max_model_len=64)
        engine = VllmEngine(settings)
        engine.commit(1)
        requests = make_requests(PROMPTS, max_tokens=6)
        samples = run(engine, requests)
        engine.close()
        model = AutoModelForCausalLM.from_pretrained(found.source, dtype=torch.float32)
        errors[family] = largest_error(model, requests, samples)
    return errors


def test_vllm_loads_the_exported_folder_of_every_family(folders: dict[str, Folders]) -> None:
    (errors,) = run_ranks(_sample, 1, folders, timeout=400)
    assert errors.keys() == folders.keys()
    assert max(errors.values()) < 1e-4, errors


UNSAYABLE = {
    "a choice of groups by their best expert": DeepseekV2Config(
        **{**SIZES, **LATENT, "scoring_func": "softmax", "n_group": 2},
        q_lora_rank=None,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
    ),
    "another scaling of positions": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("config", UNSAYABLE.values(), ids=UNSAYABLE)
def test_a_model_that_megatron_cannot_be_told_of_is_converted_without_arguments(
    config: PretrainedConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(config, tmp_path / "hf")
    assert _convert("hf-to-megatron", tmp_path / "hf", tmp_path / "megatron")[0] == 2
    assert "cannot be said to Megatron-LM" in capsys.readouterr().err
    assert not (tmp_path / "megatron").exists()
    without = ("--no-arguments",)
    assert _convert("hf-to-megatron", tmp_path / "hf", tmp_path / "megatron", *without)[0] == 0
    assert _convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "again")[0] == 0
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("hf", "again"))
    assert differing(before, after) == []
    said = json.loads((tmp_path / "again" / "config.json").read_text())
    assert said == json.loads((tmp_path / "hf" / "config.json").read_text())
