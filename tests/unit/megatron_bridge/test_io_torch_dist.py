"""Megatron-Core's distributed checkpoints: what is laid out is what torch's own reader finds.

How Megatron-Core itself saves and loads them is in `tests.dist.test_torch_dist`.
"""

import json
import pickle
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.formats import format_of, open_checkpoint, stored_dtypes
from megatron_bridge.io.store import Form
from megatron_bridge.io.torch_dist import open_torch_dist
from megatron_bridge.io.torch_dist_target import Extent, torch_dist_target
from megatron_bridge.layouts.torch_dist import TorchDistLayout, default_layout
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.spec import ModelSpec
from tests.unit.megatron_bridge.checkpoints import (
    Tensors,
    hf_tensors,
    make_deepseek,
    make_mixture,
    make_spec,
)
from tests.unit.megatron_bridge.oracle import megatron_tensors
from tests.unit.megatron_bridge.stored import assert_same, form_of, read, write

SPECS = {
    "llama": make_spec(num_layers=3),
    "tied": make_spec(num_layers=2, tied_embeddings=True, family="qwen2", qkv_bias=True),
    "mixture": make_mixture(num_layers=2, family="qwen2_moe"),
    "deepseek": make_deepseek(num_layers=2, num_mtp_layers=1),
}
ROWS = 128
SMALL = Extent(file_bytes=20_000, piece_bytes=500)


def _layout(spec: ModelSpec, stacked: bool) -> TorchDistLayout:
    return TorchDistLayout(stacked_layers=stacked, vocab_rows=ROWS)


CASES = [
    (name, stacked)
    for name, spec in SPECS.items()
    for stacked in ((False,) if spec.first_dense_layers else (False, True))
]


