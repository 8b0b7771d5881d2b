"""Distributed checkpoints against Megatron-Core's own: it loads what we lay out, we read what it saves.

Models are transformers' own, saved by it; logits of Megatron's model must be theirs.
"""

from __future__ import annotations

import json
import queue
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_bridge.conversions import Options, hf_to_megatron
from megatron_bridge.convert import Converter
from megatron_bridge.io.torch_dist import open_torch_dist
from megatron_bridge.io.torch_dist_target import Extent, torch_dist_target
from megatron_bridge.layouts.hf import hf_side
from megatron_bridge.layouts.torch_dist import TorchDistLayout
from megatron_bridge.models.hf_config import hf_config
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.plan import plan
from megatron_bridge.spec import ModelSpec
from tests.dist import test_families
from tests.dist.dense import hf_model, make_case_of, make_spec
from tests.processes import run_ranks
from tests.unit.megatron_bridge.stored import assert_same, form_of, read, write

pytestmark = pytest.mark.dist

SPECS = {
    "llama": make_spec("llama"),
    "qwen2": make_spec("qwen2"),
    "qwen3": make_spec("qwen3"),
    "qwen3_moe": make_spec("qwen3_moe", num_layers=2),
    "mixtral": make_spec("mixtral", num_layers=2),
    "qwen2_moe": test_families.SPECS["qwen2_moe"],
    "deepseek_v2": test_families.SPECS["deepseek_v2"],
    "deepseek_v2_lite": test_families.SPECS["deepseek_v2_lite"],
    "deepseek_v3": test_families.SPECS["deepseek_v3"],
}
MIXTURES = [name for name, spec in SPECS.items() if spec.num_experts]
EXTENT = Extent(file_bytes=200_000, piece_bytes=3_000)
SMALL_VOCAB = {"vocab_divisor": 24}  # 32 entries become 24 or 48: padding that differs by tp
LAYOUTS = {
    "one": TrainerLayout(**SMALL_VOCAB),
    "tp2": TrainerLayout(tp=2, sequence_parallel=True, **SMALL_VOCAB),
    "pp2": TrainerLayout(pp=2, **SMALL_VOCAB),
    "tp2 x pp2": TrainerLayout(tp=2, pp=2, sequence_parallel=True, **SMALL_VOCAB),
    "ep2": TrainerLayout(dp=2, ep=2, **SMALL_VOCAB),
    "tp2 x ep2": TrainerLayout(tp=2, dp=2, ep=2, sequence_parallel=True, **SMALL_VOCAB),
}


@dataclass
class Model:
    """A model as transformers saves it, and what it says of a sequence."""

    spec: ModelSpec
    whole: dict[str, Tensor]  # of its files
    folder: Path
    tokens: Tensor  # [T]
    logits: Tensor  # [T, V]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    torch.set_num_threads(1)
    made: dict[str, Model] = {}
    for name, spec in SPECS.items():
        case = make_case_of(spec)
        model: torch.nn.Module = hf_model(spec)
        model.load_state_dict(case.weights)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)  # pyright: ignore - a transformers model
        (folder / "config.json").write_text(json.dumps(hf_config(spec, "float32")))
        tokens = max(case.tokens, key=len)
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        made[name] = Model(spec, load_file(folder / "model.safetensors"), folder, tokens, logits)
    return made


@pytest.fixture(scope="module")
def written(models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all models, converted; of dense ones, whose layers are then stacked, one more
    that is not, in small pieces.
    """
    folder = tmp_path_factory.mktemp("written")
    torch.save(models, folder / "models.pt")
    options = Options(
        arguments=False, layout=TrainerLayout(vocab_divisor=48), max_file_bytes=200_000, workers=1
    )
    for name, model in models.items():
        path = folder / f"{name} {name not in MIXTURES}"
        Converter(hf_to_megatron(model.folder, path, options)).run(lambda _: None)
        if name not in MIXTURES:
            layout = TorchDistLayout(stacked_layers=False, vocab_rows=48)
            form = form_of(model.spec, "float32")
            target = torch_dist_target(model.spec, form, layout, {}, {"tp": 1}, EXTENT)
            write(target, folder / f"{name} False", model.whole)
    return folder


def _make_model(spec: ModelSpec, layout: TrainerLayout):
    from megatron_bridge.runtime import setup
    from megatron_bridge.runtime.model import MegatronModel, ModelSettings

    setup.initialize(layout, seed=1)
    return MegatronModel(spec, layout, ModelSettings(dtype="float32"), trainable=False)


def _logits(model, tokens: Tensor) -> Tensor | None:
    """Run Megatron's schedule on one sequence; [T, V] on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_bridge.runtime.batch import MicroBatch
    from megatron_bridge.runtime.model import Pass

    batch = MicroBatch(lengths=torch.tensor([len(tokens)]), tokens=tokens, columns={})
    item = model._prepare(batch, Pass(temperature=1.0, forward_only=True))

    def step(_, chunk):
        output = chunk(
            input_ids=item.tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=item.packed,
        )
        return output, lambda found, non_loss_data: found

    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter([None]) for _ in model.chunks],
            model=model.chunks,
            num_microbatches=1,
            seq_length=item.tokens.shape[1],
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not found:
        return None
    mine = found[0][0][: len(tokens)].contiguous()
    parts = [torch.empty_like(mine) for _ in range(model.layout.tp)]
    torch.distributed.all_gather(parts, mine, group=model.groups.tp)
    return torch.cat(parts, -1)[:, : model.spec.vocab_size]


