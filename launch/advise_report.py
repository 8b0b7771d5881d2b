"""``megarl advise``: the settings that are asked for, and what is advised, as tables or as JSON.

Without ``--model`` it advises on the three settings of the LlamaRL paper (section 8), beside the
speed-ups that the paper measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.advise import Advice, Proposal, Setting, advise
from launch.advise_measured import Division, divisions
from launch.curves import load_curves, measured_pipeline
from launch.engine_costs import Workload
from launch.lengths import Lengths
from launch.site import load_site
from megarl.errors import ConfigError
from megatron_bridge.models.released import load_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One model on so many GPUs, and what the paper measured there."""

    model: Path
    num_gpus: int
    paper_speedup: float | None = None


SHOWN = 5
_MODELS = Path("configs/models")
PAPER = (
    _Asked(model=_MODELS / "llama3.1_8b.yaml", num_gpus=256, paper_speedup=2.52),
    _Asked(model=_MODELS / "llama3.1_70b.yaml", num_gpus=256, paper_speedup=3.98),
    _Asked(model=_MODELS / "llama3.1_405b.yaml", num_gpus=1024, paper_speedup=10.7),
)


def proposal_row(found: Proposal) -> dict[str, Any]:
    """Return a layout and what it does, as plain values."""
    return {
        "trainer": asdict(found.layout.trainer),
        "generator": asdict(found.layout.generator),
        "trainer_share": found.layout.trainer_share,
        "step_seconds": found.simulated.step_seconds,
        "formula_seconds": found.layout.step_seconds,
        "sync_seconds": found.layout.sync_seconds,
        "trainer_idle_ratio": found.simulated.trainer_idle_ratio,
        "generator_idle_ratio": found.simulated.generator_idle_ratio,
        "staleness_mean": found.simulated.staleness_mean,
    }


def row(advice: Advice, paper_speedup: float | None) -> dict[str, Any]:
    """Return an advice as plain values; seconds are of a step, asynchronous ones simulated."""
    proposals = [proposal_row(found) for found in advice.proposals]
    return {
        "model": advice.setting.model,
        "num_gpus": advice.setting.num_gpus,
        "predicted_speedup": advice.speedup,
        "paper_speedup": paper_speedup,
        "theorem_speedup": advice.theorem_speedup,
        "synchronous": {
            "trainer": asdict(advice.synchronous.trainer),
            "generator": asdict(advice.synchronous.generator),
            "step_seconds": advice.synchronous.step_seconds,
        },
        "asynchronous": proposals,
    }


def _engine(plan: dict[str, Any]) -> str:
    copies = plan.get("dp") or plan.get("replicas")
    fp8 = " FP8" if plan.get("weight_bytes") == 1 else ""
    batch = plan.get("micro_batch") or plan.get("slots")
    return f"tp {plan['tp']} pp {plan['pp']} x {copies}, b {batch}{fp8}, {plan['nbytes'] / 2**30:.0f} GiB"


def _table(found: dict[str, Any]) -> Table:
    title = f"{found['model']} on {found['num_gpus']} GPUs: {found['predicted_speedup']:.2f} times"
    if found["paper_speedup"]:
        title += f" (paper: {found['paper_speedup']})"
    table = Table(title=title)
    for name in ("", "trainer", "generators", "θ", "step s", "idle t / g", "DDMA s"):
        table.add_column(name)
    base = found["synchronous"]
    engines = _engine(base["trainer"]), _engine(base["generator"])
    table.add_row("synchronous", *engines, "", f"{base['step_seconds']:.2f}", "", "")
    for index, point in enumerate(found["asynchronous"]):
        table.add_row(
            f"asynchronous {index + 1}",
            _engine(point["trainer"]),
            _engine(point["generator"]),
            f"{point['trainer_share']:.2f}",
            f"{point['step_seconds']:.2f}",
            f"{point['trainer_idle_ratio']:.2f} / {point['generator_idle_ratio']:.2f}",
            f"{point['sync_seconds']:.2f}",
        )
    return table


