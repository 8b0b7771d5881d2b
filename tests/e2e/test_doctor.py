"""`megarl doctor` and the same contract at the start of `megarl train`, on the real engines."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.check import Command, check_run, topology_of
from megarl.config import RunConfig
from megarl.config_file import load_config
from megarl.topology import TRAINER
from tests.e2e.conftest import Task
from tests.jobs import ROOT, run_command
from tests.processes import run_ranks

pytestmark = pytest.mark.e2e

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
EXPECTED_CHECKS = (
    "parameters of the manifest",
    "are the checkpoint's",
    "largest difference",
    "mean difference",
    "reward megarl.rewards.arithmetic:score",
)


def test_a_sound_setting_is_ready_and_leaves_nothing_in_the_way_of_a_run(
    task: Task, tmp_path: Path
) -> None:
    overrides = task.overrides(
        tmp_path, "model.dtype=bfloat16", "trainer.layout.tp=1", "trainer.layout.pp=2"
    )
    output = run_command("doctor", str(QUICKSTART), *overrides)
    assert all(check in output for check in EXPECTED_CHECKS), output
    assert output.count("holds") == 6
    assert "starting 4 ranks (2 trainer, 1 generator, 1 reward)" in output
    assert "ready" in output
    assert list(tmp_path.iterdir()) == []
    check_run(Command.TRAIN, load_config(QUICKSTART, overrides))


def _swap_keys_and_values(folder: Path) -> None:
    """Damage a checkpoint as a wrong name table would: two tensors of one shape."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    key, value = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
    tensors[key], tensors[value] = tensors[value], tensors[key]
    save_file(tensors, file, metadata={"format": "pt"})


def _change_epsilon(folder: Path) -> None:
    """Make two engines of the same weights compute something else, as a wrong config.json would."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"rms_norm_eps": 10 * values["rms_norm_eps"]}))


def _rank(rank: int, size: int, port: int, config: RunConfig, trainer_model: str) -> None:
    """Be one rank of ``megarl train`` whose trainer reads its model from another folder."""
    from megarl.checkpoint import StartPoint
    from megarl.train import run_training
    from megarl.wiring import Rank, make_tracers
    from megarl.world import Rendezvous, World

    topology = topology_of(Command.TRAIN, config)
    at = Rendezvous(
        rank=rank, host="127.0.0.1", port=port, is_store_host=False, timeout_seconds=60.0
    )
    world = World(topology, at)
    if world.place.name == TRAINER:
        config = replace(config, model=replace(config.model, path=trainer_model))
    run_training(
        Rank(
            config=config,
            topology=topology,
            world=world,
            tracers=make_tracers(world),
            start=StartPoint(),
            began=time.monotonic(),
        )
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            _swap_keys_and_values,
            "WeightSyncError: after the first transfer rank 2 does not hold the checkpoint: "
            r"model\.layers\.1\.self_attn\.k_proj\.weight\[0, 0\] \(in .*qkv_proj\.weight\[128, 0\]\)",
        ),
        (
            _change_epsilon,
            r"ContractError: .* the largest difference .* above fault\.max_logprob_error 0\.001; "
            r"the worst is token \d+ of sample \d of prompt \d+: log-probability",
        ),
    ],
    ids=["weights", "computation"],
)
def test_training_does_not_start_where_trainer_and_generator_differ(
    damage: Callable[[Path], None], words: str, task: Task, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(task.folder / "model", model)
    damage(model)
    overrides = task.overrides(tmp_path, "name=refused", "max_steps=1", "data.eval_path=")
    config = load_config(QUICKSTART, overrides)
    config.folder.mkdir()
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    size = topology_of(Command.TRAIN, config).size
    with pytest.raises(AssertionError, match=words):
        run_ranks(_rank, size, store.port, config, str(model), timeout=120, default_group=False)
    assert not (config.folder / "checkpoints").exists()
    assert not (config.folder / "metrics.jsonl").read_text()
