"""Measure what training and decoding cost here: ``python -m tools.measure_curves CONFIG --output FILE``.

Starts the ranks that a run of CONFIG would have on this machine, both engines with their real
executors and channels, and measures them apart and at once: a decoding step's seconds by running
sequences and held tokens, training's by the batch's lengths, sampling's of the first prompts, scoring's
by samples, those of a tick around both, and how long responses are. No step of a run is measured. The file is what ``megarl advise
--curves`` and ``tools.check_simulator`` read.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.curves import (
    Curves,
    DecodeCase,
    Rates,
    TrainCase,
    eta_generate,
    eta_train,
    slow_down,
    write_curves,
)
from launch.ranks import common_environment
from megarl.check import Command, topology_of
from megarl.config_file import load_config
from megarl.observe.metrics import METRICS_FILE, read_metrics

_TICKS, _FIRST_TICKS = 16, 4
_TIMEOUT_SECONDS = 540.0


class MeasurementError(RuntimeError):
    """A rank failed or did not end in time."""


# --- Running ------------------------------------------------------------------------------------


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        env=common_environment(),
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise MeasurementError(
            f"{shlex.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


def _measure_engines(asked: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run all ranks; return what each wrote, by phase."""
    config = load_config(asked.config, tuple(asked.overrides))
    ranks = topology_of(Command.TRAIN, config).size
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    rank = ["tools.curve_rank", folder, asked.seconds, asked.batches, asked.tokens, asked.config]
    _run([*launcher, *map(str, rank), *asked.overrides])
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        found.setdefault(file.name.partition(".")[0], []).append(json.loads(file.read_text()))
    return found


def _measure_ticks(asked: argparse.Namespace, folder: Path) -> float:
    """Return the seconds of a tick around training and decoding: of a run that has next to none,
    each replica as much as the others.
    """
    config = load_config(asked.config, tuple(asked.overrides))
    small = (
        f"run_dir={folder}",
        "name=ticks",
        "mode=sync",
        f"data.train_batch_size={config.generator.layout.replicas}",
        "rollout.n=2",
        "rollout.max_response_length=1",
        f"max_steps={_TICKS}",
        "resume=never",
        "checkpoint.save_freq=0",
        "checkpoint.export_hf=false",
    )
    _run(["megarl.cli", "train", str(asked.config), *asked.overrides, *small])
    rows = [row for row in read_metrics(folder / "ticks" / METRICS_FILE) if "actor/loss" in row]
    return _mean(
        [
            row["timing_s/step"] - row["timing_s/update_actor"] - row["timing_s/gen"]
            for row in rows[_FIRST_TICKS:]
        ]
    )


# --- Putting together -----------------------------------------------------------------------------


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def slowest(trainers: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[TrainCase, ...]:
    """Return the cases that the trainer's ranks measured, of each batch that of the slowest."""
    return tuple(
        max((TrainCase(**case) for case in cases), key=lambda case: case.seconds)
        for cases in zip(*trainers, strict=True)
    )


def rates(
    decoders: Sequence[Mapping[str, Any]], trainers: Sequence[Sequence[Mapping[str, Any]]]
) -> Rates:
    """Return what ranks measured alone: means over replicas, the slowest of the trainer's ranks."""
    decode = [DecodeCase(**case) for found in decoders for case in found["decode"]]
    prefill = _mean([found["prefill_token_seconds"] for found in decoders])
    return Rates(decode=tuple(decode), train=slowest(trainers), prefill_token_seconds=prefill)


def sampling(phase: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of sampling the first prompts once, of the replica that took longest."""
    rounds = next(found["rounds"] for found in phase if "rounds" in found)
    return max(found["seconds"] for found in phase if "seconds" in found) / rounds


def provenance(asked: argparse.Namespace) -> dict[str, Any]:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "device": gpu or ", ".join(sorted(models)) or platform.processor(),
        "cores": len([line for line in lines if line.startswith("processor")]),
        "config": str(asked.config),
        "overrides": list(asked.overrides),
        "seconds": asked.seconds,
        **{name: version(name) for name in ("torch", "megatron-core")},
    }


def measure(asked: argparse.Namespace) -> Curves:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        phases = _measure_engines(asked, folder)
        tick_seconds = _measure_ticks(asked, folder)
    config = load_config(asked.config, tuple(asked.overrides))
    (orders,) = phases["orders"]
    decoders = [found for found in phases["decode"] if "decode" in found]
    beside = "beside" in phases
    return Curves(
        provenance=provenance(asked),
        alone=rates(decoders, [found["alone"] for found in phases["train"]]),
        train_beside=slowest([found["beside"] for found in phases["train"]]) if beside else (),
        dp=config.trainer.layout.dp,
        replicas=config.generator.layout.replicas,
        trainer_ranks=config.trainer.layout.world_size,
        generator_ranks=config.generator.layout.world_size,
        sampling_seconds=_mean([sampling(phases[name]) for name in ("before", "after")]),
        sampling_beside_seconds=sampling(phases["beside"]) if beside else 0.0,
        tick_seconds=tick_seconds,
        reward_sample_seconds=orders["reward_sample_seconds"],
        prompt_length=orders["prompt_length"],
        group_size=config.rollout.n,
        lengths=tuple(orders["lengths"]),
    )


def _table(title: str, size: str, eta: Sequence[tuple[int, float]]) -> Table:
    table = Table(size, "seconds", title=title)
    for number, seconds in eta:
        table.add_row(str(number), f"{seconds:.3g}")
    return table


# --- Command line -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.measure_curves", description=__doc__)
    parser.add_argument("config", type=Path, help="YAML file of a run")
    parser.add_argument("overrides", nargs="*", help="dotted overrides: trainer.layout.dp=2")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the curves")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each phase")
    parser.add_argument("--batches", type=int, default=4, help="sampled, for their lengths")
    parser.add_argument(
        "--tokens", type=int, default=256, help="longest response of a decoding case"
    )
    asked = parser.parse_intermixed_args(argv)
    curves = measure(asked)
    write_curves(curves, asked.output)
    console = Console()
    train, decode = eta_train(curves.alone), eta_generate(curves.alone)
    console.print(_table("η_t: training, for a sequence", "batch", train))
    console.print(_table("η_g: decoding, for a token", "together", decode))
    train_slower, decode_slower = slow_down(curves)
    console.print(
        f"beside one another training takes {train_slower:.2f}, decoding {decode_slower:.2f} times as long"
    )
    console.print(
        f"{1e3 * curves.tick_seconds:.3g} ms a tick around both, "
        f"{1e3 * curves.reward_sample_seconds:.3g} ms a score, "
        f"{_mean(curves.lengths):.3g} tokens a response"
    )


if __name__ == "__main__":
    main()
