import json
from pathlib import Path

import pytest

from megarl import checkpoint
from megarl.checkpoint import RunState, StartPoint
from megarl.config import CheckpointConfig, DataConfig, Resume, RunConfig
from megarl.errors import ConfigError


def _make_config(folder: Path, **changes: object) -> RunConfig:
    values: dict = {
        "run_dir": str(folder),
        "name": "r",
        "resume": Resume.AUTO,
        "data": DataConfig(train_batch_size=4),
        **changes,
    }
    return RunConfig(**values)


def _save(folder: Path, step: int, seed: int = 0) -> None:
    checkpoint.begin(folder, step)
    checkpoint.commit(folder, RunState(step=step, consumed_prompts=4 * step, seed=seed))


def test_a_run_begins_at_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    config = _make_config(tmp_path)
    assert checkpoint.find_start(config) == StartPoint()
    _save(config.folder, 2)
    _save(config.folder, 4)
    start = checkpoint.find_start(config)
    assert start.step == 4
    assert start.trainer_folder == config.folder / "checkpoints" / "step_000004" / "trainer"


def test_a_checkpoint_brings_the_rollouts_that_lie_in_it(tmp_path: Path) -> None:
    config = _make_config(tmp_path)
    checkpoint.begin(config.folder, 2)
    (checkpoint.begun_folder(config.folder, 2) / checkpoint.ROLLOUT_FILE).touch()
    folder = checkpoint.commit(config.folder, RunState(step=2, consumed_prompts=8, seed=0))
    assert checkpoint.find_start(config).rollout_file == folder / checkpoint.ROLLOUT_FILE
    _save(config.folder, 4)
    assert checkpoint.find_start(config).rollout_file is None


@pytest.mark.parametrize(
    ("freq", "stopping", "expected"),
    [(3, False, [3, 6, 8]), (0, False, [8]), (0, True, [1, 2, 3, 4, 5, 6, 7, 8])],
)
def test_versions_are_saved_now_and_then_at_the_end_and_before_a_stop(
    tmp_path: Path, freq: int, stopping: bool, expected: list[int]
) -> None:
    config = _make_config(tmp_path, max_steps=8, checkpoint=CheckpointConfig(save_freq=freq))
    due = [v for v in range(1, 9) if checkpoint.save_due(config, v, 0, stopping=stopping)]
    assert due == expected
    assert not checkpoint.save_due(config, 8, 8, stopping=stopping)  # it is saved already


def test_a_save_that_was_cut_off_leaves_the_last_one(tmp_path: Path) -> None:
    config = _make_config(tmp_path)
    _save(config.folder, 2)
    checkpoint.begin(config.folder, 4)
    assert checkpoint.find_start(config).step == 2


def test_without_resume_a_checkpoint_is_not_looked_at(tmp_path: Path) -> None:
    config = _make_config(tmp_path, resume=Resume.NEVER)
    _save(config.folder, 2)
    assert checkpoint.find_start(config).step == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed 0, this run has 1"),
        ({"data": DataConfig(train_batch_size=5)}, "train_batch_size=5"),
        ({"max_steps": 1}, "max_steps is 1"),
    ],
)
def test_a_checkpoint_of_another_data_stream_is_refused(
    tmp_path: Path, changes: dict, words: str
) -> None:
    _save(_make_config(tmp_path).folder, 2)
    with pytest.raises(ConfigError, match=words):
        checkpoint.find_start(_make_config(tmp_path, **changes))


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    config = _make_config(tmp_path)
    _save(config.folder, 2)
    (config.folder / "checkpoints" / "step_000002" / "state.json").write_text(
        json.dumps({"step": 2})
    )
    with pytest.raises(ConfigError, match="step_000002"):
        checkpoint.find_start(config)
