"""Recorded batches as files and what a replay is refused for: each refusal names file and setting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megarl.config import (
    AlgorithmConfig,
    DataConfig,
    Mode,
    ModelConfig,
    ObserveConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from megarl.errors import ConfigError, DataError
from megarl.recording import (
    batch_file,
    check_recording,
    forget_after,
    read_settings,
    recorded_steps,
    settings,
)
from megarl.rollout.batch import Scored
from megarl.rollout.recorded import read_batch, write_batch
from megarl.types import Rollouts, field_names
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout

VOCABULARY = 32


def _make_scored(first_prompt: int = 7) -> Scored:
    return Scored(
        rollouts=Rollouts(
            prompt_ids=torch.tensor([first_prompt, first_prompt + 3]),
            sample_ids=torch.tensor([0, 1]),
            prompt_lengths=torch.tensor([1, 2]),
            lengths=torch.tensor([2, 4]),
            finished=torch.tensor([1, 0]),
            tokens=torch.tensor([1, 5, 6, 9, 2, 3]),
            logprobs=torch.tensor([0, -0.1, 0, 0, -1e-30, -7.25]),
            versions=torch.tensor([-1, 4, -1, -1, 4, 5]),
        ),
        rewards=torch.tensor([1 / 3, -2.5], dtype=torch.float64),
    )


def _make_config(folder: Path, **changes: object) -> RunConfig:
    values: dict = {
        "run_dir": str(folder),
        "name": "again",
        "max_steps": 3,
        "replay_from": str(folder / "recorded"),
        "trainer": TrainerConfig(lr=1e-4),
        **changes,
    }
    return RunConfig(**values)


def _record(folder: Path, *steps: int, **changes: object) -> Path:
    """Write batches of steps into a run folder; return it."""
    made_under = settings(_make_config(folder, **changes), VOCABULARY)
    for step in steps:
        write_batch(folder / "recorded", step, _make_scored(step), made_under)
    return folder / "recorded"


def test_a_batch_comes_back_bit_for_bit_and_nothing_else_is_left(tmp_path: Path) -> None:
    run, scored = _record(tmp_path, 7), _make_scored(7)
    found = read_batch(run, 7)
    for name in field_names(Rollouts):
        expected, got = getattr(scored.rollouts, name), getattr(found.rollouts, name)
        assert got.dtype == expected.dtype
        assert got.equal(expected), name
    assert found.rewards.dtype == torch.float64
    assert found.rewards.equal(scored.rewards)
    assert [path.name for path in (run / "batches").iterdir()] == ["step_000007.safetensors"]


def test_a_run_that_goes_on_from_an_earlier_step_forgets_what_came_after(tmp_path: Path) -> None:
    run = _record(tmp_path, 1, 2, 3, 10)
    forget_after(run, 2)
    assert recorded_steps(run) == [1, 2]
    forget_after(tmp_path / "nothing recorded", 0)


def test_a_replay_may_change_layout_data_budget_and_generators(tmp_path: Path) -> None:
    _record(tmp_path, 1, 2, 3)
    other = _make_config(
        tmp_path,
        max_steps=2,
        trainer=TrainerConfig(
            lr=1e-4,
            layout=TrainerLayout(dp=2),
            max_tokens_per_micro_batch=77,
            recompute=True,
            distributed_optimizer=True,
        ),
        observe=ObserveConfig(trace=False),
        data=DataConfig(train_path="not there"),
        model=ModelConfig(path="moved"),
    )
    other = replace(other, generator=replace(other.generator, layout=GeneratorLayout(replicas=9)))
    check_recording(other, VOCABULARY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": AlgorithmConfig(rho=2.0)}, "algorithm.rho: recorded 4.0, here 2.0"),
        ({"data": DataConfig(train_batch_size=8)}, "data.train_batch_size: recorded 64, here 8"),
        ({"rollout": RolloutConfig(n=4)}, "rollout.n: recorded 8, here 4"),
        (
            {"rollout": RolloutConfig(temperature=0.5)},
            "rollout.temperature: recorded 1.0, here 0.5",
        ),
        ({"trainer": TrainerConfig(lr=2e-4)}, "trainer.lr: recorded 0.0001, here 0.0002"),
        ({"model": ModelConfig(dtype="bfloat16")}, "model.dtype: recorded float32, here bfloat16"),
        ({"seed": 5}, "seed: recorded 0, here 5"),
        ({"mode": Mode.SYNC}, "max_staleness: recorded 1, here 0"),
        (
            {"trainer": TrainerConfig(lr=1e-4, lr_decay_style="cosine")},
            "max_steps: recorded nothing, here 3; trainer.lr_decay_style: recorded constant, here cosine",
        ),
        (
            {"trainer": TrainerConfig(lr=1e-4, updates_per_batch=2)},
            "trainer.updates_per_batch: recorded 1, here 2",
        ),
    ],
)
def test_settings_that_change_the_losses_are_named(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    _record(tmp_path, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"step_000001\.safetensors was recorded") as caught:
        check_recording(_make_config(tmp_path, **changes), VOCABULARY)
    assert str(caught.value).endswith(f"other settings, which change the losses ({said})")


def test_a_batch_that_was_recorded_after_a_change_is_named(tmp_path: Path) -> None:
    _record(tmp_path, 1, 2)
    _record(tmp_path, 3, trainer=TrainerConfig(lr=1e-5))
    with pytest.raises(
        ConfigError, match=r"step_000003.*trainer\.lr: recorded 1e-05, here 0\.0001"
    ):
        check_recording(_make_config(tmp_path), VOCABULARY)
    check_recording(_make_config(tmp_path, max_steps=2), VOCABULARY)


def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    _record(tmp_path, 1, 2, 3)
    with pytest.raises(ConfigError, match="the model's vocabulary: recorded 32, here 64"):
        check_recording(_make_config(tmp_path), 64)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replay_from": ""}, "replay_from is empty"),
        ({"name": "recorded"}, "replay_from is this run's own folder .*recorded"),
        ({}, "recorded holds no recorded batches; record a run with observe.record=true"),
    ],
)
def test_without_a_recording_there_is_no_replay(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_recording(_make_config(tmp_path, **changes), VOCABULARY)


@pytest.mark.parametrize(("steps", "missing"), [((1, 2), 3), ((2, 3), 1), ((1, 3), 2)])
def test_a_missing_step_is_named(tmp_path: Path, steps: tuple[int, ...], missing: int) -> None:
    _record(tmp_path, *steps)
    said = f"step_{missing:06d}.safetensors is missing: the 2 batches .* are of steps {steps[0]} to"
    with pytest.raises(DataError, match=said):
        check_recording(_make_config(tmp_path), VOCABULARY)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_file_that_was_cut_off_is_named_before_and_while_it_is_read(
    tmp_path: Path, kept: int
) -> None:
    file = batch_file(_record(tmp_path, 1, 2, 3), 2)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DataError, match=f"{file} holds no batch that can be read"):
        check_recording(_make_config(tmp_path), VOCABULARY)
    with pytest.raises(DataError, match=f"{file} holds no batch that can be read"):
        read_batch(tmp_path / "recorded", 2)


def test_a_file_of_another_step_or_of_anything_else_is_named(tmp_path: Path) -> None:
    run = _record(tmp_path, 1)
    batch_file(run, 1).rename(batch_file(run, 2))
    with pytest.raises(DataError, match=r"step_000002.* = \(1, 1\), expected \(1, 2\)"):
        read_settings(run, 2)
    save_file({"weight": torch.zeros(2)}, batch_file(run, 3))
    with pytest.raises(DataError, match=r"step_000003.*holds no batch"):
        read_settings(run, 3)
    with pytest.raises(DataError, match=r"step_000003.*holds no batch"):
        read_batch(run, 3)
    with pytest.raises(DataError, match=r"step_000004\.safetensors is missing"):
        read_settings(run, 4)


def test_columns_that_do_not_fit_each_other_are_named(tmp_path: Path) -> None:
    file = batch_file(_record(tmp_path, 1), 1)
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    tensors = load_file(file)
    save_file({**tensors, "tokens": tensors["tokens"][:-1].clone()}, file, header)
    with pytest.raises(DataError, match=r"tokens has shape \(5,\), expected \(6,\)"):
        read_batch(tmp_path / "recorded", 1)
    save_file({**tensors, "rewards": torch.zeros(3)}, file, header)
    with pytest.raises(DataError, match=r"rewards has shape \(3,\), expected one entry .* 2 rows"):
        read_batch(tmp_path / "recorded", 1)


def test_the_header_holds_plain_values(tmp_path: Path) -> None:
    found = read_settings(_record(tmp_path, 1), 1)
    assert found == json.loads(json.dumps(dict(settings(_make_config(tmp_path), VOCABULARY))))
