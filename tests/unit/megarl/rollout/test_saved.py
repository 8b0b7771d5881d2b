"""Rollouts in flight as a file: all of it comes back, and a file of anything else is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.checkpoint import ROLLOUT_FILE
from megarl.errors import ConfigError
from megarl.rollout.buffer import BufferPolicy, RolloutBuffer
from megarl.rollout.engine import Sample
from megarl.rollout.saved import SavedRollouts, read_rollouts, write_rollouts


def _make_sample(request_id: int, *tokens: int, finished: bool = True) -> Sample:
    return Sample(
        request_id=request_id,
        tokens=tokens,
        logprobs=tuple(-token / 8 for token in tokens),
        versions=tuple(range(len(tokens))),
        finished=finished,
    )


def _make_saved() -> SavedRollouts:
    buffer: RolloutBuffer[Sample] = RolloutBuffer(
        BufferPolicy(batch_groups=2, group_size=2, max_staleness=1)
    )
    buffer.admit(0)
    return SavedRollouts(
        state=buffer.state(),
        finished=[
            (0, 1, _make_sample(11, 5, 6, 2), 0.1),
            (3, 0, _make_sample(4, 7, finished=False), -2.5),
        ],
        partial=[(3, 1, _make_sample(9, 8, 8, finished=False)), (1, 0, _make_sample(2, 3))],
    )


def _rewrite(file: Path, **changes: object) -> None:
    """Change entries of the file's header."""
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["megarl"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file(tensors, file, {"megarl": json.dumps(header | changes)})


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    saved = _make_saved()
    write_rollouts(tmp_path, saved)
    found = read_rollouts(tmp_path / ROLLOUT_FILE)
    assert (found.finished, found.partial) == (saved.finished, saved.partial)
    buffer: RolloutBuffer[Sample] = RolloutBuffer(
        BufferPolicy(batch_groups=2, group_size=2, max_staleness=1)
    )
    buffer.restore(found.state)
    assert buffer.missing() == [(prompt, sample) for prompt in range(4) for sample in range(2)]


def test_nothing_in_flight_is_a_file_too(tmp_path: Path) -> None:
    nothing = SavedRollouts(state={"groups": []}, finished=[], partial=[])
    write_rollouts(tmp_path, nothing)
    assert read_rollouts(tmp_path / ROLLOUT_FILE) == nothing


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, kept: int) -> None:
    write_rollouts(tmp_path, _make_saved())
    file = tmp_path / ROLLOUT_FILE
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=f"{file} holds no rollouts"):
        read_rollouts(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.safetensors holds no rollouts"):
        read_rollouts(tmp_path / "none.safetensors")


@pytest.mark.parametrize("header", [None, {"megarl": "{"}, {"other": "{}"}, {"megarl": "{}"}])
def test_a_foreign_file_is_named(tmp_path: Path, header: dict[str, str] | None) -> None:
    file = tmp_path / ROLLOUT_FILE
    save_file({"weight": torch.zeros(3)}, file, header)
    with pytest.raises(ConfigError, match=f"{file} holds no rollouts"):
        read_rollouts(file)


def test_another_format_is_named(tmp_path: Path) -> None:
    write_rollouts(tmp_path, _make_saved())
    file = tmp_path / ROLLOUT_FILE
    _rewrite(file, format=0)
    with pytest.raises(ConfigError, match=f"{file} has format 0, expected 1"):
        read_rollouts(file)


@pytest.mark.parametrize("changes", [{"finished": []}, {"partial": [[0, 0]] * 9}])
def test_a_file_whose_parts_do_not_fit_together_is_named(tmp_path: Path, changes: dict) -> None:
    write_rollouts(tmp_path, _make_saved())
    file = tmp_path / ROLLOUT_FILE
    _rewrite(file, **changes)
    with pytest.raises(ConfigError, match=f"{file} holds no rollouts"):
        read_rollouts(file)
