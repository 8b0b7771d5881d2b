"""Training checkpoints on disk: where they lie, which is the newest, what they say of the run.

A checkpoint is the folder ``checkpoints/step_000100``: ``trainer/`` (Megatron torch_dist) and
``state.json``. It is written as ``step_000100.tmp`` and renamed when complete; the file ``latest``
then names it. So a kill at any moment leaves the last complete one. Called by the trainer (write)
and by `megarl.train` (find).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.config import Resume, RunConfig
from megarl.errors import ConfigError
from megarl.observe.files import replacing

_STATE, _LATEST = "state.json", "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a resumed run must know beside the trainer's tensors.

    The data position is ``consumed_prompts`` of the stream that (seed, files) define: everything
    sampled but not yet trained on is sampled again.
    """

    step: int  # optimizer steps = policy version
    consumed_prompts: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Where a run begins."""

    step: int = 0
    trainer_folder: Path | None = None  # torch_dist folder to load; None: from the HF model


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step_{step:06d}"


def begin(run_folder: Path, step: int) -> Path:
    """Make and return an empty temporary folder for step ``step``; one rank calls it."""
    folder = checkpoint_folder(run_folder, step).with_suffix(".tmp")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "trainer").mkdir(parents=True)
    return folder


def commit(run_folder: Path, state: RunState) -> Path:
    """Give the temporary folder its name and point ``latest`` to it; one rank calls it.

    Call after all ranks have written and synchronised.
    """
    final = checkpoint_folder(run_folder, state.step)
    temporary = final.with_suffix(".tmp")
    with replacing(temporary / _STATE) as text:
        json.dump(asdict(state), text, indent=1)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    with replacing(final.parent / _LATEST) as text:
        text.write(final.name)
    return final


def find_start(config: RunConfig) -> StartPoint:
    """Return where the run begins under ``resume``.

    Raises:
        ConfigError: the checkpoint was made with another seed or batch size (its data position
            would mean other prompts), is damaged, or lies beyond ``max_steps``.
    """
    latest = config.folder / "checkpoints" / _LATEST
    if config.resume is Resume.NEVER or not latest.is_file():
        return StartPoint()
    folder = latest.parent / latest.read_text().strip()
    try:
        state = RunState(**json.loads((folder / _STATE).read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{latest} names {folder.name}, which is not complete: {error}"
        ) from error
    if state.seed != config.seed:
        raise ConfigError(f"{folder} was made with seed {state.seed}, this run has {config.seed}")
    if state.consumed_prompts != state.step * config.data.train_batch_size:
        raise ConfigError(
            f"{folder} has consumed {state.consumed_prompts} prompts in {state.step} steps; with "
            f"data.train_batch_size={config.data.train_batch_size} its data position is not at a batch"
        )
    if state.step > config.max_steps:
        raise ConfigError(f"{folder} is at step {state.step}, max_steps is {config.max_steps}")
    return StartPoint(step=state.step, trainer_folder=folder / "trainer")