def draw(advices: Sequence[Advice], file: Path) -> None:
    """Draw each setting's step time by the trainer's share of the GPUs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for advice in advices:
        shares = [point.trainer_share for point in advice.frontier]
        base = advice.synchronous.step_seconds
        speedups = [base / point.step_seconds for point in advice.frontier]
        axes.plot(shares, speedups, label=advice.setting.model)
    axes.set_xlabel("trainer's share of the GPUs")
    axes.set_ylabel("speed-up over the synchronous baseline")
    axes.legend()
    figure.savefig(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megarl advise", description=__doc__)
    parser.add_argument("--model", type=Path, help="file of configs/models or Hugging Face folder")
    parser.add_argument("--gpus", type=int, help="to divide; with --model")
    parser.add_argument("--cluster", type=Path, default=Path("configs/clusters/dgx_h100.yaml"))
    parser.add_argument(
        "--curves",
        type=Path,
        help="of tools.measure_curves: how many copies of each engine as measured --gpus should be",
    )
    parser.add_argument("--prompts", type=int, default=512, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--prompt-length", type=int, default=200, help="tokens")
    parser.add_argument("--mean-length", type=float, default=500, help="tokens of a response")
    parser.add_argument("--spread", type=float, default=0.7, help="deviation of log lengths")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a response")
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--no-fp8", action="store_true", help="generators hold bf16 weights")
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw speed-up by share")
    return parser


def main(arguments: Sequence[str], console: Console) -> int:
    """Print the advice; return the exit code.

    Raises:
        ConfigError, BridgeError: a setting that cannot be, or in which nothing fits.
    """
    given = _parser().parse_args(arguments)
    if given.curves:
        return _advise_measured(given, console)
    if (given.model is None) != (given.gpus is None):
        raise ConfigError("advise: --model and --gpus go together")
    asked = PAPER
    if given.model:
        asked = (_Asked(model=given.model, num_gpus=given.gpus),)
    lengths = Lengths(mean=given.mean_length, spread=given.spread, longest=given.max_length)
    workload = Workload(
        prompts=given.prompts,
        samples=given.samples,
        prompt_length=given.prompt_length,
        lengths=lengths,
    )
    site = load_site(given.cluster)
    advices = [
        advise(
            Setting(
                model=each.model.stem,
                spec=load_sizes(each.model).without_mtp(),
                num_gpus=each.num_gpus,
                site=site,
                workload=workload,
                max_staleness=given.max_staleness,
                fp8=not given.no_fp8,
            )
        )
        for each in asked
    ]
    rows = [row(a, each.paper_speedup) for a, each in zip(advices, asked, strict=True)]
    if given.plot:
        draw(advices, given.plot)
    if given.json:
        print(json.dumps({"rows": rows}, indent=1))
        return 0
    for found in rows:
        console.print(_table(found))
    return 0


# --- At measured rates ----------------------------------------------------------------------------


def measured_rows(found: Sequence[Division]) -> list[dict[str, Any]]:
    """Return divisions as plain values; seconds are of a simulated step."""
    return [
        {
            "overrides": list(division.overrides),
            "trainer_share": division.trainer_share,
            **{
                name: getattr(division.simulated, name)
                for name in (
                    "step_seconds",
                    "trainer_idle_ratio",
                    "generator_idle_ratio",
                    "staleness_mean",
                )
            },
        }
        for division in found
    ]


def measured_table(rows: Sequence[dict[str, Any]], title: str = "at measured rates") -> Table:
    table = Table("overrides", "θ", "step s", "idle t / g", title=title)
    for row in rows:
        table.add_row(
            " ".join(row["overrides"]),
            f"{row['trainer_share']:.2f}",
            f"{row['step_seconds']:.3g}",
            f"{row['trainer_idle_ratio']:.2f} / {row['generator_idle_ratio']:.2f}",
        )
    return table


def _advise_measured(given: argparse.Namespace, console: Console) -> int:
    if given.gpus is None or given.model is not None:
        raise ConfigError("advise: --curves goes with --gpus, and without --model")
    curves = load_curves(given.curves)
    run = measured_pipeline(curves)
    run = replace(
        run,
        batch_groups=given.prompts,
        group_size=given.samples,
        group_seconds=run.group_seconds * given.samples / curves.group_size,
        max_staleness=given.max_staleness,
    )
    cores = load_site(given.cluster).computing_ranks(given.gpus)
    rows = measured_rows(divisions(curves, run, given.gpus, cores))
    if given.json:
        print(json.dumps({"rows": rows}, indent=1))
    else:
        console.print(measured_table(rows[:SHOWN]))
    return 0
