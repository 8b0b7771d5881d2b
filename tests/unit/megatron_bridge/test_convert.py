"""Conversion from files to files: bytes against a dense oracle, what it refuses, what it leaves."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_bridge.conversions import Options, hf_to_hf, hf_to_megatron, megatron_to_hf
from megatron_bridge.convert import MANIFEST_NAME, Conversion, Converter
from megatron_bridge.errors import BridgeError, ConversionError, PlanError, QuantizationError
from megatron_bridge.io.formats import open_checkpoint
from megatron_bridge.io.hf_store import open_hf
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.models.hf_config import hf_config
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.quantize import quantize_blockwise
from megatron_bridge.spec import ModelSpec
from tests.unit.megatron_bridge.checkpoints import Tensors, make_deepseek, make_mixture, make_spec
from tests.unit.megatron_bridge.folders import (
    content,
    load_hf,
    peak_growth,
    random_tensors,
    write_hf,
)
from tests.unit.megatron_bridge.stored import assert_same, read

MODELS = {
    "llama": make_spec(),
    "tied": make_spec(tied_embeddings=True),
    "mixture": make_mixture(),
    "deepseek": make_deepseek(norm_eps=1e-6),
    "mtp": make_deepseek(norm_eps=1e-6, num_mtp_layers=1),
}


def _run(conversion: Conversion, **changes: object) -> list[int]:
    """Convert; return what was said of progress."""
    said: list[int] = []
    Converter(replace(conversion, **changes)).run(said.append)  # type: ignore[arg-type]
    return said


@pytest.mark.parametrize("window_bytes", [64, 1000, 4 << 20])
@pytest.mark.parametrize("name", MODELS)
def test_to_megatron_and_back_every_tensor_has_the_same_bytes(
    name: str, window_bytes: int, tmp_path: Path
) -> None:
    spec, tensors = MODELS[name], random_tensors(MODELS[name])
    source = write_hf(tmp_path / "in", spec, tensors)
    options = Options(layout=TrainerLayout(vocab_divisor=64), max_file_bytes=60_000)
    there = hf_to_megatron(source, tmp_path / "megatron", options)
    _run(there, window_bytes=window_bytes)
    assert_same(read(open_checkpoint(tmp_path / "megatron", spec)), tensors)
    back = megatron_to_hf(tmp_path / "megatron", tmp_path / "out", None, options)
    _run(back, window_bytes=window_bytes)
    assert_same(load_hf(tmp_path / "out"), tensors)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "megatron", "out"]


def test_the_manifest_says_what_each_tensor_is_and_where_it_comes_from(tmp_path: Path) -> None:
    spec = MODELS["llama"]
    tensors = random_tensors(spec)
    tensors_and_more = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    source = write_hf(tmp_path / "in", spec, tensors_and_more)
    conversion = hf_to_megatron(source, tmp_path / "out", Options())
    said = _run(conversion)
    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())
    assert manifest["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert "rotary" in manifest["dropped"]["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert sum(said) == sum(tensor["bytes"] for tensor in manifest["tensors"])
    names = [(t["file"], t["offset"]) for t in manifest["tensors"]]
    assert len(set(names)) == len(names)
    read_from: dict[str, int] = {}
    for tensor in manifest["tensors"]:
        file = (tmp_path / "out" / tensor["file"]).read_bytes()
        piece = file[tensor["offset"] : tensor["offset"] + tensor["bytes"]]
        assert hashlib.sha256(piece).hexdigest() == tensor["sha256"]
        for origin in tensor["sources"]:
            sizes = [high - low for low, high in zip(*origin["box"], strict=True)]
            count = torch.Size(sizes).numel()
            read_from[origin["name"]] = read_from.get(origin["name"], 0) + count
    assert read_from == {name: tensor.numel() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_cast_is_that_of_torch(dtype: str, tmp_path: Path) -> None:
    spec = MODELS["deepseek"]
    tensors = random_tensors(spec, torch.float32)
    source = write_hf(tmp_path / "in", spec, tensors)
    _run(hf_to_hf(source, tmp_path / "out", Options(dtype=dtype)))
    wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    wanted |= {name: t for name, t in tensors.items() if name.endswith("e_score_correction_bias")}
    assert_same(load_hf(tmp_path / "out"), wanted)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert dtype in (config.get("dtype"), config.get("torch_dtype"))


@pytest.mark.parametrize("dtype", ["", "float32"])
def test_tensors_may_begin_at_any_byte(dtype: str, tmp_path: Path) -> None:
    """A header of an odd length, which the format allows and writers avoid."""
    spec = MODELS["llama"]
    tensors = random_tensors(spec)
    source = write_hf(tmp_path / "in", spec, tensors)
    for path in source.glob("*.safetensors"):
        file = path.read_bytes()
        length = int.from_bytes(file[:8], "little")
        header = file[8 : 8 + length].rstrip()
        header += b" " * (1 - len(header) % 2)
        assert len(header) % 2 == 1
        path.write_bytes(len(header).to_bytes(8, "little") + header + file[8 + length :])
    _run(hf_to_megatron(source, tmp_path / "megatron", Options(dtype=dtype)), window_bytes=1000)
    wanted = {n: t.float() for n, t in tensors.items()} if dtype else tensors
    assert_same(read(open_checkpoint(tmp_path / "megatron", spec)), wanted)


def test_a_value_that_float16_cannot_hold_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    spec = MODELS["llama"]
    tensors = random_tensors(spec)
    tensors["model.norm.weight"][3] = 1e5
    source = write_hf(tmp_path / "in", spec, tensors)
    with pytest.raises(ConversionError, match=r"model\.norm\.weight holds .* float16"):
        _run(hf_to_hf(source, tmp_path / "out", Options(dtype="float16")))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# --- FP8 --------------------------------------------------------------------------------------


def _wide() -> ModelSpec:
    """Whole blocks, and heads of 96 rows, so that fused rows cut blocks."""
    return make_spec(
        hidden_size=256, ffn_size=320, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=96
    )


def _quantized(tensors: Tensors) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.startswith("model.layers.") and tensor.dim() == 2:
            elements = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
            scales = torch.empty([-(-size // 128) for size in tensor.shape])
            quantize_blockwise(tensor, elements, scales)
            found |= {name: elements, f"{name}_scale_inv": scales}
        else:
            found[name] = tensor
    return found


def _dequantized(tensors: Tensors, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Multiply each element by its block's scale, without the project's arithmetic."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dtype is torch.float8_e4m3fn:
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            scales = tensors[f"{name}_scale_inv"][rows][:, columns]
            found[name] = (tensor.float() * scales).to(dtype)
        elif not name.endswith("_scale_inv"):
            found[name] = tensor
    return found


def _fp8_source(folder: Path, tensors: Tensors | None = None) -> tuple[Path, Tensors]:
    spec = _wide()
    stored = _quantized(random_tensors(spec)) if tensors is None else tensors
    source = write_hf(folder, spec, stored)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    return source, stored


@pytest.mark.parametrize("window_bytes", [1000, 4 << 20])
def test_weights_become_fp8_with_the_scales_of_their_blocks(
    window_bytes: int, tmp_path: Path
) -> None:
    spec = _wide()
    tensors = random_tensors(spec)
    source = write_hf(tmp_path / "in", spec, tensors)
    _run(hf_to_hf(source, tmp_path / "out", Options(fp8=True)), window_bytes=window_bytes)
    assert_same(load_hf(tmp_path / "out"), _quantized(tensors))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    _run(hf_to_megatron(source, tmp_path / "megatron", Options()))
    through = megatron_to_hf(tmp_path / "megatron", tmp_path / "through", None, Options(fp8=True))
    _run(through, window_bytes=window_bytes)
    assert_same(load_hf(tmp_path / "through"), _quantized(tensors))


@pytest.mark.parametrize("window_bytes", [1000, 4 << 20])
def test_fp8_weights_are_read_with_their_scales(window_bytes: int, tmp_path: Path) -> None:
    source, stored = _fp8_source(tmp_path / "in")
    _run(hf_to_megatron(source, tmp_path / "megatron", Options()), window_bytes=window_bytes)
    read_back = read(open_checkpoint(tmp_path / "megatron", _wide()))
    assert_same(read_back, _dequantized(stored))
    wide = hf_to_hf(source, tmp_path / "wide", Options(dtype="float32"))
    _run(wide, window_bytes=window_bytes)
    wanted = {name: tensor.float() for name, tensor in _dequantized(stored, torch.float32).items()}
    assert_same(load_hf(tmp_path / "wide"), wanted)
    assert "quantization_config" not in json.loads((tmp_path / "wide/config.json").read_text())


def test_fp8_weights_that_stay_fp8_keep_their_bits(tmp_path: Path) -> None:
    source, stored = _fp8_source(tmp_path / "in")
    stored["model.layers.0.mlp.up_proj.weight_scale_inv"] *= 3  # none that we would have chosen
    shutil.rmtree(source)
    source, _ = _fp8_source(source, stored)
    _run(hf_to_hf(source, tmp_path / "out", Options()), window_bytes=1000)
    assert_same(load_hf(tmp_path / "out"), stored)


def test_a_weight_that_is_not_finite_cannot_become_fp8(tmp_path: Path) -> None:
    spec = _wide()
    tensors = random_tensors(spec)
    tensors["model.layers.1.mlp.up_proj.weight"][200, 7] = float("nan")
    source = write_hf(tmp_path / "in", spec, tensors)
    with pytest.raises(QuantizationError, match="not finite"):
        _run(hf_to_hf(source, tmp_path / "out", Options(fp8=True)))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# --- What is refused --------------------------------------------------------------------------


def _missing_file(folder: Path) -> None:
    next(folder.glob("*-00002-*")).unlink()


def _truncated(folder: Path) -> None:
    path = next(folder.glob("*-00002-*"))
    path.write_bytes(path.read_bytes()[:-100])


def _absent(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.extra"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _wrong_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))


def _other_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 28}))


def _drop(name: str) -> Callable[[Path], None]:
    def drop(folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        file = index["weight_map"].pop(name)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        tensors = load_file(folder / file)
        del tensors[name]
        save_file(tensors, folder / file)

    return drop


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_missing_file, r"00002-of-00002\.safetensors is missing"),
        (_truncated, "00002-of-00002.* is truncated"),
        (_absent, r"index\.json names model\.layers\.0\.extra in .*does not hold"),
        (_wrong_family, "model_type 'gpt2' is not supported"),
        (_other_sizes, r"(gate|up|down)_proj\.weight .*expected"),
        (_drop("model.layers.3.mlp.experts.2.up_proj.weight"), r"lacks .*experts\.2\.up_proj"),
    ],
)
def test_a_source_with_a_fault_is_refused_before_anything_is_written(
    spoil: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    spec = MODELS["mixture"]
    source = write_hf(tmp_path / "in", spec, random_tensors(spec))
    spoil(source)
    for convert in (hf_to_megatron, hf_to_hf):
        with pytest.raises(BridgeError, match=words):
            _run(convert(source, tmp_path / "deep" / "out", Options()))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    spec = MODELS["llama"]
    source = write_hf(tmp_path / "in", spec, random_tensors(spec))
    converter = Converter(hf_to_megatron(source, tmp_path / "out", Options()))
    _truncated(source)
    with pytest.raises(ConversionError, match="is truncated: it has"):
        converter.run(lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_scale_grid_that_is_not_that_of_its_weight_is_refused(tmp_path: Path) -> None:
    source, stored = _fp8_source(tmp_path / "in")
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    shutil.rmtree(source)
    source, _ = _fp8_source(source, {**stored, name: stored[name][:-1].contiguous()})
    with pytest.raises(ConversionError, match=rf"{name}.*\(2, 2\).*\(3, 2\)"):
        hf_to_megatron(source, tmp_path / "out", Options())


def test_a_layout_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    spec = MODELS["mixture"]
    source = write_hf(tmp_path / "in", spec, random_tensors(spec))
    for layout, words in (
        (TrainerLayout(tp=3), "tp 3 does not divide"),
        (TrainerLayout(dp=3, ep=3), "ep 3 does not divide"),
        (TrainerLayout(pp=5), "pp 5"),
    ):
        with pytest.raises(PlanError, match=words):
            hf_to_megatron(source, tmp_path / "out", Options(layout=layout))


def test_a_target_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    spec = MODELS["llama"]
    source = write_hf(tmp_path / "in", spec, random_tensors(spec))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    with pytest.raises(ConversionError, match="out exists already"):
        _run(hf_to_megatron(source, tmp_path / "out", Options()))
    assert content(tmp_path / "out") == {"precious": b"kept"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_checkpoint_that_the_disk_has_no_room_for_is_refused(tmp_path: Path) -> None:
    """The source has holes: it would take some terabytes, and takes none."""
    spec = make_spec(vocab_size=1 << 36, num_layers=1)
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(hf_config(spec)))
    header: dict = {}
    at = 0
    for tensor in canonical_tensors(spec):
        size = 2 * torch.Size(tensor.shape).numel()
        shape = list(tensor.shape)
        header[tensor.name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    with pytest.raises(ConversionError, match=rf"bytes free, expected {at}|bytes free, expected"):
        _run(hf_to_hf(source, tmp_path / "out", Options()))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# --- What must not happen in the field --------------------------------------------------------


def test_padded_rows_of_the_vocabulary_never_leak(tmp_path: Path) -> None:
    spec = MODELS["llama"]
    tensors = random_tensors(spec)
    source = write_hf(tmp_path / "in", spec, tensors)
    layout = TrainerLayout(tp=2, vocab_divisor=128)
    there = hf_to_megatron(source, tmp_path / "megatron", Options(layout=layout))
    _run(there)
    stored = open_checkpoint(tmp_path / "megatron", spec)
    shapes = {tensor.name: tensor.shape for tensor in stored.tensors}
    assert shapes["embedding.word_embeddings.weight"] == (256, spec.hidden_size)
    (chunk,) = stored.chunks[0, "embedding.word_embeddings.weight"]
    used = spec.vocab_size * spec.hidden_size * 2
    with (stored.folder / chunk.file).open("r+b") as file:
        file.seek(chunk.offset + used)
        assert not any(file.read(chunk.nbytes - used))  # padding is zero when we write it
        file.seek(chunk.offset + used)
        file.write(b"\x42" * (chunk.nbytes - used))  # and anything when training has
    _run(megatron_to_hf(tmp_path / "megatron", tmp_path / "out", None, Options()))
    assert_same(load_hf(tmp_path / "out"), tensors)


def test_tied_models_write_one_tensor_also_where_the_source_has_two(tmp_path: Path) -> None:
    spec = MODELS["tied"]
    tensors = random_tensors(spec)
    twice = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    source = write_hf(tmp_path / "in", spec, twice)
    _run(hf_to_hf(source, tmp_path / "out", Options()))
    assert_same(load_hf(tmp_path / "out"), tensors)
    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())
    assert "embed_tokens" in manifest["dropped"]["lm_head.weight"]


def test_layers_that_predict_further_tokens_are_left_out_on_request_only(tmp_path: Path) -> None:
    spec = MODELS["mtp"]
    tensors = random_tensors(spec)
    source = write_hf(tmp_path / "in", spec, tensors)
    _run(hf_to_hf(source, tmp_path / "kept", Options()))
    assert_same(load_hf(tmp_path / "kept"), tensors)
    _run(hf_to_megatron(source, tmp_path / "megatron", Options(mtp=False)))
    _run(megatron_to_hf(tmp_path / "megatron", tmp_path / "out", None, Options()))
    further = f"model.layers.{spec.num_layers}."
    main = {name: tensor for name, tensor in tensors.items() if not name.startswith(further)}
    assert_same(load_hf(tmp_path / "out"), main)
    manifest = json.loads((tmp_path / "megatron" / MANIFEST_NAME).read_text())
    assert manifest["dropped"].keys() == tensors.keys() - main.keys()


# --- Memory -----------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A tensor of 128 MB, cast to 256 MB, in a process that had neither before."""
    spec = make_spec(vocab_size=1 << 17, hidden_size=512, num_layers=1)
    source = write_hf(tmp_path / "in", spec, random_tensors(spec))
    assert peak_growth(source, tmp_path / "out", "float32") < 48 << 20
    assert next((tmp_path / "out").glob("*.distcp")).stat().st_size > 256 << 20


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    one = write_hf(tmp_path / "one", MODELS["llama"], random_tensors(MODELS["llama"]))
    other = make_spec(num_layers=5)
    target = hf_to_hf(
        write_hf(tmp_path / "other", other, random_tensors(other)), tmp_path / "out", Options()
    ).target
    with pytest.raises(PlanError, match=r"model\.layers\.5\."):
        Converter(Conversion(source=open_hf(one), target=target, folder=tmp_path / "out"))
