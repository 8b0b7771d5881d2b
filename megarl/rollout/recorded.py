"""A recorded batch as a file: the rollouts and rewards that the trainer was about to be given.

Written by the reward executor with observe.record, before it is spread over ranks; read by a replay.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megarl.errors import DataError
from megarl.recording import Settings, batch_file, to_header
from megarl.rollout.batch import Scored
from megarl.types import Rollouts, field_names

_REWARDS = "rewards"
_ROW_COLUMNS = ("prompt_ids", "sample_ids", "prompt_lengths", "finished")


def write_batch(run_folder: Path, step: int, scored: Scored, made_under: Settings) -> None:
    """Write the batch of optimizer step ``step``; the file appears whole."""
    file = batch_file(run_folder, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(scored.rollouts, name) for name in field_names(Rollouts)}
    temporary = file.with_suffix(".tmp")
    save_file({**tensors, _REWARDS: scored.rewards}, temporary, to_header(step, made_under))
    temporary.replace(file)


def read_batch(run_folder: Path, step: int) -> Scored:
    """Return what `write_batch` wrote.

    Raises:
        DataError: the file is missing or damaged.
    """
    file = batch_file(run_folder, step)
    try:
        tensors = load_file(file)
        rewards_B = tensors.pop(_REWARDS)
        rollouts = Rollouts(**tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file} holds no batch that can be read: {error!r}") from error
    per_row = {name: getattr(rollouts, name) for name in _ROW_COLUMNS} | {_REWARDS: rewards_B}
    for name, column in per_row.items():
        if column.shape != rollouts.lengths.shape:
            raise DataError(
                f"{file}: {name} has shape {tuple(column.shape)}, expected one entry for each of "
                f"{len(rollouts.lengths)} rows"
            )
    return Scored(rollouts=rollouts, rewards=rewards_B)
