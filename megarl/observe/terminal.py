"""Owns the live view of a run in the terminal; the launcher feeds it from metrics.jsonl.

On a terminal the last steps are a table that redraws itself; elsewhere (a file, a pipe, Slurm's
output) each step is one plain line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megarl.observe.metrics import series

SHOWN_STEPS = 15


def _number(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    heading: str
    metric: str
    text: Callable[[float], str]
    style: str = ""


RL_COLUMNS = (
    _Column(heading="reward", metric="rollout/reward", text=_number, style="bold green"),
    _Column(heading="accuracy", metric="val/accuracy", text=_number, style="bold cyan"),
    _Column(heading="length", metric="rollout/response_length_mean", text="{:.1f}".format),
    _Column(heading="tokens/s", metric="perf/tokens_per_second", text=_count),
    _Column(heading="trainer idle", metric="trainer/idle_ratio", text=_percent, style="yellow"),
    _Column(heading="generator idle", metric="generator/idle_ratio", text=_percent, style="yellow"),
    _Column(heading="sync ms", metric="timing_s/update_weights", text=_milliseconds),
    _Column(heading="staleness", metric="staleness/mean", text="{:.2f}".format),
)
SFT_COLUMNS = (
    _Column(heading="loss", metric="sft/loss", text="{:.4f}".format, style="bold green"),
    _Column(heading="lr", metric="actor/lr", text="{:.2e}".format),
    _Column(heading="tokens/s", metric="perf/tokens_per_second", text=_count),
)


class TerminalView:
    """Shows steps as they come: `update` with new rows, `close` at the end.

    A step that comes again, as after a resume, replaces it and all that followed it.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._rows: list[dict] = []  # the last steps, in order

    def update(self, rows: list[dict], max_steps: int) -> None:
        """Show ``rows``, the steps since the last call (rows of `MetricsTail.poll`)."""
        for row in rows:
            earlier = [shown for shown in self._rows if shown["step"] < row["step"]]
            self._rows = [*earlier, row][-SHOWN_STEPS:]
            if not self._console.is_terminal:
                self._console.print(self._line(row, max_steps), highlight=False, soft_wrap=True)
        if self._console.is_terminal and rows:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(self._table(max_steps), refresh=True)

    def close(self) -> None:
        """Leave the last table on the screen and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, max_steps: int) -> Table:
        table = Table(header_style="bold", border_style="dim")
        columns = _columns(self._rows)
        table.add_column("step", justify="right")
        for column in columns:
            table.add_column(column.heading, justify="right", style=column.style)
        table.add_column("ETA", justify="right")
        for row in self._rows:
            cells = [_cell(column, row) or "-" for column in columns]
            table.add_row(_progress(row, max_steps), *cells, self._eta(row, max_steps) or "-")
        return table

    def _line(self, row: dict, max_steps: int) -> str:
        cells = [(column.heading, _cell(column, row)) for column in _columns(self._rows)]
        cells.append(("ETA", self._eta(row, max_steps)))
        shown = [f"{heading} {text}" for heading, text in cells if text]
        return "  ".join([f"step {_progress(row, max_steps)}", *shown])

    def _eta(self, row: dict, max_steps: int) -> str:
        """Remaining time after ``row`` at the mean pace of the steps shown up to it."""
        shown = [earlier for earlier in self._rows if earlier["step"] <= row["step"]]
        seconds = series(shown, "timing_s/step")[1]
        if not seconds:
            return ""
        return str(timedelta(seconds=round(fmean(seconds) * (max_steps - row["step"]))))


def _columns(rows: list[dict]) -> tuple[_Column, ...]:
    return SFT_COLUMNS if any("sft/loss" in row for row in rows) else RL_COLUMNS


def _progress(row: dict, max_steps: int) -> str:
    return f"{row['step']}/{max_steps}"


def _cell(column: _Column, row: dict) -> str:
    value = row.get(column.metric)
    return "" if value is None else column.text(value)