def _load_all(rank: int, size: int, folder: Path, layout: TrainerLayout, names: list[str]) -> int:
    from megatron.core import dist_checkpointing

    from megatron_bridge.runtime import setup

    models = torch.load(folder / "models.pt", weights_only=False)
    count = 0
    for name in names:
        wanted: Model = models[name]
        for path in sorted(folder.glob(f"{name} *")):
            model = _make_model(wanted.spec, layout)
            stacked = path.name.endswith("True")
            (chunk,) = model.chunks
            state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": not stacked})
            loaded, missing, unexpected = dist_checkpointing.load(
                {"model": state}, str(path), strict="return_all"
            )
            # "unexpected": what the model asks for in vain; "missing": what it has no use for
            assert not unexpected, (name, layout, unexpected)
            # Transformer Engine's, which needs a GPU to load
            assert all("_extra_state" in key or "norm" in key for key in missing), (name, missing)
            if "args" in loaded:
                assert loaded["args"].tp == 1
            chunk.load_state_dict(loaded["model"])
            logits = _logits(model, wanted.tokens)
            if logits is not None:
                scale = float(wanted.logits.abs().max())
                error = float((logits - wanted.logits).abs().max()) / scale
                assert error < 1e-4, (name, layout, error)
                count += 1
            setup.destroy()
    return count


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_megatron_loads_what_was_laid_out_at_any_layout(
    written: Path, layout: TrainerLayout
) -> None:
    names = MIXTURES if layout.ep > 1 else list(SPECS)
    size = layout.world_size
    counts = run_ranks(_load_all, size, written, layout, names, timeout=500)
    forms = sum(1 if name in MIXTURES else 2 for name in names)
    assert sum(counts) == forms * size // layout.pp


# --- Reading ----------------------------------------------------------------------------------


def _save_all(
    rank: int, size: int, folder: Path, out: Path, layout: TrainerLayout, names: list[str]
) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_bridge.layouts.megatron import megatron_manifest
    from megatron_bridge.runtime import setup

    # Megatron's own is a server process, which would outlive this rank's end.
    filesystem_async._results_queue = queue.Queue()
    models = torch.load(folder / "models.pt", weights_only=False)
    for name in names:
        held: Model = models[name]
        model = _make_model(held.spec, layout)
        params = model.parameters()
        for param in megatron_manifest(held.spec, layout, rank).params:
            for shard in param.shards:
                value = held.whole[shard.tensor][shard.box.slices]
                params[param.name].data[shard.local.slices] = value
        (chunk,) = model.chunks
        for stacked in (False,) if name in MIXTURES else (False, True):
            path = out / f"{name} {stacked}"
            if rank == 0:
                path.mkdir()
            torch.distributed.barrier()
            state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": not stacked})
            dist_checkpointing.save({"model": state, "iteration": 7}, str(path))
        setup.destroy()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_megatron_saves_at_any_layout_is_read(
    models: dict[str, Model], written: Path, tmp_path: Path, layout: TrainerLayout
) -> None:
    names = [n for n in ("qwen2", "mixtral", "deepseek_v3") if layout.ep == 1 or n in MIXTURES]
    run_ranks(_save_all, layout.world_size, written, tmp_path, layout, names, timeout=500)
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == len(names) + (layout.ep == 1)
    for folder in folders:
        model = models[folder.name.split()[0]]
        stored = open_torch_dist(folder, model.spec)
        assert_same(read(stored), model.whole)
        plan(stored.side, hf_side(model.spec, 0))


def _train_and_save(rank: int, size: int, out: Path, layout: TrainerLayout, file: Path) -> None:
    from megatron_bridge.runtime import checkpoint

    case = torch.load(file, weights_only=False)
    trial = test_families.Trial(layout, distributed_optimizer=True, family="qwen3")
    session = test_families._Session(trial, case, rank)
    session.write_weights()
    session.step()
    checkpoint.save(out / "trainer", session.trainer)
    whole = {name: value.detach().clone() for name, value in session.model.parameters().items()}
    torch.save(whole, out / f"{rank}.pt")
    session.close()


def test_a_training_checkpoint_is_read_without_its_optimizer(tmp_path: Path) -> None:
    case = make_case_of(SPECS["qwen3"])
    torch.save(case, tmp_path / "case.pt")
    layout = TrainerLayout(pp=2, **SMALL_VOCAB)
    run_ranks(_train_and_save, 2, tmp_path, layout, tmp_path / "case.pt", timeout=300)
    stored = open_torch_dist(tmp_path, case.spec)
    found = read(stored)
    trained = torch.load(tmp_path / "0.pt") | torch.load(tmp_path / "1.pt")
    down = trained["decoder.layers.3.mlp.linear_fc2.weight"]
    assert torch.equal(found["model.layers.3.mlp.down_proj.weight"], down)
    gate_up = trained["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(found["model.layers.0.mlp.gate_proj.weight"], gate_up.chunk(2)[0])
    assert not torch.equal(down, case.weights["model.layers.3.mlp.down_proj.weight"])
    reasons = set(stored.dropped.values())
    assert "state of the optimizer" in reasons
    assert "settings and schedule of the training run" in reasons
