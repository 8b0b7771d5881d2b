"""Training checkpoints on disk: where they lie, which is the newest, what they say of the run.

A checkpoint is the folder ``checkpoints/step_000100``: ``trainer/`` (Megatron torch_dist),
``rollouts.safetensors`` and ``state.json``. It is written as ``step_000100.tmp`` and renamed when
complete; the file ``latest`` then names it. So a kill at any moment leaves the last complete one.
Called by the trainer and the reward executor (write) and by `megarl.train` (find).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.config import Resume, RunConfig
from megarl.errors import ConfigError
from megarl.observe.files import replacing

_STATE, _LATEST = "state.json", "latest"
ROLLOUT_FILE = "rollouts.safetensors"  # in a checkpoint: what was sampled and not trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a resumed run must know beside the trainer's tensors.

    ``consumed_prompts`` have been trained on; which, and what is in flight, the rollouts' file says.
    """

    step: int  # batches trained on = policy version
    consumed_prompts: int
    seed: int
    n: int = 0  # samples of a prompt; 0: none are in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Where a run begins."""

    step: int = 0
    trainer_folder: Path | None = None  # torch_dist folder to load; None: from the HF model
    rollout_file: Path | None = None  # rollouts in flight; None: none were


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step_{step:06d}"


def begun_folder(run_folder: Path, step: int) -> Path:
    """Return the temporary folder of a checkpoint that is being written."""
    return checkpoint_folder(run_folder, step).with_suffix(".tmp")


def save_due(config: RunConfig, version: int, last_saved: int, *, stopping: bool) -> bool:
    """Whether ``version`` must be saved: each save_freq-th, the last, and before a stop."""
    freq = config.checkpoint.save_freq
    due = version == config.max_steps or stopping or (freq > 0 and version % freq == 0)
    return due and version != last_saved


def begin(run_folder: Path, step: int) -> Path:
    """Make and return an empty temporary folder for step ``step``; one rank calls it."""
    folder = begun_folder(run_folder, step)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "trainer").mkdir(parents=True)
    return folder


def commit(run_folder: Path, state: RunState) -> Path:
    """Give the temporary folder its name and point ``latest`` to it; one rank calls it.

    Call after all ranks have written and synchronised.
    """
    final = checkpoint_folder(run_folder, state.step)
    temporary = begun_folder(run_folder, state.step)
    with replacing(temporary / _STATE) as text:
        json.dump(asdict(state), text, indent=1)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    with replacing(final.parent / _LATEST) as text:
        text.write(final.name)
    return final


def prune(run_folder: Path, keep_last: int, best: Collection[int]) -> list[int]:
    """Remove all checkpoints but the newest ``keep_last`` and the steps in ``best``; say which.

    One that is being removed has no name of a checkpoint any more.
    """
    parent = checkpoint_folder(run_folder, 0).parent
    steps = sorted(
        int(path.name.removeprefix("step_")) for path in parent.glob("step_*") if not path.suffix
    )
    gone = [step for step in steps[: max(0, len(steps) - keep_last)] if step not in best]
    for step in gone:
        leaving = checkpoint_folder(run_folder, step).with_suffix(".old")
        shutil.rmtree(leaving, ignore_errors=True)
        checkpoint_folder(run_folder, step).rename(leaving)
        shutil.rmtree(leaving)
    return gone


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
    if state.n and state.n != config.rollout.n:
        raise ConfigError(
            f"{folder} holds prompts with {state.n} samples each, rollout.n is {config.rollout.n}"
        )
    if state.step > config.max_steps:
        raise ConfigError(f"{folder} is at step {state.step}, max_steps is {config.max_steps}")
    rollouts = folder / ROLLOUT_FILE
    return StartPoint(
        step=state.step,
        trainer_folder=folder / "trainer",
        rollout_file=rollouts if rollouts.is_file() else None,
    )
