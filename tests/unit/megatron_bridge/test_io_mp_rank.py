"""Megatron's older checkpoints, written with torch.save as Megatron-LM names and divides them."""

import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.coverage import check_stored
from megatron_bridge.io.formats import open_checkpoint
from megatron_bridge.layouts.hf import hf_side
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.plan import plan
from megatron_bridge.spec import ModelSpec
from tests.unit.megatron_bridge.checkpoints import (
    Tensors,
    hf_tensors,
    make_deepseek,
    make_mixture,
    make_spec,
)
from tests.unit.megatron_bridge.oracle import megatron_tensors
from tests.unit.megatron_bridge.stored import assert_same, read

LLAMA = make_spec(num_layers=4)
TIED = make_spec(num_layers=4, family="qwen2", qkv_bias=True, tied_embeddings=True)
MIXTURE = make_mixture(num_layers=2)
DEEPSEEK = make_deepseek(num_layers=3)
CASES = {
    "one rank": (LLAMA, TrainerLayout(), [[0, 1, 2, 3]]),
    "tp2": (LLAMA, TrainerLayout(tp=2), [[0, 1, 2, 3]]),
    "pp2": (LLAMA, TrainerLayout(pp=2), [[0, 1], [2, 3]]),
    "tp2 x uneven pp2, tied": (TIED, TrainerLayout(tp=2, pp=2), [[0], [1, 2, 3]]),
    "vpp2": (LLAMA, TrainerLayout(pp=2, vpp=2), [[0, 2], [1, 3]]),
    "ep2": (MIXTURE, TrainerLayout(dp=2, ep=2), [[0, 1]]),
    "ep2 x pp2": (DEEPSEEK, TrainerLayout(dp=2, ep=2, pp=2), [[0], [1, 2]]),
    "tp2 x etp2": (MIXTURE, TrainerLayout(tp=2, etp=2), [[0, 1]]),
    "tp2 x ep2": (MIXTURE, TrainerLayout(tp=2, dp=2, ep=2, etp=1), [[0, 1]]),
    "mtp": (make_deepseek(num_layers=2, num_mtp_layers=1), TrainerLayout(pp=2), [[0], [1]]),
}


def _state(tensors: Tensors, stages: list[list[int]], sequential: bool) -> Tensors:
    """One chunk's state: its layers counted from 0, an object of each linear layer beside them."""
    state: Tensors = OrderedDict()
    for name, tensor in tensors.items():
        match = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if match and int(match[1]) not in stages:
            continue
        if match:
            name = f"decoder.layers.{stages.index(int(match[1]))}.{match[2]}"
        if sequential:
            pattern = r"mlp\.experts\.linear_fc(\d)\.weight(\d+)$"
            name = re.sub(pattern, r"mlp.experts.local_experts.\2.linear_fc\1.weight", name)
        if name.endswith("linear_fc1.weight"):
            state[name.replace("weight", "_extra_state")] = None  # pyright: ignore
        state[name] = tensor
    return state


def _write(
    folder: Path,
    spec: ModelSpec,
    layout: TrainerLayout,
    stages: list[list[int]],
    te: bool = True,
    sequential: bool = False,
) -> Tensors:
    whole = hf_tensors(spec, torch.float32)
    ranks = megatron_tensors(spec, whole, layout, stages, fused_norms=te, padding=7)
    for rank, tensors in ranks.items():
        at, expert = layout.coordinate(rank), layout.expert_coordinate(rank)
        name = f"mp_rank_{at.tp:02d}"
        name += f"_{at.pp:03d}" if layout.pp > 1 else ""
        name += f"_{expert.ep:03d}" if layout.ep > 1 else ""
        content: dict[str, object] = {
            "iteration": 5,
            "args": None,
            "optimizer": {"state": torch.ones(5)},
        }
        held = stages[at.pp]
        size = len(held) // layout.vpp
        for chunk in range(layout.vpp):
            layers = held[chunk * size : (chunk + 1) * size]
            parts = tensors if layout.vpp == 1 else _ends(tensors, at.pp, chunk)
            key = "model" if layout.vpp == 1 else f"model{chunk}"
            content[key] = _state(parts, layers, sequential)
        (folder / name).mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / name / "model_optim_rng.pt")
    return whole


def _ends(tensors: Tensors, stage: int, chunk: int) -> Tensors:
    """With two chunks the first stage's first has the embedding, the last's last what ends it."""
    kept = {n: t for n, t in tensors.items() if n.startswith("decoder.layers.")}
    if stage == chunk:
        kept |= {n: t for n, t in tensors.items() if not n.startswith("decoder.layers.")}
    return kept


