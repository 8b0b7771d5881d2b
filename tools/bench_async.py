"""Asynchronous against synchronous training: ``python -m tools.bench_async [--json]``.

The same model, task, samples and processor cores in five ways: synchronous with trainer and generator
on the same ranks (both cores in both phases), synchronous on separate ranks (one core at a time), and
asynchronous with a staleness of at most 1, 2 and 4 versions. A random model ends a response with a
chance of about one in 32 at each token: lengths are long-tailed. Each way is a run of ``megarl train``;
the figures are those of its metrics.jsonl, without the first and the last steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from megarl.data.arithmetic import write_dataset
from megarl.observe.metrics import METRICS_FILE, read_metrics

_RUN_SECONDS = 600.0
FIRST_STEPS = 6  # not counted: pipelines fill, allocators and caches warm up
LAST_STEPS = 5  # not counted: the last versions' prompts are sampled already


class BenchmarkError(RuntimeError):
    """A run of the benchmark failed or did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run the same work."""

    name: str
    overrides: tuple[str, ...]


_COLOCATED = (
    "mode=sync",
    "placement=colocated",
    "trainer.layout.dp=2",
    "generator.layout.replicas=2",
)
WAYS = (
    Way(name="sync_colocated", overrides=_COLOCATED),
    Way(name="sync_separate", overrides=("mode=sync",)),
    *(
        Way(name=f"async_{bound}", overrides=("mode=async", f"max_staleness={bound}"))
        for bound in (1, 2, 4)
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says."""

    ways: tuple[str, ...]
    steps: int = 26
    prompts: int = 16  # a batch
    samples: int = 8  # a prompt
    max_length: int = 200
    hidden_size: int = 128
    num_layers: int = 8
    slots: int = 96  # responses decoded together
    overrides: tuple[str, ...] = ()
    keep: Path | None = None  # where run folders stay


# --- The work -----------------------------------------------------------------------------------


def write_model(folder: Path, settings: Settings) -> None:
    """Write a random Llama whose responses end at any token with about the same chance."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from megarl.data.tokenizer import build_character_tokenizer

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.hidden_size // 32,
        num_key_value_heads=max(1, settings.hidden_size // 64),
        head_dim=32,
        max_position_embeddings=16 + settings.max_length,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    build_character_tokenizer().save_pretrained(folder)


def run_config(folder: Path, settings: Settings) -> dict[str, Any]:
    """Return what all ways have in common."""
    return {
        "run_dir": str(settings.keep or folder),
        "max_steps": settings.steps,
        "model": {"path": str(folder / "model")},
        "trainer": {
            "layout": {"vocab_divisor": 16},
            "lr": 1e-5,
            "max_tokens_per_micro_batch": 4096,
        },
        "generator": {"max_running_sequences": settings.slots, "kv_cache_gib": 0.25},
        "rollout": {
            "n": settings.samples,
            "max_response_length": settings.max_length,
            "partial_kv": "keep",
        },
        "data": {
            "train_path": str(folder / "data" / "train.jsonl"),
            "train_batch_size": settings.prompts,
            "max_prompt_length": 16,
        },
        # A reference model makes both sides' work about equal.
        "algorithm": {"kl_loss_coef": 0.01},
        "reward": {"path": "megarl.rewards.arithmetic:score"},
        "checkpoint": {"export_hf": False},
        "fault": {"timeout_seconds": 120},
    }


def write_work(folder: Path, settings: Settings) -> Path:
    """Write data, model and configuration; return the latter's file."""
    write_dataset(folder / "data", 0, 4096, num_eval=1, sft_worked=0, sft_mixed=0)
    write_model(folder / "model", settings)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(run_config(folder, settings)))
    return config


