"""What training and decoding cost as measured: a file of cases, and curves through them.

`tools.measure_curves` writes the file; the advisor and the comparison of the simulator with runs read
it. A case is the mean of several steps of an engine. Decoding is a line in the tokens held for each
number of running sequences, and lines between those; training is a constant, a part for each token and
one for each pair of tokens of a sequence.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from launch.lengths import measured_lengths
from launch.simulate import Pipeline, simulate
from megarl.config import PartialKv, RunConfig
from megarl.errors import ConfigError
from megarl.observe.files import replacing


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """Decoding steps of one replica with as many sequences."""

    running: int
    held: float  # tokens of all of them, on average
    seconds: float  # of a step
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCase:
    """Training steps on one batch, on all trainer ranks."""

    sequences: int
    tokens: int
    squares: int  # sum of the squared lengths
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Both engines, each while the other waits."""

    decode: tuple[DecodeCase, ...]
    train: tuple[TrainCase, ...]
    prefill_token_seconds: float = 0.0  # of a token of each sample's prompt, shared or not

    def __post_init__(self) -> None:
        for name in ("decode", "train"):
            if not getattr(self, name):
                raise ConfigError(f"curves: no {name} case, expected at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """All that was measured of a configuration on a machine."""

    provenance: dict[str, Any]
    alone: Rates  # one engine works, the other waits
    train_beside: tuple[TrainCase, ...] = ()  # while generators sample; none: on the same ranks
    dp: int  # of the trainer
    replicas: int
    trainer_ranks: int  # of all data-parallel copies together
    generator_ranks: int  # of all replicas together
    sampling_seconds: float = 0.0  # of all `lengths`, ordered and scored as in a run; 0: unknown
    sampling_beside_seconds: float = 0.0  # the same while the trainer trains
    tick_seconds: float  # of a step, with neither training nor decoding
    reward_sample_seconds: float
    prompt_length: float  # mean tokens
    group_size: int  # samples of a prompt
    lengths: tuple[int, ...] = field(
        default=()
    )  # of responses, in the order of prompts and samples

    @property
    def colocated(self) -> bool:
        return not self.train_beside


# --- The file -----------------------------------------------------------------------------------


def write_curves(curves: Curves, file: Path) -> None:
    with replacing(file) as text:
        json.dump(asdict(curves), text, indent=1)


def load_curves(file: Path) -> Curves:
    """Read what `write_curves` wrote.

    Raises:
        ConfigError: missing or malformed file.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        values["lengths"] = tuple(values["lengths"])
        values["alone"] = _rates(values["alone"])
        values["train_beside"] = tuple(TrainCase(**case) for case in values["train_beside"])
        return Curves(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"curves {file}: {error!r}; tools.measure_curves writes them") from error


def _rates(values: Mapping[str, Any]) -> Rates:
    return Rates(
        decode=tuple(DecodeCase(**case) for case in values["decode"]),
        train=tuple(TrainCase(**case) for case in values["train"]),
        prefill_token_seconds=values["prefill_token_seconds"],
    )


# --- Curves through the cases -------------------------------------------------------------------


class DecodeCurve:
    """Seconds of a decoding step; callable as `launch.decoding.StepSeconds`."""

    def __init__(self, cases: Sequence[DecodeCase]):
        by_running: dict[int, list[DecodeCase]] = defaultdict(list)
        for case in cases:
            by_running[case.running].append(case)
        self._running = sorted(by_running)
        self._lines = [_line(by_running[running]) for running in self._running]

    def __call__(self, running: int, held: float) -> float:
        (first, per_first), (last, per_last), share = self._around(running)
        constant = first + (last - first) * share
        return constant + held * (per_first + (per_last - per_first) * share)

    def _around(self, running: int) -> tuple[tuple[float, float], tuple[float, float], float]:
        """Return the lines between which ``running`` lies, beyond the ends the last two, and where."""
        if len(self._running) == 1:
            return self._lines[0], self._lines[0], 0.0
        at = min(max(1, bisect_left(self._running, running)), len(self._running) - 1)
        low, high = self._running[at - 1], self._running[at]
        share = max(0.0, (running - low) / (high - low))
        return self._lines[at - 1], self._lines[at], share


def _line(cases: Sequence[DecodeCase]) -> tuple[float, float]:
    """Return seconds with nothing held, and for each token held; the latter is not negative."""
    weights = [case.steps for case in cases]
    held = float(np.average([case.held for case in cases], weights=weights))
    seconds = float(np.average([case.seconds for case in cases], weights=weights))
    around = sum(w * (c.held - held) ** 2 for w, c in zip(weights, cases, strict=True))
    both = sum(
        w * (c.held - held) * (c.seconds - seconds) for w, c in zip(weights, cases, strict=True)
    )
    slope = min(max(0.0, both / around), seconds / held) if around > 0 else 0.0
    return seconds - slope * held, slope


class TrainCurve:
    """Seconds of training on a batch, by its sequences' lengths."""

    def __init__(self, cases: Sequence[TrainCase]):
        rows = np.array([[1.0, case.tokens, case.squares] for case in cases])
        seconds = np.array([case.seconds for case in cases])
        self._parts = _non_negative(rows / seconds[:, None], np.ones(len(cases)))

    def __call__(self, lengths: Sequence[int]) -> float:
        squares = sum(length * length for length in lengths)
        return float(self._parts @ np.array([1.0, sum(lengths), squares]))


def _non_negative(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the least-squares solution without its negative parts: those are left out."""
    kept = list(range(rows.shape[1]))
    while True:
        scale = np.abs(rows[:, kept]).max(axis=0)
        found = np.linalg.lstsq(rows[:, kept] / scale, target, rcond=None)[0] / scale
        if (found >= 0).all():
            break
        del kept[int(np.argmin(found * scale))]
    result = np.zeros(rows.shape[1])
    result[kept] = found
    return result


# --- Unit times as the paper has them ---------------------------------------------------------------


def eta_train(rates: Rates) -> list[tuple[int, float]]:
    """Return (sequences of a batch, seconds for each of them), smallest batch first."""
    found: dict[int, list[TrainCase]] = defaultdict(list)
    for case in rates.train:
        found[case.sequences].append(case)
    return [
        (size, sum(c.seconds for c in cases) / len(cases) / size)
        for size, cases in sorted(found.items())
    ]


def eta_generate(rates: Rates) -> list[tuple[int, float]]:
    """Return (sequences decoded together, seconds for a token of one), fewest first."""
    found: dict[int, list[DecodeCase]] = defaultdict(list)
    for case in rates.decode:
        found[case.running].append(case)
    return [
        (
            running,
            sum(c.seconds * c.steps for c in cases) / sum(c.steps for c in cases) / running,
        )
        for running, cases in sorted(found.items())
    ]


def slow_down(curves: Curves) -> tuple[float, float]:
    """Return how many times longer training and decoding take beside one another, at least 1.

    Of the sums over all cases: so the large ones, where most of the time goes, count most.
    """
    if curves.colocated:
        return 1.0, 1.0
    train = sum(c.seconds for c in curves.train_beside) / sum(c.seconds for c in curves.alone.train)
    sampling = curves.sampling_seconds
    decode = curves.sampling_beside_seconds / sampling if sampling else 1.0
    return max(1.0, train), max(1.0, decode)


# --- Simulation -----------------------------------------------------------------------------------


def pipeline_of(curves: Curves, config: RunConfig, *, known_lengths: bool = False) -> Pipeline:
    """Return a run of ``config`` for the simulator, at the rates of ``curves``.

    Args:
        known_lengths: responses are as long as those measured, prompt by prompt; else drawn from them.

    Raises:
        ConfigError: the curves are those of another layout.
    """
    asked = (
        config.trainer.layout.world_size,
        config.generator.layout.replicas,
        config.is_colocated,
    )
    measured = (curves.trainer_ranks, curves.replicas, curves.colocated)
    if asked != measured:
        raise ConfigError(
            f"curves of (trainer ranks, replicas, colocated) = {measured}, expected {asked} of {config.name}"
        )
    run = measured_pipeline(curves, known_lengths=known_lengths)
    return replace(
        run,
        batch_groups=config.data.train_batch_size,
        group_size=config.rollout.n,
        group_seconds=run.group_seconds * config.rollout.n / curves.group_size,
        max_staleness=config.staleness_bound,
        slots=config.generator.max_running_sequences,
        recompute=config.rollout.partial_kv is PartialKv.RECOMPUTE,
        colocated=config.is_colocated,
    )


def measured_pipeline(curves: Curves, *, known_lengths: bool = False) -> Pipeline:
    """Return a synchronous run with batches of one prompt, to be replaced by what is asked."""
    return replace(
        _decoding_alone(curves),
        group_seconds=_group_seconds(curves),
        known_lengths=curves.lengths if known_lengths else (),
        train_seconds=TrainCurve(curves.alone.train),
        sync_seconds=curves.tick_seconds,
        beside=slow_down(curves),
    )


def _decoding_alone(curves: Curves) -> Pipeline:
    """Return batches of one prompt that cost nothing but decoding and prefill."""
    return Pipeline(
        batch_groups=1,
        group_size=curves.group_size,
        max_staleness=0,
        replicas=curves.replicas,
        slots=max(case.running for case in curves.alone.decode),
        lengths=measured_lengths(list(curves.lengths)),
        step_seconds=DecodeCurve(curves.alone.decode),
        train_seconds=lambda lengths: 0.0,
        prefill_seconds=curves.alone.prefill_token_seconds,
        prompt_length=round(curves.prompt_length),
    )


def _group_seconds(curves: Curves) -> float:
    """Return what a group of responses costs a replica beside its decoding steps, without prefill.

    That is the time by which sampling all `lengths`, a response ending and others beginning at every
    step, took longer than as many steps with equal sequences; so it is that of a replica.
    """
    if not curves.sampling_seconds:
        return 0.0
    groups = len(curves.lengths) // curves.group_size
    pipeline = replace(_decoding_alone(curves), batch_groups=groups, known_lengths=curves.lengths)
    more = curves.sampling_seconds - simulate(pipeline, 1)[0].wait_seconds
    return max(0.0, more) * curves.replicas / groups
