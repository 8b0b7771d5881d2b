"""Owns the numbers of a run: metrics.jsonl and its readers, TensorBoard, W&B, summary.json.

The controller of rank 0 writes through `MetricsLog`; the launcher, reports and plots read the file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import uuid
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megarl.config import ObserveConfig
from megarl.errors import ConfigError, DataError
from megarl.observe.files import replacing

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
LAST_STEPS = 5  # a single batch is noisy: "last" in a summary is the mean of this many steps


class MetricsLog:
    """Writer of a run's metrics: open, `truncate` once when resuming, `write` each step, `close`.

    Metrics of a step are one line, whole on disk when `write` returns. A line torn by the death
    of an earlier process is removed on opening.
    """

    def __init__(
        self, folder: Path, observe: ObserveConfig, run_name: str, restarts: int | None = None
    ) -> None:
        """Open ``folder/metrics.jsonl`` for appending, and what ``observe`` asks for beside it.

        Where ``restarts`` is given, every line says that the job was started again so often.

        Raises:
            ConfigError: TensorBoard or W&B is asked for and not installed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._same = {} if restarts is None else {"perf/restarts": float(restarts)}
        self.path = folder / METRICS_FILE
        self._tensorboard = _open_tensorboard(folder, None) if observe.tensorboard else None
        self._wandb = (
            _open_wandb(folder, observe.wandb_project, run_name) if observe.wandb_project else None
        )
        _drop_torn_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one step; NaN and infinities, which JSON lacks, become null."""
        values = {name: float(value) for name, value in metrics.items()}
        values |= self._same
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log({"step": step, **values})

    def truncate(self, step: int) -> None:
        """Forget the steps after ``step``, from which a resumed run goes on."""
        kept = [row for row in read_metrics(self.path) if row["step"] <= step]
        self._file.close()
        with replacing(self.path) as text:
            text.writelines(json.dumps(row) + "\n" for row in kept)
        self._file = self.path.open("a", encoding="utf-8")
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = _open_tensorboard(self.path.parent, step + 1)

    def close(self) -> None:
        """Close the file and end the TensorBoard and W&B runs."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        whole = file.read().rfind(b"\n") + 1
        if whole < file.tell():
            logger.warning("%s: dropping a torn last line", path)
            file.truncate(whole)


def _open_tensorboard(folder: Path, purge_step: int | None) -> SummaryWriter:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"observe.tensorboard is true but TensorBoard cannot be imported ({error}): "
            "it is among megarl's requirements: pip install tensorboard"
        ) from error
    # purge_step hides the events that a resumed run writes again.
    return SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge_step)


def _open_wandb(folder: Path, project: str, run_name: str) -> Any:  # Any: wandb is optional
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"observe.wandb_project is {project!r} but W&B cannot be imported ({error}): "
            "pip install 'megarl[track]'"
        ) from error
    # The id, kept in the run folder, lets a resumed run go on in the same W&B run.
    id_file = folder / "wandb_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:8])
    run = wandb.init(
        project=project,
        name=run_name,
        id=id_file.read_text(),
        resume="allow",
        dir=str(folder),
    )
    # W&B's own counter never goes back, as a resumed run does; plot against our step instead.
    run.define_metric("*", step_metric="step")
    return run


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl; a last line without its end is not read.

    Raises:
        DataError: missing file or a malformed line (named by its number).
    """
    if not path.is_file():
        raise DataError(f"metrics file {path} does not exist")
    return MetricsTail(path).poll()


class MetricsTail:
    """Reads a growing metrics.jsonl; survives that it is not there yet or is rewritten.

    After a rewrite (`MetricsLog.truncate`) all rows of the new file come again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0
        self._offset = 0
        self._num_lines = 0

    def poll(self) -> list[dict]:
        """Return the rows that became complete since the last call.

        Raises:
            DataError: a malformed line.
        """
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self._num_lines = status.st_ino, 0, 0
            file.seek(self._offset)
            grown = file.read()
        whole = grown[: grown.rfind(b"\n") + 1]
        lines = whole.splitlines()
        rows = [
            _parse_row(line, self.path, self._num_lines + number)
            for number, line in enumerate(lines, start=1)
        ]
        self._offset += len(whole)
        self._num_lines += len(lines)
        return rows


def _parse_row(line: bytes, path: Path, number: int) -> dict:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number}: not a JSON object: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise DataError(f"{path}:{number}: expected an object with an integer 'step', got {row!r}")
    return row


def series(rows: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a finite value of metric ``name``, and these values."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def build_summary(rows: list[dict]) -> dict[str, float | None]:
    """Return a run in a few numbers; None where the run has no such metric.

    ``.._first`` is the first value, ``.._last`` the mean of the last 5; accuracies are the first
    and last evaluation. Weight-sync seconds and idle ratios are means without their first value,
    whose step fills the pipeline. ``steps`` is the last step.
    """
    reward = series(rows, "rollout/reward")[1]
    length = series(rows, "rollout/response_length_mean")[1]
    accuracy = series(rows, "val/accuracy")[1]
    summary = {
        "steps": rows[-1]["step"] if rows else 0,
        "rollout_reward_first": reward[0] if reward else None,
        "rollout_reward_last": _mean(reward[-LAST_STEPS:]),
        "response_length_first": length[0] if length else None,
        "response_length_last": _mean(length[-LAST_STEPS:]),
        "accuracy_before": accuracy[0] if accuracy else None,
        "accuracy_after": accuracy[-1] if accuracy else None,
        "weight_sync_seconds_mean": _mean(series(rows, "timing_s/update_weights")[1][1:]),
        "trainer_idle_ratio": _mean(series(rows, "trainer/idle_ratio")[1][1:]),
        "generator_idle_ratio": _mean(series(rows, "generator/idle_ratio")[1][1:]),
        "staleness_mean": _mean(series(rows, "staleness/mean")[1]),
    }
    sft_loss = series(rows, "sft/loss")[1]
    if sft_loss:
        summary |= {"sft_loss_first": sft_loss[0], "sft_loss_last": _mean(sft_loss[-LAST_STEPS:])}
    return summary


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def write_summary(path: Path, summary: dict) -> None:
    """Write ``summary`` as JSON; the file appears whole."""
    with replacing(path) as text:
        text.write(json.dumps(summary, indent=2) + "\n")
