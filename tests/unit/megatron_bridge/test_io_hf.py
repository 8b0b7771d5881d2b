"""Reading shards from and writing whole tensors to Hugging Face folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.hf import HfWriter, load_hf
from megatron_bridge.layouts.hf import hf_side
from megatron_bridge.layouts.megatron import megatron_manifest, megatron_side
from megatron_bridge.models.families import load_spec
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.plan import plan
from megatron_bridge.spec import RankManifest
from tests.unit.megatron_bridge.oracle import Tensors, megatron_tensors
from tests.unit.megatron_bridge.transfer import execute

LAYOUT = TrainerLayout(tp=4, pp=2, vocab_divisor=8)
STAGES = [[0], [1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2 in several files, with tokenizer files, as transformers writes it."""
    path = tmp_path_factory.mktemp("qwen2")
    config = Qwen2Config(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size="10KB")
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("not copied")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def _make_params(manifest: RankManifest, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Live parameters full of numbers that must disappear."""
    params = {param.name: torch.full(param.shape, 7.0, dtype=dtype) for param in manifest.params}
    return {name: tensor.requires_grad_() for name, tensor in params.items()}


def _whole(folder: Path) -> Tensors:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def _copy(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_each_rank_reads_its_own_shards_in_place_and_padding_is_zero(folder: Path) -> None:
    spec = load_spec(folder)
    expected = megatron_tensors(spec, _whole(folder), LAYOUT, STAGES)
    for rank, tensors in expected.items():
        params = _make_params(megatron_manifest(spec, LAYOUT, rank))
        addresses = {name: tensor.data_ptr() for name, tensor in params.items()}
        load_hf(folder, megatron_manifest(spec, LAYOUT, rank), params)
        assert params.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(params[name], tensor), name
            assert params[name].data_ptr() == addresses[name]


def test_loading_into_float32_keeps_the_values(folder: Path) -> None:
    spec = load_spec(folder)
    params = _make_params(hf_side(spec, 0).manifest(0), torch.float32)
    load_hf(folder, hf_side(spec, 0).manifest(0), params)
    for name, tensor in _whole(folder).items():
        assert torch.equal(params[name], tensor.float()), name


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 9_000])
def test_writer_round_trip_is_byte_identical(
    folder: Path, tmp_path: Path, max_shard_bytes: int
) -> None:
    spec = load_spec(folder)
    params = _make_params(hf_side(spec, 0).manifest(0))
    load_hf(folder, hf_side(spec, 0).manifest(0), params)
    target = tmp_path / "out"
    with HfWriter(folder, target, max_shard_bytes) as writer:
        for name, tensor in params.items():
            writer.add(name, tensor)
        assert not target.exists()
    names = {path.name for path in target.iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= names
    assert "README.md" not in names
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    if max_shard_bytes == 9_000:
        count = len(shards)
        assert count > 2
        assert shards[0] == f"model-00001-of-{count:05d}.safetensors"
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(params)
        assert index["metadata"]["total_size"] == sum(2 * t.numel() for t in params.values())
        for shard in shards:
            single = len(load_file(target / shard)) == 1
            assert single or (target / shard).stat().st_size < 9_000 + 2_000
    else:
        assert shards == ["model.safetensors"]
        assert "model.safetensors.index.json" not in names
    assert list(tmp_path.iterdir()) == [target]
    back = _whole(target)
    original = _whole(folder)
    assert back.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    assert torch.equal(model.lm_head.weight, original["model.embed_tokens.weight"])


SIZES: dict = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40),
        MixtralConfig(**SIZES, num_local_experts=4),
    ],
    ids=lambda config: config.model_type,
)
def test_experts_go_to_ranks_and_back_byte_identical(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    original, spec = _whole(tmp_path / "in"), load_spec(tmp_path / "in")
    layout = TrainerLayout(dp=2, ep=2, pp=2, vocab_divisor=8)
    manifests = [megatron_manifest(spec, layout, rank) for rank in range(4)]
    ranks = {manifest.rank: _make_params(manifest) for manifest in manifests}
    for manifest in manifests:
        load_hf(tmp_path / "in", manifest, ranks[manifest.rank])
    for rank, tensors in megatron_tensors(spec, original, layout, STAGES).items():
        assert ranks[rank].keys() == tensors.keys()
        assert all(torch.equal(ranks[rank][name], tensor) for name, tensor in tensors.items())
    target = hf_side(spec, 9, "bfloat16")
    back = _make_params(target.manifest(9))
    execute(plan(megatron_side(spec, layout), target), {**ranks, 9: back})
    with HfWriter(tmp_path / "in", tmp_path / "out", 20_000) as writer:
        for name, tensor in back.items():
            writer.add(name, tensor)
    written = _whole(tmp_path / "out")
    assert written.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for (name, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def _add_and_fail(writer: HfWriter) -> None:
    writer.add("a", torch.zeros(1))
    writer.add("b", torch.zeros(1))
    writer.add("c", None)  # type: ignore[arg-type]


def test_a_writer_that_fails_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    writer = HfWriter(folder, tmp_path / "out", max_shard_bytes=1)
    with pytest.raises(AttributeError), writer:
        _add_and_fail(writer)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_refuses_an_existing_target_and_a_source_without_config(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConversionError, match="exists already"):
        HfWriter(folder, tmp_path)
    with pytest.raises(ConversionError, match=r"has no config\.json"):
        HfWriter(tmp_path, tmp_path / "out")


def test_faults_in_the_folder_are_named(folder: Path, tmp_path: Path) -> None:
    spec = load_spec(folder)
    manifest = hf_side(spec, 0).manifest(0)
    params = _make_params(manifest)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    file = index["weight_map"][name]

    broken = _copy(folder, tmp_path / "file")
    (broken / file).unlink()
    with pytest.raises(ConversionError, match=f"lacks {file}"):
        load_hf(broken, manifest, params)

    broken = _copy(folder, tmp_path / "shape")
    tensors = load_file(broken / file)
    save_file({**tensors, name: torch.zeros(47, 32)}, broken / file)
    with pytest.raises(
        ConversionError, match=rf"{name} has shape \(47, 32\) in .*{file}.*\(48, 32\)"
    ):
        load_hf(broken, manifest, params)

    broken = _copy(folder, tmp_path / "tensor")
    del tensors[name]
    save_file({**tensors, "other": torch.zeros(1)}, broken / file)
    with pytest.raises(ConversionError, match=f"{file} has no tensor {name}"):
        load_hf(broken, manifest, params)

    broken = _copy(folder, tmp_path / "index")
    del index["weight_map"][name]
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=f"has no tensor {name}"):
        load_hf(broken, manifest, params)

    broken = _copy(folder, tmp_path / "torn")
    (broken / file).write_bytes((broken / file).read_bytes()[:100])
    with pytest.raises(ConversionError, match=f"{file} is not a safetensors file"):
        load_hf(broken, manifest, params)

    for path in broken.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ConversionError, match="has neither"):
        load_hf(broken, manifest, params)
    with pytest.raises(ConversionError, match="does not exist"):
        load_hf(tmp_path / "nowhere", manifest, params)


def test_parameters_that_are_not_those_of_the_manifest_are_named(folder: Path) -> None:
    manifest = hf_side(load_spec(folder), 3).manifest(3)
    params = _make_params(manifest)
    with pytest.raises(ConversionError, match=r"rank 3 .* does not know: extra"):
        load_hf(folder, manifest, {**params, "extra": torch.zeros(1)})
    with pytest.raises(ConversionError, match=r"model.norm.weight of rank 3 has shape \(5,\)"):
        load_hf(folder, manifest, {**params, "model.norm.weight": torch.zeros(5)})
    del params["model.norm.weight"]
    with pytest.raises(ConversionError, match=r"rank 3 has no parameter model.norm.weight"):
        load_hf(folder, manifest, params)
