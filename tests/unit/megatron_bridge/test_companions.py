"""What travels with weights, and which model a Megatron checkpoint says it holds."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.companions import companions
from megatron_bridge.io.megatron_spec import megatron_spec, stored_arguments
from megatron_bridge.models.arguments import megatron_arguments
from megatron_bridge.models.families import spec_from_hf
from megatron_bridge.models.hf_config import hf_config
from tests.unit.megatron_bridge.checkpoints import make_deepseek, make_spec

SPEC = make_spec()
FURTHER = make_deepseek(num_mtp_layers=1, norm_eps=1e-6)


def _write(folder: Path, config: dict | None) -> None:
    folder.mkdir(exist_ok=True)
    for name in (
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "metadata.json",
        "conversion_manifest.json",
        "latest_checkpointed_iteration.txt",
        "model.safetensors",
    ):
        (folder / name).write_text(name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def test_files_travel_unchanged_and_weights_do_not(tmp_path: Path) -> None:
    config = {"_name": "kept", **hf_config(SPEC, "float32")}
    _write(tmp_path, config)
    found = companions(tmp_path, SPEC, dtype="float32")
    kept = ("chat_template.jinja", "config.json", "merges.txt", "tokenizer.json")
    assert found == {name: (tmp_path / name).read_bytes() for name in kept}


def test_a_configuration_follows_what_the_conversion_changes(tmp_path: Path) -> None:
    config = {**hf_config(FURTHER, "bfloat16"), "quantization_config": {"quant_method": "fp8"}}
    _write(tmp_path, config)
    plain = companions(tmp_path, FURTHER.without_mtp(), dtype="float32")
    changed = json.loads(plain["config.json"])
    assert changed["torch_dtype"] == "float32"
    assert spec_from_hf(changed) == FURTHER.without_mtp()
    kept = companions(tmp_path, FURTHER, dtype="bfloat16", quantized=True)
    assert json.loads(kept["config.json"]) == config


def test_new_fp8_weights_say_so(tmp_path: Path) -> None:
    _write(tmp_path, {**hf_config(SPEC), "dtype": "bfloat16"})
    for folder in (tmp_path, tmp_path / "empty"):
        folder.mkdir(exist_ok=True)
        found = json.loads(
            companions(folder, SPEC, dtype="bfloat16", quantized=True)["config.json"]
        )
        assert found["quantization_config"]["weight_block_size"] == [128, 128]


def test_a_configuration_is_made_where_there_is_none(tmp_path: Path) -> None:
    _write(tmp_path, None)
    found = companions(tmp_path, SPEC, dtype="bfloat16")
    assert spec_from_hf(json.loads(found["config.json"])) == SPEC
    assert "tokenizer.json" in found


def test_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, hf_config(replace(SPEC, num_layers=5)))
    with pytest.raises(ConversionError, match="num_layers is 5, expected 6"):
        companions(tmp_path, SPEC, dtype="bfloat16")


def _save_common(folder: Path, content: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metadata.json").write_text("{}")
    torch.save(content, folder / "common.pt")


def test_a_megatron_checkpoint_says_its_model_by_configuration_or_arguments(
    tmp_path: Path,
) -> None:
    arguments = megatron_arguments(SPEC)
    inner = tmp_path / "iter_0000005"
    _save_common(inner, {"args": Namespace(**arguments, lr=1e-4), "iteration": 5})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5\n")
    assert stored_arguments(tmp_path) == {**arguments, "lr": 1e-4}
    assert megatron_spec(tmp_path) == megatron_spec(inner) == SPEC
    other = make_spec(num_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(other)))
    assert megatron_spec(tmp_path) == other


def test_arguments_of_old_checkpoints_are_found(tmp_path: Path) -> None:
    shard = tmp_path / "mp_rank_00"
    shard.mkdir()
    content = {"args": Namespace(**megatron_arguments(SPEC)), "model": {"a": torch.ones(3)}}
    torch.save(content, shard / "model_optim_rng.pt")
    assert megatron_spec(tmp_path) == SPEC


def test_a_checkpoint_that_does_not_say_its_model_is_refused(tmp_path: Path) -> None:
    _save_common(tmp_path, {"iteration": 5})
    with pytest.raises(ConversionError, match=r"neither config\.json nor Megatron-LM's arguments"):
        megatron_spec(tmp_path)
    bad = megatron_arguments(SPEC) | {"normalization": "LayerNorm"}
    _save_common(tmp_path, {"args": Namespace(**bad)})
    with pytest.raises(ConversionError, match=f"{tmp_path}: .*normalization = 'LayerNorm'"):
        megatron_spec(tmp_path)