@pytest.mark.parametrize("te", [True, False], ids=["te", "local"])
@pytest.mark.parametrize(("spec", "layout", "stages"), CASES.values(), ids=CASES)
def test_every_division_is_read(
    tmp_path: Path, spec: ModelSpec, layout: TrainerLayout, stages: list[list[int]], te: bool
) -> None:
    whole = _write(tmp_path, spec, layout, stages, te)
    stored = open_checkpoint(tmp_path, spec)
    assert stored.format == "mp_rank"
    said = f"tp {layout.tp}, pp {layout.pp}, vpp {layout.vpp}, ep {layout.ep}, etp {layout.etp}"
    assert stored.layout == said
    assert_same(read(stored), whole)
    plan(stored.side, hf_side(spec, 0))  # proves itself
    check_stored(stored)
    assert set(stored.dropped.values()) == {
        "state of low-precision kernels",
        "state of the training run",
    }


def test_experts_that_are_modules_of_their_own_are_read(tmp_path: Path) -> None:
    layout = TrainerLayout(dp=2, ep=2)
    whole = _write(tmp_path, MIXTURE, layout, [[0, 1]], sequential=True)
    assert_same(read(open_checkpoint(tmp_path, MIXTURE)), whole)


def test_padded_rows_are_not_the_models(tmp_path: Path) -> None:
    _write(tmp_path, LLAMA, TrainerLayout(tp=2), [[0, 1, 2, 3]])
    stored = open_checkpoint(tmp_path, LLAMA)
    for rank, rows in ((0, 100), (1, 0)):
        param = next(p for p in stored.side.manifest(rank).params if "embedding" in p.name)
        assert param.shape == (128, 16)
        assert sum(shard.box.shape[0] for shard in param.shards) == rows


def test_an_iteration_folder_is_found(tmp_path: Path) -> None:
    whole = _write(tmp_path / "iter_0000005", LLAMA, TrainerLayout(), [[0, 1, 2, 3]])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert_same(read(open_checkpoint(tmp_path, LLAMA)), whole)


def _remove(folder: Path, rank: str) -> None:
    (folder / rank / "model_optim_rng.pt").unlink()
    (folder / rank).rmdir()


def _change(folder: Path, rank: str, name: str, value: object) -> None:
    path = folder / rank / "model_optim_rng.pt"
    content = torch.load(path, weights_only=True)
    if value is None:
        del content["model"][name]
    else:
        content["model"][name] = value
    torch.save(content, path)


def test_replicas_and_tied_copies_that_differ_are_named(tmp_path: Path) -> None:
    layout, stages = TrainerLayout(tp=2, pp=2), [[0, 1], [2, 3]]

    def change(rank: str, name: str, *shape: int) -> None:
        _write(tmp_path, TIED, layout, stages)
        _change(tmp_path, rank, name, torch.ones(shape))

    change("mp_rank_01_001", "output_layer.weight", 128, 16)  # the vocabulary's padding
    check_stored(open_checkpoint(tmp_path, TIED))
    change("mp_rank_00_001", "output_layer.weight", 128, 16)
    with pytest.raises(ConversionError, match=r"output_layer\.weight of .*00_001.* differs"):
        check_stored(open_checkpoint(tmp_path, TIED))
    change("mp_rank_01_001", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", 16)
    with pytest.raises(ConversionError, match=r"layers\.2\.mlp.* of .*01_001.* differs"):
        check_stored(open_checkpoint(tmp_path, TIED))


def test_files_that_lack_and_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    fc1 = "decoder.layers.1.mlp.linear_fc1.weight"
    layout, stages = TrainerLayout(tp=2, pp=2), [[0, 1], [2, 3]]

    def make(name: str) -> Path:
        _write(tmp_path / name, LLAMA, layout, stages)
        return tmp_path / name

    def refuse(folder: Path, words: str, spec: ModelSpec = LLAMA) -> None:
        with pytest.raises(ConversionError, match=words):
            open_checkpoint(folder, spec)

    _remove(make("a"), "mp_rank_01_001")
    refuse(tmp_path / "a", "lacks the file of a rank")
    _change(make("b"), "mp_rank_01_001", fc1, None)
    refuse(tmp_path / "b", r"mp_rank_01_001/.* lacks decoder\.layers\.3\.mlp\.linear_fc1\.weight")
    _change(make("c"), "mp_rank_01_000", fc1, torch.zeros(24, 15))
    refuse(tmp_path / "c", r"linear_fc1\.weight of .*mp_rank_01_000.*\(24, 15\)")
    _change(make("d"), "mp_rank_01_000", "decoder.other", torch.zeros(2))
    refuse(tmp_path / "d", r"mp_rank_01_000/.* holds decoder\.other")
    refuse(make("e"), "holds 4 layers, the model has 6", make_spec(num_layers=6))
    path = make("f") / "mp_rank_00_000" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-50])
    refuse(tmp_path / "f", r"mp_rank_00_000/model_optim_rng\.pt is not an archive")
    torch.save({"model": {"language_model": {}}}, path)
    refuse(tmp_path / "f", "before Megatron-Core")
