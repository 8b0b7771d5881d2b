"""The files of configs/models: published sizes, layouts that fit, exact refusals."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_bridge.errors import ConversionError
from megatron_bridge.models.arguments import megatron_arguments
from megatron_bridge.models.checks import check_layout
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.models.from_arguments import spec_from_arguments
from megatron_bridge.models.hf_config import hf_config
from megatron_bridge.models.released import load_released, load_sizes, parameter_count
from megatron_bridge.spec import ModelSpec

FOLDER = Path(__file__).parents[3] / "configs" / "models"
# Parameters in billions, all and those that a token goes through, as model cards say.
PUBLISHED = {
    "llama3.1_8b": ("8.03", None),
    "llama3.1_70b": ("70.6", None),
    "llama3.1_405b": ("405.85", None),
    "qwen2.5_7b": ("7.62", None),
    "qwen2.5_72b": ("72.7", None),
    "qwen3_8b": ("8.2", None),
    "qwen3_32b": ("32.8", None),
    "qwen3_30b_a3b": ("30.5", "3.3"),
    "qwen3_235b_a22b": ("235", "22"),
    "mixtral_8x7b": ("46.7", "12.9"),
    "deepseek_v3": ("671", "37"),
}


def _count(spec: ModelSpec, used_only: bool) -> int:
    share = spec.experts_per_token / spec.num_experts if used_only else 1
    return sum(
        int(prod(tensor.shape) * (1 if tensor.expert is None else share))
        for tensor in canonical_tensors(spec)
    )


def _rounded(value: int, like: str) -> str:
    digits = len(like.partition(".")[2])
    return f"{value / 1e9:.{digits}f}"


def test_every_model_of_the_folder_is_known() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_model_has_its_published_size(name: str) -> None:
    released = load_released(FOLDER / f"{name}.yaml")
    spec, (total, used) = released.spec, PUBLISHED[name]
    assert parameter_count(spec) == released.parameters
    main = spec.without_mtp()
    assert _rounded(_count(main, used_only=False), total) == total
    if used is not None:
        # cards round down, and differ in whether they count the embedding
        assert _count(main, used_only=True) == pytest.approx(float(used) * 1e9, rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_makes_a_model_of_the_same_size(name: str) -> None:
    released = load_released(FOLDER / f"{name}.yaml")
    config = AutoConfig.for_model(**released.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held = [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("bias"))]
    expected = _count(released.spec.without_mtp(), used_only=False)
    assert sum(tensor.numel() for tensor in held) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_model_fits_its_layout_and_megatrons_arguments(name: str) -> None:
    released = load_released(FOLDER / f"{name}.yaml")
    check_layout(released.spec.without_mtp(), released.layout)
    assert spec_from_arguments(megatron_arguments(released.spec)) == released.spec


def test_sizes_come_from_a_folder_a_configuration_and_a_released_models_file(
    tmp_path: Path,
) -> None:
    spec = load_released(FOLDER / "llama3.1_8b.yaml").spec
    config = tmp_path / "config.json"
    config.write_text(json.dumps(hf_config(spec)))
    assert load_sizes(tmp_path) == load_sizes(config) == spec
    assert load_sizes(FOLDER / "llama3.1_8b.yaml") == spec


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.json", None, "is not readable JSON"),
        ("absent.yaml", None, "does not exist"),
        ("broken.json", "{", "is not readable JSON"),
        ("list.json", "[]", "holds a list"),
        ("other.json", '{"model_type": "mamba"}', "other.json: .*'mamba' is not supported"),
        ("broken.yaml", "a: [", "broken.yaml"),
        ("unknown.yaml", "{name: x, parameters: 1, size: 3}", "size"),
        ("word.yaml", "{name: x, parameters: many}", "many"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConversionError, match=words):
        load_sizes(tmp_path / name)
