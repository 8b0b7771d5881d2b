"""Compare simulated runs with real ones: ``python -m tools.check_simulator RUN... --curves FILE...``.

Each RUN is a run folder; of the curves of `tools.measure_curves` those of its layout are taken. Nothing
that is predicted was measured in the run. The exit code is 1 where a prediction is outside the bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.curves import Curves, load_curves, pipeline_of
from launch.simulate import simulate, steady
from megarl.config import RunConfig
from megarl.config_file import load_config
from megarl.errors import ConfigError
from megarl.observe.metrics import METRICS_FILE, read_metrics
from tools.bench_async import FIRST_STEPS, LAST_STEPS, figures

STEP_BOUND, IDLE_BOUND = 0.15, 0.05
_COMPARED = ("step_seconds", "trainer_idle_ratio", "generator_idle_ratio", "train_seconds")
_SEEDS = 20  # runs with drawn lengths, whose mean is the prediction


def predict(config: RunConfig, curves: Curves, *, known_lengths: bool) -> dict[str, float]:
    """Return the figures of a run of ``config``, over the steps that count in the benchmark."""
    pipeline = pipeline_of(curves, config, known_lengths=known_lengths)
    found = [
        steady(simulate(pipeline, config.max_steps, seed), last=LAST_STEPS, first=FIRST_STEPS)
        for seed in range(1 if known_lengths else _SEEDS)
    ]
    names = (*_COMPARED, "staleness_mean")
    return {name: sum(getattr(step, name) for step in found) / len(found) for name in names}


def measured(folder: Path, config: RunConfig) -> dict[str, float]:
    rows = [row for row in read_metrics(folder / METRICS_FILE) if "actor/loss" in row]
    return figures(rows, config.data.train_batch_size * config.rollout.n)


def compare(found: Mapping[str, float], expected: Mapping[str, float]) -> dict[str, Any]:
    """Return predictions beside measurements, and whether they are within the bounds."""
    error = found["step_seconds"] / expected["step_seconds"] - 1
    idle = {
        name: found[name] - expected[name]
        for name in ("trainer_idle_ratio", "generator_idle_ratio")
    }
    return {
        "predicted": dict(found),
        "measured": {name: expected[name] for name in found},
        "step_error": error,
        "idle_errors": idle,
        "within": abs(error) <= STEP_BOUND and max(map(abs, idle.values())) <= IDLE_BOUND,
    }


def _curves_of(config: RunConfig, all_curves: Sequence[Curves]) -> Curves:
    for curves in all_curves:
        layout = config.trainer.layout.world_size, config.generator.layout.replicas
        if curves.colocated == config.is_colocated and (
            layout == (curves.trainer_ranks, curves.replicas)
        ):
            return curves
    raise ConfigError(f"no curves were given of the layout of {config.name}")


def _table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("run", title="predicted / measured")
    for name in (*_COMPARED, "staleness_mean", "step error"):
        table.add_column(name.replace("_", " "), justify="right")
    for run, row in rows.items():
        pairs = [(row["predicted"][n], row["measured"][n]) for n in row["predicted"]]
        cells = [f"{found:.3g} / {expected:.3g}" for found, expected in pairs]
        table.add_row(run, *cells, f"{row['step_error']:+.1%}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.check_simulator", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--curves", nargs="+", type=Path, required=True)
    parser.add_argument(
        "--known-lengths",
        action="store_true",
        help="responses are as long as the measurement's first ones, not drawn from them",
    )
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    asked = parser.parse_args(argv)
    all_curves = [load_curves(file) for file in asked.curves]
    rows: dict[str, dict[str, Any]] = {}
    for folder in asked.runs:
        config = load_config(folder / "config.yaml")
        found = predict(config, _curves_of(config, all_curves), known_lengths=asked.known_lengths)
        rows[config.name] = compare(found, measured(folder, config))
    if asked.json:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(_table(rows))
    return 0 if all(row["within"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
