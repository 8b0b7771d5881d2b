"""Hugging Face folders as stored checkpoints and as targets, against the safetensors library."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.coverage import check_stored
from megatron_bridge.io.hf_store import hf_target, open_hf
from megatron_bridge.io.store import Form
from megatron_bridge.models.families import canonical_tensors
from tests.unit.megatron_bridge.checkpoints import Tensors
from tests.unit.megatron_bridge.stored import assert_same, form_of, read, read_params, write

SIZES: dict = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DEEPSEEK = DeepseekV3Config(
    **{**SIZES, "num_key_value_heads": 4},
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    first_k_dense_replace=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    num_nextn_predict_layers=0,
)
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2 tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "deepseek_v3": DEEPSEEK,
}


def _make_folder(path: Path, config: PretrainedConfig, max_shard_size: str = "20KB") -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(buffer.shape)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def _whole(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_a_folder_holds_is_what_its_library_reads(
    tmp_path: Path, config: PretrainedConfig
) -> None:
    folder = _make_folder(tmp_path / "hf", config)
    stored = open_hf(folder)
    assert_same(read(stored), _whole(folder))
    assert stored.dropped == {}
    assert {(t.name, t.shape) for t in stored.tensors} == {
        (t.name, t.shape) for t in canonical_tensors(stored.spec)
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("max_file_bytes", [1, 30_000, 1 << 30])
def test_a_written_folder_is_one_of_its_library(
    tmp_path: Path, config: PretrainedConfig, max_file_bytes: int
) -> None:
    stored = open_hf(_make_folder(tmp_path / "hf", config))
    whole = _whole(tmp_path / "hf")
    dtypes = {name: str(tensor.dtype)[6:] for name, tensor in whole.items()}
    small = {"config.json": (tmp_path / "hf" / "config.json").read_bytes()}
    target = hf_target(stored.spec, Form(dtypes=dtypes), small, max_file_bytes)
    folder = write(target, tmp_path / "out", whole)
    assert_same(_whole(folder), whole)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert_same(
        dict(model.state_dict()),
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()),
    )
    assert_same(read(open_hf(folder)), whole)


def test_a_single_file_has_no_index_and_several_have_one(tmp_path: Path) -> None:
    spec = open_hf(_make_folder(tmp_path / "hf", CONFIGS["llama"])).spec
    single = hf_target(spec, form_of(spec, "bfloat16"), {})
    assert [file.name for file in single.files] == ["model.safetensors"]
    assert list(single.closing) == []
    several = hf_target(spec, form_of(spec, "bfloat16"), {"config.json": b"{}"}, 20_000)
    assert list(several.closing) == ["model.safetensors.index.json", "config.json"]
    index = json.loads(several.closing["model.safetensors.index.json"])
    numel = sum(torch.Size(t.shape).numel() for t in canonical_tensors(spec))
    assert index["metadata"]["total_size"] == 2 * numel
    assert set(index["weight_map"]) == {t.name for t in canonical_tensors(spec)}
    for file in several.files:
        tensors = sum(c.nbytes for chunks in file.chunks.values() for c in chunks)
        assert tensors <= 20_000 or len(file.chunks) == 1


def test_tensors_that_follow_from_others_are_dropped_with_their_reason(tmp_path: Path) -> None:
    folder = _make_folder(tmp_path / "hf", CONFIGS["qwen2 tied"], "1GB")
    whole = _whole(folder)
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    extra = {"lm_head.weight": whole["model.embed_tokens.weight"].clone(), inverse: torch.ones(4)}
    save_file(whole | extra, folder / "model.safetensors")
    stored = open_hf(folder)
    assert stored.dropped == {
        "lm_head.weight": "repeats model.embed_tokens.weight",
        inverse: "rotary inverse frequencies follow from config.json",
    }
    assert_same(read(stored), whole)
    check_stored(stored)
    extra["lm_head.weight"][89, 31] += 1
    save_file(whole | extra, folder / "model.safetensors")
    with pytest.raises(
        ConversionError, match=r"lm_head\.weight of .* differs from what it repeats"
    ):
        check_stored(open_hf(folder))


# --- Multi-token prediction -------------------------------------------------------------------


def _make_mtp_folder(path: Path) -> tuple[Path, Tensors]:
    """DeepSeek-V3 with a layer that predicts further tokens, which transformers does not write."""
    folder = _make_folder(path, DEEPSEEK, "1GB")
    whole = _whole(folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    layer = {
        name.replace("layers.1.", "layers.2."): tensor.flip(0)
        for name, tensor in whole.items()
        if "layers.1." in name
    }
    at = "model.layers.2."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{at}{name}.weight"] = torch.rand(32).bfloat16()
    layer[f"{at}eh_proj.weight"] = torch.rand(32, 64).bfloat16()
    aliases = {
        f"{at}embed_tokens.weight": whole["model.embed_tokens.weight"].clone(),
        f"{at}shared_head.head.weight": whole["lm_head.weight"].clone(),
    }
    save_file(whole | layer | aliases, folder / "model.safetensors")
    return folder, layer


def test_layers_that_predict_further_tokens_are_left_out_on_request_only(tmp_path: Path) -> None:
    main = _whole(_make_folder(tmp_path / "main", DEEPSEEK))
    folder, layer = _make_mtp_folder(tmp_path / "hf")
    stored = open_hf(folder)
    assert_same(read(stored), main | layer)
    assert set(stored.dropped.values()) == {
        "repeats model.embed_tokens.weight",
        "repeats lm_head.weight",
    }
    without = open_hf(folder, mtp=False)
    assert_same(read(without), main)
    assert without.spec.num_mtp_layers == 0
    assert layer.keys() <= without.dropped.keys()
    assert without.dropped["model.layers.2.eh_proj.weight"].endswith("left out on request")


# --- FP8 --------------------------------------------------------------------------------------

FP8 = "model.layers.1.mlp.down_proj.weight"


def _make_fp8_folder(path: Path, grid: tuple[int, int] = (3, 2)) -> tuple[Path, Tensors]:
    """A llama one of whose weights [260, 160] is FP8."""
    config = LlamaConfig(**{**SIZES, "hidden_size": 260, "intermediate_size": 160, "head_dim": 8})
    folder = _make_folder(path, config, "1GB")
    whole = _whole(folder)
    whole[FP8] = whole[FP8].to(torch.float8_e4m3fn)
    scales = torch.rand(grid)
    save_file({**whole, f"{FP8}_scale_inv": scales}, folder / "model.safetensors")
    saved = json.loads((folder / "config.json").read_text())
    saved["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(saved))
    return folder, {**whole, f"{FP8}_scale_inv": scales}


def test_fp8_weights_and_their_scales_are_parameters_in_both_directions(tmp_path: Path) -> None:
    folder, tensors = _make_fp8_folder(tmp_path / "hf")
    stored = open_hf(folder)
    assert_same({name: value for (_, name), value in read_params(stored).items()}, tensors)
    (param,) = [p for p in stored.side.manifest(0).params if p.quantization]
    assert (param.name, param.dtype) == (FP8, "float8_e4m3fn")
    assert (param.quantization, param.scales) == ("block", f"{FP8}_scale_inv")
    form = Form(dtypes=form_of(stored.spec, "bfloat16").dtypes, quantized=frozenset({FP8}))
    out = write(hf_target(stored.spec, form, {}), tmp_path / "out", tensors, tensors)
    assert_same(_whole(out), tensors)


def test_a_grid_of_scales_that_does_not_match_its_weight_is_refused(tmp_path: Path) -> None:
    folder, _ = _make_fp8_folder(tmp_path / "hf", (2, 3))
    with pytest.raises(
        ConversionError, match=r"_scale_inv of .* \(2, 3\), expected float32 \(3, 2\)"
    ):
        open_hf(folder)


def test_fp8_without_scales_and_other_quantisations_are_refused(tmp_path: Path) -> None:
    folder, tensors = _make_fp8_folder(tmp_path / "hf")
    del tensors[f"{FP8}_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=r"has no .*scale_inv"):
        open_hf(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=r"quantization_config\.quant_method 'awq'"):
        open_hf(folder)


# --- Faults -----------------------------------------------------------------------------------


def _single(folder: Path, change: Callable[[Tensors], object]) -> None:
    whole = _whole(folder)
    change(whole)
    save_file(whole, folder / "model.safetensors")


def test_tensors_that_lack_are_of_another_shape_or_unknown_are_named(tmp_path: Path) -> None:
    folder = _make_folder(tmp_path / "hf", CONFIGS["mixtral"], "1GB")
    expert = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    original = (folder / "model.safetensors").read_bytes()
    for change, words in (
        (lambda t: t.pop(expert), "lacks model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        (lambda t: t.update({expert: t[expert][:-1]}), r"experts.3.w2.weight of .* \(31, 48\)"),
        (lambda t: t.update({expert: t[expert].double()}), "w2.weight of .* is float64"),
        (lambda t: t.update(other=torch.ones(2)), "holds other, which config.json does not imply"),
        (lambda t: t.update({f"{expert}_scale_inv": torch.ones(1, 1)}), "holds .*_scale_inv"),
    ):
        (folder / "model.safetensors").write_bytes(original)
        _single(folder, change)
        with pytest.raises(ConversionError, match=words):
            open_hf(folder)


def test_files_that_lack_or_are_cut_short_are_named(tmp_path: Path) -> None:
    folder = _make_folder(tmp_path / "hf", CONFIGS["llama"])
    first = min(folder.glob("*.safetensors"))
    content = first.read_bytes()
    for cut in (len(content) - 1, 200, 8, 3, 0):
        first.write_bytes(content[:cut])
        with pytest.raises(ConversionError, match=f"{first.name} is truncated"):
            open_hf(folder)
    first.write_bytes(content + b"more")
    with pytest.raises(ConversionError, match=f"{first.name} is corrupt"):
        open_hf(folder)
    first.write_bytes(content[:8] + b"x" * (len(content) - 8))
    with pytest.raises(ConversionError, match=f"{first.name} is not a safetensors file"):
        open_hf(folder)
    first.unlink()
    with pytest.raises(ConversionError, match=f"{first.name} is missing"):
        open_hf(folder)


def test_an_index_that_does_not_say_what_its_files_hold_is_refused(tmp_path: Path) -> None:
    folder = _make_folder(tmp_path / "hf", CONFIGS["llama"])
    index = folder / "model.safetensors.index.json"
    saved = json.loads(index.read_text())
    files = sorted(set(saved["weight_map"].values()))
    saved["weight_map"]["absent.weight"] = files[0]
    index.write_text(json.dumps(saved))
    with pytest.raises(ConversionError, match=r"names absent\.weight in .*1 such"):
        open_hf(folder)
    del saved["weight_map"]["absent.weight"]
    name = next(name for name, file in saved["weight_map"].items() if file == files[0])
    saved["weight_map"][name] = files[1]
    index.write_text(json.dumps(saved))
    with pytest.raises(ConversionError, match=f"says that {name} lies in {files[1]}"):
        open_hf(folder)
