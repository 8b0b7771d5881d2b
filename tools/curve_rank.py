"""One rank of a measurement of curves; `tools.measure_curves` starts as many as the run would have.

All ranks go through the same phases: the generators sample the run's first prompts (whose responses
the trainer then trains on); they decode so many sequences of equal length at a time while the trainer
waits; the trainer trains while they wait; both at once, where they have ranks of their own. Reports and
orders go to and from the reward rank as in a run. Each rank that measured writes ``NAME.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from launch.curves import DecodeCase, TrainCase
from megarl.channels.requests import RequestClient
from megarl.check import Command, topology_of
from megarl.checkpoint import StartPoint
from megarl.config import RunConfig
from megarl.config_file import load_config
from megarl.executors.generator import REPORT_SECONDS
from megarl.rollout.engine import Engine, Sample
from megarl.rollout.messages import State, pack_samples, unpack_work
from megarl.topology import GENERATOR, REWARD, TRAINER
from megarl.train import rendezvous
from megarl.types import TrainBatch
from megarl.wiring import Rank, export_link, make_engine, make_tracers
from megarl.world import World
from tools.curve_orders import BATCHES_FILE, Orderer, Plan

_Work = Callable[[], dict[str, object]]


# --- Generators -----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Series:
    """Decoding steps since requests arrived at an empty engine."""

    running: int
    prompt: float  # tokens of a request
    seconds: list[float]


class _Generator:
    """A replica's rank: serves as the generator executor does, and times each step."""

    def __init__(self, rank: Rank):
        self._client = RequestClient(rank.world)
        with rank.world.inside(GENERATOR):
            self._engine: Engine = make_engine(rank, load_weights=True)
        self._slots = rank.config.generator.max_running_sequences
        self.series: list[Series] = []
        self._unreported: list[Sample] = []

    def serve(self) -> list[Series]:
        """Do as ordered until the phase ends; return its series."""
        self.series, state = [], State.GO
        while state is State.GO:
            state = self._decode()
        return self.series

    def _decode(self) -> State:
        state, reported = self._report(), time.monotonic()
        while state is State.GO and self._engine.num_unfinished:
            began = time.monotonic()
            self._unreported += self._engine.step()
            if self._client.agree(began - reported >= REPORT_SECONDS):
                state, reported = self._report(), time.monotonic()
            self.series[-1].seconds.append(time.monotonic() - began)
        return state

    def _report(self) -> State:
        samples, self._unreported = self._unreported, []
        work = unpack_work(self._client.exchange(pack_samples(samples)))
        if work.requests:
            prompt = sum(len(r.prompt) for r in work.requests) / len(work.requests)
            running = min(self._slots, len(work.requests))
            self.series.append(Series(running=running, prompt=prompt, seconds=[]))
            self._engine.add(work.requests)
        return work.state

    def close(self) -> None:
        self._engine.close()


def decoded(found: Sequence[Series]) -> dict[str, Any]:
    """Return two cases for each number of sequences, of earlier and later steps, and the seconds of
    prefilling a token of a prompt for all of its samples.
    """
    by_running: dict[int, list[Series]] = defaultdict(list)
    for series in found:
        by_running[series.running].append(series)
    cases: list[DecodeCase] = []
    prefill = 0.0  # that of most sequences at once counts
    for running, group in sorted(by_running.items()):
        # In its first step a prompt is computed; in the last ones only some may still run.
        steps = [series.seconds[1:-2] for series in group]
        middle = min(map(len, steps)) // 2
        for part in (slice(0, middle), slice(middle, 2 * middle)):
            taken = [seconds for each in steps for seconds in each[part]]
            at = 0.5 + part.start + middle / 2
            held = running * (sum(series.prompt for series in group) / len(group) + at)
            mean = usual_mean(taken)
            cases.append(DecodeCase(running=running, held=held, seconds=mean, steps=len(taken)))
        first = sum(series.seconds[0] for series in group) / len(group)
        prompts = running * sum(series.prompt for series in group) / len(group)
        prefill = max(0.0, first - cases[-2].seconds) / prompts
    return {"decode": [asdict(case) for case in cases], "prefill_token_seconds": prefill}


def usual_mean(times: Sequence[float]) -> float:
    """Return the mean, in which none counts for more than twice the median: others use the machine."""
    most = 2 * median(times)
    return sum(min(each, most) for each in times) / len(times)


# --- Trainer --------------------------------------------------------------------------------------


