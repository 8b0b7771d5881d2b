"""Owns learning_curve.png, drawn from metrics.jsonl by the launcher at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megarl.errors import DataError
from megarl.observe.metrics import read_metrics, series

INK, GRID = "#2b2f36", "#e3e6ea"
BLUE, ORANGE, GREEN, PURPLE = "#2f6fb7", "#e07b39", "#3a9d6e", "#7d5ba6"
NUM_WINDOWS = 20  # a noisy series is smoothed over 1/20 of its points


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    metric: str
    label: str
    colour: str
    smooth: bool = False  # draw points faint and their moving mean bold
    sparse: bool = False  # measured at some steps only: mark them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    title: str
    unit: str
    curves: tuple[_Curve, ...]
    percent: bool = False


RL_PANELS = (
    _Panel(
        title="Reward and accuracy",
        unit="mean of a step",
        curves=(
            _Curve(metric="rollout/reward", label="reward", colour=BLUE, smooth=True),
            _Curve(metric="val/accuracy", label="held-out accuracy", colour=ORANGE, sparse=True),
        ),
    ),
    _Panel(
        title="Response length",
        unit="tokens",
        curves=(
            _Curve(
                metric="rollout/response_length_mean",
                label="mean length",
                colour=GREEN,
                smooth=True,
            ),
        ),
    ),
    _Panel(
        title="Idle time",
        unit="share of the step spent waiting",
        percent=True,
        curves=(
            _Curve(metric="trainer/idle_ratio", label="trainer", colour=BLUE, smooth=True),
            _Curve(metric="generator/idle_ratio", label="generator", colour=ORANGE, smooth=True),
        ),
    ),
    _Panel(
        title="Staleness of the trained tokens",
        unit="policy versions",
        curves=(_Curve(metric="staleness/mean", label="mean staleness", colour=PURPLE),),
    ),
)
SFT_PANELS = (
    _Panel(
        title="Demonstration loss",
        unit="nats a token",
        curves=(_Curve(metric="sft/loss", label="loss", colour=BLUE, smooth=True),),
    ),
    _Panel(
        title="Throughput",
        unit="tokens a second",
        curves=(
            _Curve(metric="perf/tokens_per_second", label="tokens/s", colour=GREEN, smooth=True),
        ),
    ),
)


def plot_learning_curve(metrics_path: Path, target: Path) -> None:
    """Draw the panels of which the run has a metric and save them as a PNG.

    Raises:
        DataError: no metrics file, or none of the metrics in it.
    """
    rows = read_metrics(metrics_path)
    panels = SFT_PANELS if series(rows, "sft/loss")[0] else RL_PANELS
    panels = [p for p in panels if any(series(rows, curve.metric)[0] for curve in p.curves)]
    if not panels:
        raise DataError(f"{metrics_path} has none of the metrics of the learning curve")
    num_columns = min(len(panels), 2)
    num_lines = -(-len(panels) // num_columns)
    figure = Figure(
        figsize=(6.2 * num_columns, 3.5 * num_lines),
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
        dpi=150,
    )
    figure.suptitle(metrics_path.parent.resolve().name, color=INK, fontsize=14, weight="bold")
    all_axes = figure.subplots(num_lines, num_columns, squeeze=False).ravel()
    for axes, panel in zip(all_axes, panels, strict=False):
        _draw(axes, panel, rows)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(target, format="png")


def _draw(axes: Axes, panel: _Panel, rows: list[dict]) -> None:
    lowest = 0.0
    for curve in panel.curves:
        steps, values = series(rows, curve.metric)
        if steps:
            _draw_curve(axes, curve, steps, values)
            lowest = min(lowest, *values)
    axes.set_title(panel.title, loc="left", color=INK, fontsize=11, weight="bold")
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(panel.unit, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if lowest == 0:
        axes.set_ylim(bottom=0)
    if panel.percent:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(color=GRID, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    if len(panel.curves) > 1:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def _draw_curve(axes: Axes, curve: _Curve, steps: list[int], values: list[float]) -> None:
    window = max(1, len(values) // NUM_WINDOWS) if curve.smooth else 1
    marker = "o" if curve.sparse or len(values) < NUM_WINDOWS else ""
    if window > 1:
        axes.plot(steps, values, color=curve.colour, alpha=0.25, linewidth=1)
        values = _moving_mean(values, window)
    axes.plot(
        steps,
        values,
        color=curve.colour,
        linewidth=2,
        marker=marker,
        markersize=4.5,
        clip_on=False,  # a point on the axis is shown whole
        label=curve.label,
    )


def _moving_mean(values: list[float], window: int) -> list[float]:
    """Mean over ``window`` points on each side, fewer at the ends."""
    spans = (values[max(0, at - window) : at + window + 1] for at in range(len(values)))
    return [sum(span) / len(span) for span in spans]
