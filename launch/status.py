"""``megarl status RUN``: how far a run is, whether it runs, how often it started and why it last ended.

Called by the command line. Reads the run folder alone, and asks Slurm about the run's newest job.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from rich.console import Console

from megarl.config_file import load_config
from megarl.errors import DataError
from megarl.observe.metrics import METRICS_FILE, read_metrics, series

ATTEMPTS_FILE = "attempts.jsonl"
_ACCOUNTS = "failure*.txt"  # the launcher's, and those of ranks that had no launcher of ours
_STAMP = re.compile(r"^(?=\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$)", re.MULTILINE)
_AGAIN = "starting again from "
_RECENT_STEPS = 5
_SQUEUE_SECONDS = 20.0
_FINISHED, _ENDED, _UNKNOWN = "finished", "ended", "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run in a few lines; None where its folder does not say."""

    name: str
    state: str  # Slurm's word for the job, in small letters; finished, ended or not known
    step: int
    max_steps: int
    tokens_per_second: float | None  # means of the last steps
    samples_per_second: float | None
    step_seconds: float | None
    reward: float | None
    checkpoint: str
    last_row_seconds: float | None  # since the last metrics came
    job: str
    starts: int | None  # of the run's job, the first one included; None: no job of Slurm's
    restarts: int  # by itself
    hosts: tuple[str, ...]  # of the newest start, spares included; once it has ended, those it used
    bad_hosts: tuple[str, ...]
    last_error: str


def run_status(folder: Path, states: Mapping[str, str], now: float) -> RunStatus:
    """Read a run folder; ``states`` are Slurm's words for the jobs that it still knows.

    Raises:
        DataError: no run, or a malformed file.
        ConfigError: its configuration is not this version's.
    """
    if not (folder / "config.yaml").is_file():
        raise DataError(f"{folder} is no run folder: it has no config.yaml")
    config = load_config(folder / "config.yaml", ())
    metrics = folder / METRICS_FILE
    rows = [row for row in read_metrics(metrics) if _is_step(row)] if metrics.is_file() else []
    attempts = _attempts(folder / ATTEMPTS_FILE)
    starts = [attempt for attempt in attempts if attempt["event"] == "start"]
    job = attempts[-1]["job"] if attempts else ""
    step = max((row["step"] for row in rows), default=0)
    recent = rows[-_RECENT_STEPS:]
    seconds = _mean(recent, "timing_s/step")
    samples = config.data.train_batch_size * (config.rollout.n if _is_rl(rows) else 1)
    failures = _failures(folder)
    return RunStatus(
        name=config.name,
        state=_state(step >= config.max_steps, attempts, states),
        step=step,
        max_steps=config.max_steps,
        tokens_per_second=_mean(recent, "perf/tokens_per_second"),
        samples_per_second=samples / seconds if seconds else None,
        step_seconds=seconds,
        reward=_mean(recent, "rollout/reward"),
        checkpoint=_first_line(folder / "checkpoints" / "latest"),
        last_row_seconds=now - metrics.stat().st_mtime if rows else None,
        job=job,
        starts=len(starts) if attempts else None,
        restarts=_job_restarts(starts) if attempts else _local_restarts(failures),
        hosts=tuple(attempts[-1].get("hosts", ())) if attempts else (),
        bad_hosts=_bad_hosts(folder, attempts),
        last_error=_last_error(failures, attempts),
    )


def _is_step(row: Mapping[str, object]) -> bool:
    """Whether a row of metrics is a training step's, not an evaluation's."""
    return "timing_s/step" in row or "actor/loss" in row or "sft/loss" in row


def _is_rl(rows: Sequence[Mapping[str, object]]) -> bool:
    return not any("sft/loss" in row for row in rows)


def _mean(rows: list[dict], name: str) -> float | None:
    values = series(rows, name)[1]
    return fmean(values) if values else None


def _attempts(path: Path) -> list[dict]:
    """Return the starts and ends of the run's jobs, in order; a last line without its end is not read."""
    if not path.is_file():
        return []
    found: list[dict] = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a JSON object: {error}") from error
        if not {"job", "event"} <= found[-1].keys():
            raise DataError(f"{path}:{number}: expected the keys job and event, got {line.strip()}")
    return found


