"""Rollouts in flight as a file of a checkpoint: safetensors, the bookkeeping as JSON in its header.

Called by the reward executor when it saves and when a run resumes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.checkpoint import ROLLOUT_FILE
from megarl.errors import ConfigError
from megarl.rollout.engine import Sample
from megarl.rollout.messages import pack_samples, unpack_samples
from megarl.types import Report, field_names

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRollouts:
    """What was admitted and not trained on."""

    state: dict[str, Any]  # of the buffer
    finished: Sequence[tuple[int, int, Sample, float]]  # prompt, sample id, sample, reward
    partial: Sequence[tuple[int, int, Sample]]  # prompt, sample id, what it has so far


def write_rollouts(folder: Path, saved: SavedRollouts) -> None:
    """Write the file into a checkpoint's temporary folder."""
    samples = [row[2] for row in [*saved.finished, *saved.partial]]
    message = pack_samples(samples)
    header = {
        "format": _FORMAT,
        "state": saved.state,
        "finished": [(row[0], row[1], row[3]) for row in saved.finished],
        "partial": [row[:2] for row in saved.partial],
    }
    tensors = {name: getattr(message, name) for name in field_names(Report)}
    save_file(tensors, folder / ROLLOUT_FILE, {"megarl": json.dumps(header)})


def read_rollouts(file: Path) -> SavedRollouts:
    """Return what `write_rollouts` wrote.

    Raises:
        ConfigError: the file is damaged or of another format.
    """
    try:
        with safe_open(file, "pt") as opened:
            header = json.loads((opened.metadata() or {})["megarl"])
            tensors = {name: opened.get_tensor(name) for name in field_names(Report)}
        if header["format"] == _FORMAT:
            return _saved(header, unpack_samples(Report(**tensors)))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"{file} holds no rollouts that can be read: {error!r}") from error
    raise ConfigError(f"{file} has format {header['format']}, expected {_FORMAT}")


def _saved(header: dict[str, Any], samples: Sequence[Sample]) -> SavedRollouts:
    ended = len(header["finished"])
    return SavedRollouts(
        state=header["state"],
        finished=[
            (prompt_id, sample_id, sample, reward)
            for (prompt_id, sample_id, reward), sample in zip(
                header["finished"], samples[:ended], strict=True
            )
        ],
        partial=[
            (prompt_id, sample_id, sample)
            for (prompt_id, sample_id), sample in zip(
                header["partial"], samples[ended:], strict=True
            )
        ],
    )
