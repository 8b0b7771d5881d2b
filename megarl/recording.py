"""Recorded batches of a run folder: where they lie, under what settings they were made.

``batches/step_000012.safetensors`` is the batch of optimizer step 12 (`megarl.rollout.recorded`
writes and reads it); its header says what a replay must have alike. Called by both and by the checks
before a run, which look at headers only; imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megarl.config import RunConfig
from megarl.errors import ConfigError, DataError

_FORMAT = 1
# Of the trainer: how the numbers are computed, not which.
_NEUTRAL = ("layout", "distributed_optimizer", "max_tokens_per_micro_batch", "recompute")

Settings = Mapping[str, object]  # by dotted key


def batch_file(run_folder: Path, step: int) -> Path:
    return run_folder / "batches" / f"step_{step:06d}.safetensors"


def recorded_steps(run_folder: Path) -> list[int]:
    """Return the steps whose batches are there, in order."""
    files = batch_file(run_folder, 0).parent.glob("step_*.safetensors")
    return sorted(int(file.stem.removeprefix("step_")) for file in files)


def forget_after(run_folder: Path, step: int) -> None:
    """Remove the batches after ``step``, from which a run goes on."""
    for later in recorded_steps(run_folder):
        if later > step:
            batch_file(run_folder, later).unlink()


def settings(config: RunConfig, vocab_size: int) -> Settings:
    """Return what decides the losses of a recorded batch and must be alike in a replay.

    Not the model: it may have been moved, and the first batch shows whether it is another one.
    """
    kept = {
        "trainer": {k: v for k, v in asdict(config.trainer).items() if k not in _NEUTRAL},
        "algorithm": asdict(config.algorithm),
        "rollout": {key: getattr(config.rollout, key) for key in ("n", "temperature", "overlong")},
    }
    found = {f"{part}.{key}": value for part, held in kept.items() for key, value in held.items()}
    if config.trainer.lr_decay_style != "constant":
        found["max_steps"] = config.max_steps  # the decay ends there
    return {
        **found,
        "seed": config.seed,
        "max_staleness": config.staleness_bound,
        "data.train_batch_size": config.data.train_batch_size,
        "model.dtype": config.model.dtype,
        "the model's vocabulary": vocab_size,
    }


def to_header(step: int, made_under: Settings) -> dict[str, str]:
    """Return the file's metadata."""
    header = {"format": _FORMAT, "step": step, "settings": made_under}
    return {"megarl": json.dumps(header)}


def read_settings(run_folder: Path, step: int) -> Settings:
    """Return under what settings a batch was made.

    Raises:
        DataError: no such file, a damaged one, or one of another format.
    """
    file = batch_file(run_folder, step)
    if not file.is_file():
        raise DataError(f"{file} is missing: the batch of step {step} was not recorded")
    try:
        with safe_open(file, "np") as opened:  # the framework of tensors, of which none is read
            header = json.loads((opened.metadata() or {})["megarl"])
        found = (header["format"], header["step"])
        if found == (_FORMAT, step):
            return header["settings"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file} holds no batch that can be read: {error!r}") from error
    raise DataError(f"{file} has (format, step) = {found}, expected {(_FORMAT, step)}")


def check_recording(config: RunConfig, vocab_size: int) -> None:
    """Refuse a replay whose losses could not be those of the recorded run.

    Raises:
        ConfigError: no recording in ``replay_from``, or other settings that decide the losses.
        DataError: a step's batch is missing or cannot be read.
    """
    recorded = Path(config.replay_from)
    if not config.replay_from:
        raise ConfigError("replay_from is empty; expected the folder of a recorded run")
    if recorded.resolve() == config.folder.resolve():
        raise ConfigError(f"replay_from is this run's own folder {recorded}; give another name=")
    steps = recorded_steps(recorded)
    if not steps:
        raise ConfigError(
            f"replay_from: {recorded} holds no recorded batches; record a run with "
            "observe.record=true"
        )
    ours = settings(config, vocab_size)
    for step in range(1, config.max_steps + 1):
        if step not in steps:
            raise DataError(
                f"{batch_file(recorded, step)} is missing: the {len(steps)} batches of {recorded} are "
                f"of steps {steps[0]} to {steps[-1]}, max_steps is {config.max_steps}"
            )
        _require_alike(batch_file(recorded, step), read_settings(recorded, step), ours)


def _require_alike(file: Path, theirs: Settings, ours: Settings) -> None:
    absent = "nothing"
    others = [
        f"{key}: recorded {theirs.get(key, absent)}, here {ours.get(key, absent)}"
        for key in sorted({*theirs, *ours})
        if theirs.get(key, absent) != ours.get(key, absent)
    ]
    if others:
        raise ConfigError(
            f"{file} was recorded under other settings, which change the losses ({'; '.join(others)})"
        )