def _whole(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Tensors:
    return hf_tensors(spec, dtype)


def _make(folder: Path, spec: ModelSpec, stacked: bool, extent: Extent | None = None) -> Path:
    form = form_of(spec, "float32")
    target = torch_dist_target(spec, form, _layout(spec, stacked), {}, extent=extent)
    return write(target, folder, _whole(spec))


def _expected(spec: ModelSpec, stacked: bool) -> Tensors:
    """The tensors of the checkpoint: what one rank holds, experts and layers stacked."""
    layout = TrainerLayout(vocab_divisor=ROWS)
    layers = [list(range(spec.num_layers))]
    one = megatron_tensors(spec, _whole(spec), layout, layers, fused_norms=True)[0]
    found: Tensors = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in one.items():
        before, at, number = name.partition("weight")
        if ".experts." in name and number:  # experts come in ascending order
            key = before.replace("mlp.experts.", "mlp.experts.experts.") + at
            stacks.setdefault(key, []).append(tensor)
        else:
            found[name] = tensor
    found |= {key: torch.stack(tensors) for key, tensors in stacks.items()}
    if not stacked:
        return found
    layers_of: dict[str, list[torch.Tensor]] = {}
    for name in [name for name in found if name.startswith("decoder.layers.")]:
        number, _, rest = name.removeprefix("decoder.layers.").partition(".")
        layers_of.setdefault(f"decoder.layers.{rest}", []).append(found.pop(name))
        assert int(number) == len(layers_of[f"decoder.layers.{rest}"]) - 1
    return found | {name: torch.stack(tensors) for name, tensors in layers_of.items()}


@pytest.mark.parametrize(("name", "stacked"), CASES)
@pytest.mark.parametrize("extent", [None, SMALL], ids=["whole", "in pieces"])
def test_torch_reads_the_tensors_that_a_rank_of_megatron_holds(
    tmp_path: Path, name: str, stacked: bool, extent: Extent | None
) -> None:
    folder = _make(tmp_path / "ckpt", SPECS[name], stacked, extent)
    wanted = _expected(SPECS[name], stacked)
    found = {key: torch.empty_like(tensor) for key, tensor in wanted.items()}
    checkpoint.load(found, checkpoint_id=folder, no_dist=True)
    assert_same(found, wanted)
    kinds = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {key for key, kind in kinds.items() if hasattr(kind, "chunks")}
    assert wanted.keys() <= tensors
    for other in tensors - wanted.keys():  # the names of Megatron's layers without that engine
        assert name in ("mixture", "deepseek")
        assert "norm" in other
    if extent:
        assert len(list(folder.glob("*.distcp"))) > 1


@pytest.mark.parametrize("name", ["mixture", "deepseek"])
def test_norms_have_the_names_of_both_layer_specs_and_are_written_once(
    tmp_path: Path, name: str
) -> None:
    spec, layer = SPECS[name], "decoder.layers.1."
    folder = _make(tmp_path / "ckpt", spec, False)
    moe, local = f"{layer}pre_mlp_layernorm.weight", f"{layer}mlp.linear_fc1.layer_norm_weight"
    names = {local: moe}
    if spec.mla:
        at = f"{layer}self_attention."
        names = {f"{at}q_layernorm.weight": f"{at}linear_q_up_proj.layer_norm_weight"}
    for mine, theirs in names.items():
        size = 10 if spec.mla else 16
        found = {mine: torch.empty(size), theirs: torch.zeros(size)}
        checkpoint.load(found, checkpoint_id=folder, no_dist=True)
        assert torch.equal(found[mine], found[theirs])
        assert open_torch_dist(folder, spec).dropped[mine] == f"another name of {theirs}"
    form = form_of(spec, "float32")
    alone = TorchDistLayout(stacked_layers=False, local_spec=True, vocab_rows=ROWS)
    out = write(torch_dist_target(spec, form, alone, {}), tmp_path / "local", _whole(spec))
    stored = open_torch_dist(out, spec)
    assert_same(read(stored), _whole(spec))
    assert not any("another name" in reason for reason in stored.dropped.values())


@pytest.mark.parametrize(("name", "stacked"), CASES)
@pytest.mark.parametrize("extent", [None, SMALL], ids=["whole", "in pieces"])
def test_what_was_written_is_read_again(
    tmp_path: Path, name: str, stacked: bool, extent: Extent | None
) -> None:
    folder = _make(tmp_path / "ckpt", SPECS[name], stacked, extent)
    stored = open_checkpoint(folder, SPECS[name])
    assert_same(read(stored), _whole(SPECS[name]))
    assert stored.format == "torch_dist"
    assert {reason for reason in stored.dropped.values() if "another name of" not in reason} == {
        "settings and schedule of the training run",
        "state of low-precision kernels",
    }
    assert {t.name: t.shape for t in stored.tensors} == {
        key: tuple(tensor.shape) for key, tensor in _expected(SPECS[name], stacked).items()
    }


def test_dtypes_are_kept_where_they_differ_and_bias_stays_float32(tmp_path: Path) -> None:
    spec = SPECS["deepseek"]
    form = form_of(spec, "bfloat16", **{"model.norm.weight": "float32"})
    target = torch_dist_target(spec, form, _layout(spec, False), {})
    whole = _whole(spec)
    stored = open_torch_dist(write(target, tmp_path / "ckpt", whole), spec)
    assert stored_dtypes(stored) == form.dtypes
    wanted = {name: t.to(getattr(torch, form.dtypes[name])) for name, t in whole.items()}
    assert_same(read(stored), wanted)
    assert "float32" in form.dtypes.values()


def test_layers_that_predict_further_tokens_are_left_out_on_request_only(tmp_path: Path) -> None:
    spec = SPECS["deepseek"]
    folder = _make(tmp_path / "ckpt", spec, False)
    without = open_torch_dist(folder, spec, mtp=False)
    main = {n: t for n, t in _whole(spec).items() if not n.startswith("model.layers.2.")}
    assert_same(read(without), main)
    assert "left out on request" in without.dropped["mtp.layers.0.eh_proj.weight"]
    with pytest.raises(ConversionError, match=r"holds mtp\..*, which the model does not imply"):
        open_torch_dist(folder, spec.without_mtp())


def test_common_state_and_small_files_stand_beside_the_weights(tmp_path: Path) -> None:
    spec, beside = SPECS["llama"], {"config.json": b"{}"}
    form, layout = form_of(spec, "float32"), default_layout(spec)
    assert layout == TorchDistLayout(stacked_layers=True, vocab_rows=128)
    target = torch_dist_target(spec, form, layout, beside, {"num_layers": 3})
    assert list(target.closing) == ["config.json", "common.pt", ".metadata", "metadata.json"]
    folder = write(target, tmp_path / "ckpt", _whole(spec))
    torch.serialization.add_safe_globals([Namespace])
    common = torch.load(folder / "common.pt", weights_only=True)
    assert common["args"] == Namespace(num_layers=3)
    assert common["content_metadata"]["non_homogeneous_layers"] is False
    again = torch_dist_target(spec, form, layout, beside, {"num_layers": 3})
    assert again.closing == target.closing  # the same bytes, whenever it is made
    assert again.files == target.files


def test_a_tracker_file_and_a_training_run_name_the_checkpoint(tmp_path: Path) -> None:
    spec = SPECS["llama"]
    folder = _make(tmp_path / "iter_0000012", spec, True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert open_checkpoint(tmp_path, spec).folder == folder
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(ConversionError, match=r"says 'release', but .* does not exist"):
        open_checkpoint(tmp_path, spec)
    folder.rename(tmp_path / "trainer")
    assert open_checkpoint(tmp_path, spec).folder == tmp_path / "trainer"


# --- Refusals ---------------------------------------------------------------------------------


def test_what_cannot_be_laid_out_is_refused() -> None:
    spec = SPECS["llama"]
    layout = _layout(spec, True)
    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(ConversionError, match="layer_norm_weight cannot hold layers of"):
        torch_dist_target(spec, form_of(spec, "float32", **{norm: "bfloat16"}), layout, {})
    gate = "model.layers.1.mlp.gate_proj.weight"
    with pytest.raises(
        ConversionError, match=r"\[1\]\.mlp\.linear_fc1\.weight cannot hold tensors"
    ):
        torch_dist_target(spec, form_of(spec, "float32", **{gate: "bfloat16"}), layout, {})
    fp8 = Form(dtypes=form_of(spec, "float32").dtypes, quantized=frozenset({gate}))
    with pytest.raises(ConversionError, match="cannot be FP8"):
        torch_dist_target(spec, fp8, layout, {})
    with pytest.raises(ConversionError, match="64 rows cannot hold the model's 100"):
        torch_dist_target(spec, form_of(spec, "float32"), replace(layout, vocab_rows=64), {})
    deepseek = SPECS["deepseek"]
    with pytest.raises(ConversionError, match="the first 1 have no experts"):
        torch_dist_target(deepseek, form_of(deepseek, "float32"), layout, {})


def test_broken_checkpoints_are_named(tmp_path: Path) -> None:
    spec = SPECS["mixture"]
    whole = _make(tmp_path / "whole", spec, False)
    folder = tmp_path / "ckpt"

    def refuse(words: str, of: ModelSpec = spec) -> None:
        with pytest.raises(ConversionError, match=words):
            open_torch_dist(folder, of)
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)

    shutil.copytree(whole, folder)
    (folder / ".metadata").unlink()
    refuse("has no .metadata")
    (folder / ".metadata").write_bytes(b"not a pickle")
    refuse("is not the metadata of a checkpoint")
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    refuse("is not the metadata of a checkpoint")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    refuse("sharded_backend 'zarr'")
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-2000])
    refuse("__0_0.distcp is truncated")
    file.unlink()
    refuse("__0_0.distcp is missing")
    refuse("the model's|expected", make_mixture(num_layers=2, num_experts=8))
    refuse("lacks .*layers.2", make_mixture(num_layers=3))
    refuse("holds .*layers.1.*does not imply", make_mixture(num_layers=1))
    refuse("lacks decoder.*input_layernorm", SPECS["deepseek"])


def test_a_folder_without_a_checkpoint_or_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="is no checkpoint: expected"):
        format_of(tmp_path)
    with pytest.raises(ConversionError, match="absent does not exist"):
        format_of(tmp_path / "absent")
    folder = _make(tmp_path / "ckpt", SPECS["llama"], True)
    with pytest.raises(ConversionError, match=r"has no config\.json"):
        open_checkpoint(folder)