def _state(complete: bool, attempts: Sequence[Mapping], states: Mapping[str, str]) -> str:
    known = states.get(attempts[-1]["job"], "") if attempts else ""
    if known:
        return known.lower()
    if complete:
        return _FINISHED
    return _ENDED if attempts and attempts[-1]["event"] == "end" else _UNKNOWN


def _job_restarts(starts: Sequence[Mapping]) -> int:
    """Return how often jobs came back by themselves; a submission is no restart."""
    return sum(int(start.get("restart", 0)) > 0 for start in starts)


def _local_restarts(failures: Sequence[str]) -> int:
    return sum(_AGAIN in failure for failure in failures)


def _failures(folder: Path) -> list[str]:
    """Return the accounts of failures, oldest first; each begins with its time."""
    texts = (path.read_text(errors="replace") for path in folder.glob(_ACCOUNTS))
    return sorted(part.strip() for text in texts for part in _STAMP.split(text) if part.strip())


def _last_error(failures: Sequence[str], attempts: Sequence[Mapping]) -> str:
    """Return when and why the run last failed, in a line; empty where it never did."""
    told = [failure.splitlines()[:2] for failure in failures]
    told = [lines for lines in told if not any(_AGAIN in line for line in lines)]
    if told:
        return ": ".join(told[-1])
    codes = [attempt for attempt in attempts if attempt["event"] == "end" and attempt.get("code")]
    return f"job {codes[-1]['job']} ended with code {codes[-1]['code']}" if codes else ""


def _bad_hosts(folder: Path, attempts: Sequence[Mapping]) -> tuple[str, ...]:
    path = folder / "bad_nodes"
    lines = path.read_text().splitlines() if path.is_file() else []
    named = [line.partition("\t")[0] for line in lines if line.strip()]
    left_out = attempts[-1].get("bad", ()) if attempts else ()
    return tuple(dict.fromkeys([*named, *left_out]))


def _first_line(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def slurm_states(job: str) -> dict[str, str]:
    """Return Slurm's word for ``job``; nothing where it is forgotten or there is no Slurm."""
    command = ("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%i %T")
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_SQUEUE_SECONDS, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return {}
    lines = (line.split() for line in result.stdout.splitlines())
    return {words[0]: words[1] for words in lines if len(words) == 2}


def lines(status: RunStatus) -> list[str]:
    """Return the status for a person."""
    pace = [
        _shown(status.step_seconds, "{:.3g} s a step"),
        _shown(status.tokens_per_second, "{:,.0f} tokens/s"),
        _shown(status.samples_per_second, "{:.3g} samples/s"),
        _shown(status.reward, "reward {:.3f}"),
    ]
    age = status.last_row_seconds
    rows = (
        ("state", f"{status.state}{f', job {status.job}' if status.job else ''}"),
        ("step", f"{status.step} of {status.max_steps}"),
        ("pace", ", ".join(part for part in pace if part) or "no step yet"),
        ("last metrics", f"{timedelta(seconds=round(age))} ago" if age is not None else "none"),
        ("checkpoint", status.checkpoint or "none"),
        ("restarts", str(status.restarts)),
        ("hosts", " ".join(status.hosts)),
        ("bad hosts", " ".join(status.bad_hosts)),
        ("last error", status.last_error or "none"),
    )
    return [f"{name:>12}  {value}" for name, value in rows if value]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def main(arguments: Sequence[str], console: Console) -> int:
    """Show a run's status."""
    parser = argparse.ArgumentParser(prog="megarl status", description="Say how far a run is.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--json", action="store_true", help="say it as JSON")
    given = parser.parse_args(arguments)
    attempts = _attempts(given.run / ATTEMPTS_FILE)
    states = slurm_states(attempts[-1]["job"]) if attempts else {}
    status = run_status(given.run, states, time.time())
    if given.json:
        console.file.write(json.dumps(asdict(status), indent=2) + "\n")
        return 0
    for line in (status.name, *lines(status)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0