class _Trainer:
    """A trainer rank with the real executor."""

    def __init__(self, rank: Rank):
        from megarl.executors.trainer import Surroundings, TrainerExecutor

        around = Surroundings(link=export_link(rank.world), arrive=lambda tick: None)
        self._executor = TrainerExecutor(
            rank.config, rank.start, rank.world.rank, around, rank.tracers[TRAINER]
        )
        self._world, place = rank.world, rank.world.topology.place(TRAINER)
        self._part = place.group_index(rank.world.rank)
        with rank.world.inside(TRAINER):
            self._executor.init()
        self._batches: list[tuple[Sequence[int], TrainBatch]] = []

    def read(self, file: Path) -> None:
        for lengths, parts in torch.load(file, weights_only=False):
            self._batches.append((lengths, parts[self._part]))

    def train(self, seconds: float) -> list[TrainCase]:
        """Train on all batches, again and again until the time is over; return a case for each."""
        from megatron_bridge.runtime import setup

        found: list[list[float]] = [[] for _ in self._batches]
        began = time.monotonic()
        with self._world.inside(TRAINER):
            while not found[-1] or not setup.any_rank(time.monotonic() - began > seconds):
                for times, (_, batch) in zip(found, self._batches, strict=True):
                    times.append(self._step(batch))
        return [
            TrainCase(
                sequences=len(lengths),
                tokens=sum(lengths),
                squares=sum(length**2 for length in lengths),
                seconds=usual_mean(times),
                steps=len(times),
            )
            for times, (lengths, _) in zip(found, self._batches, strict=True)
        ]

    def _step(self, batch: TrainBatch) -> float:
        version = self._executor.version
        sampled = torch.where(batch.versions >= 0, version, -1)
        self._executor.set_step(version)
        self._executor.put_input("batch", (replace(batch, versions=sampled),))
        began = time.monotonic()
        self._executor.step()
        return time.monotonic() - began

    def close(self) -> None:
        with self._world.inside(TRAINER):
            self._executor.close()


# --- Phases -----------------------------------------------------------------------------------------


class _Ranks:
    """What this rank has of the three, and the phases that all ranks go through."""

    def __init__(self, rank: Rank, plan: Plan):
        names = [place.name for place in rank.world.places]
        self._world, self._plan = rank.world, plan
        # vLLM wants most of a GPU free when it starts.
        self._generator = _Generator(rank) if GENERATOR in names else None
        self._trainer = _Trainer(rank) if TRAINER in names else None
        self._orderer = Orderer(rank, plan) if REWARD in names else None

    def sample(self) -> None:
        self._phase("sample", lambda: {"orders": self._order().sample()}, None)
        if self._trainer:
            self._trainer.read(self._plan.folder / BATCHES_FILE)
            self._trainer.train(0.0)  # allocators and caches warm up

    def decode(self, name: str, *, train: bool) -> None:
        def order() -> dict[str, object]:
            self._order().decode(self._plan.seconds)
            return {}

        self._phase(name, order, self._train if train else None)

    def train(self) -> None:
        self._phase("train", None, self._train)

    def _order(self) -> Orderer:
        assert self._orderer is not None
        return self._orderer

    def _train(self) -> dict[str, object]:
        assert self._trainer is not None
        return {"train": [asdict(case) for case in self._trainer.train(self._plan.seconds)]}

    def _phase(self, name: str, order: _Work | None, train: _Work | None) -> None:
        """Do this rank's part of a phase, between two barriers, and write what it found."""
        self._world.barrier(name)
        found: dict[str, object] = {}
        if self._orderer and order:
            found = order()
        if self._generator and order:
            with self._world.inside(GENERATOR):
                series = self._generator.serve()
            if name == "sample":
                seconds = sum(sum(each.seconds) for each in series)
                found = {"sampling_seconds": seconds}
            else:
                found = decoded(series)
        if self._trainer and train:
            found |= train()
        if found:
            file = self._plan.folder / f"{name}.{self._world.rank}.json"
            file.write_text(json.dumps(found))
        self._world.barrier(f"end of {name}")

    def close(self) -> None:
        for each in (self._trainer, self._generator, self._orderer):
            if each:
                each.close()


def measure(rank: Rank, plan: Plan) -> None:
    """All phases, on any rank."""
    ranks = _Ranks(rank, plan)
    ranks.sample()
    ranks.decode("decode", train=False)
    ranks.train()
    if not rank.config.is_colocated:
        ranks.decode("beside", train=True)
    ranks.close()


def _config(file: str, overrides: Sequence[str]) -> RunConfig:
    """Return the run's configuration without its end, and with weights that stay as they are."""
    own = (
        "max_steps=1000000",
        "checkpoint.save_freq=0",
        "trainer.lr=1e-12",
        "observe.record=false",
    )
    return load_config(file, (*overrides, *own))


def main(arguments: Sequence[str]) -> None:
    began = time.monotonic()
    folder, seconds, batches, tokens, file, *overrides = arguments
    plan = Plan(
        folder=Path(folder), seconds=float(seconds), batches=int(batches), tokens=int(tokens)
    )
    config = _config(file, overrides)
    at = rendezvous(config)
    if torch.cuda.is_available():
        torch.cuda.set_device(at.rank % torch.cuda.device_count())
    world = World(topology_of(Command.TRAIN, config), at)
    tracers = make_tracers(world)
    measure(
        Rank(
            config=config,
            topology=world.topology,
            world=world,
            tracers=tracers,
            start=StartPoint(),
            began=began,
        ),
        plan,
    )
    world.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