def run_way(way: Way, config: Path, settings: Settings) -> list[dict[str, Any]]:
    """Run one way; return the rows of its training steps.

    Raises:
        BenchmarkError: it failed.
    """
    command = [sys.executable, "-m", "megarl.cli", "train", str(config), f"name={way.name}"]
    done = subprocess.run(
        [*command, *way.overrides, *settings.overrides],
        capture_output=True,
        text=True,
        timeout=_RUN_SECONDS,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"{way.name} failed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    folder = Path(yaml.safe_load(config.read_text())["run_dir"]) / way.name
    rows = read_metrics(folder / METRICS_FILE)
    return [row for row in rows if "actor/loss" in row]


# --- Figures ------------------------------------------------------------------------------------


def figures(rows: Sequence[Mapping[str, Any]], samples_per_step: int) -> dict[str, float]:
    """Return one way's figures over its counted steps; means weigh each step by its seconds."""
    counted = rows[FIRST_STEPS:-LAST_STEPS]
    seconds = [row["timing_s/step"] for row in counted]
    total = sum(seconds)

    def share(name: str) -> float:
        return sum(row[name] * second for row, second in zip(counted, seconds, strict=True)) / total

    return {
        "samples_per_second": samples_per_step * len(counted) / total,
        "tokens_per_second": sum(row["perf/total_tokens"] for row in counted) / total,
        "step_seconds": total / len(counted),
        "trainer_idle_ratio": share("trainer/idle_ratio"),
        "generator_idle_ratio": share("generator/idle_ratio"),
        "train_seconds": sum(row["timing_s/update_actor"] for row in counted) / len(counted),
        "generate_seconds": sum(row["timing_s/gen"] for row in counted) / len(counted),
        "sync_seconds": sum(row["timing_s/sync"] for row in counted) / len(counted),
        "staleness_mean": sum(row["staleness/mean"] for row in counted) / len(counted),
        "staleness_max": max(row["staleness/max"] for row in counted),
        "response_length_mean": sum(r["rollout/response_length_mean"] for r in counted)
        / len(counted),
        "response_length_max": max(row["rollout/response_length_max"] for row in counted),
    }


def measure(settings: Settings) -> dict[str, Any]:
    """Run all ways one after another and compare them."""
    with tempfile.TemporaryDirectory() as name:
        config = write_work(Path(name), settings)
        modes = {
            way.name: figures(run_way(way, config, settings), settings.prompts * settings.samples)
            for way in WAYS
            if way.name in settings.ways
        }
    return {**compare(modes), "modes": modes}


def compare(modes: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the ratios of the fastest asynchronous way to the synchronous ones."""
    bounds = [name for name in modes if name.startswith("async")]
    if not bounds:
        return {}
    best = max(bounds, key=lambda name: modes[name]["samples_per_second"])
    speed = modes[best]["samples_per_second"]
    ratios = {
        f"speedup_over_{name}": speed / modes[name]["samples_per_second"]
        for name in ("sync_separate", "sync_colocated")
        if name in modes
    }
    idle = {name: modes[best][name] for name in ("trainer_idle_ratio", "generator_idle_ratio")}
    return {"best": best, **ratios, **idle}


def _table(result: Mapping[str, Any]) -> Table:
    table = Table(title="One step of the same work")
    columns = (
        "samples_per_second",
        "step_seconds",
        "train_seconds",
        "generate_seconds",
        "trainer_idle_ratio",
        "generator_idle_ratio",
        "staleness_mean",
    )
    for column in ("mode", *columns):
        table.add_column(column.replace("_", " "), justify="right" if column != "mode" else "left")
    for name, row in result["modes"].items():
        table.add_row(name, *(f"{row[column]:.3g}" for column in columns))
    return table


# --- Command line -------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_async", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    names = [way.name for way in WAYS]
    parser.add_argument("--ways", nargs="+", choices=names, default=names, metavar="NAME")
    for name in ("steps", "prompts", "samples", "max_length", "hidden_size", "num_layers", "slots"):
        default = Settings.__dataclass_fields__[name].default
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--keep", type=Path, help="folder in which the run folders stay")
    parser.add_argument("--write", type=Path, help="only write model, data and config.yaml there")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    said = parser.parse_args(argv)
    if said.steps <= FIRST_STEPS + LAST_STEPS:
        parser.error(
            f"--steps is {said.steps}, expected more than {FIRST_STEPS + LAST_STEPS}: "
            f"the first {FIRST_STEPS} and the last {LAST_STEPS} do not count"
        )
    values = {name: getattr(said, name) for name in Settings.__dataclass_fields__}
    settings = Settings(**{**values, "ways": tuple(said.ways), "overrides": tuple(said.overrides)})
    if said.write:
        Console().print(str(write_work(said.write, settings)), soft_wrap=True)
        return
    result = measure(settings)
    if said.json:
        print(json.dumps(result, indent=1))
        return
    console = Console()
    console.print(_table(result))
    for name, value in result.items():
        if name.startswith("speedup"):
            console.print(f"{name.replace('_', ' ')}: {value:.2f}")


if __name__ == "__main__":
    main()
