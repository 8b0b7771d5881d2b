"""One rank of a measurement of curves; `tools.measure_curves` starts as many as the run would have.

All ranks go through the same phases: the generators sample the run's first prompts, on whose responses
the trainer then trains, until all is warm; they decode so many sequences of equal length at a time; the
trainer trains, the generators sample the first prompts, both do so at once where they have ranks of
their own, and each does alone once more: what drifts meanwhile cancels. Reports and orders go to and
from the reward rank as in a run. Each rank that measured writes ``PHASE.RANK.json``.
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
from megarl.executors.generator import Pace
from megarl.rollout.engine import Engine, Sample
from megarl.rollout.messages import State, pack_samples, unpack_work
from megarl.topology import GENERATOR, REWARD, TRAINER
from megarl.train import collect_as_usual, prepare_process, rendezvous
from megarl.types import TrainBatch
from megarl.wiring import Rank, export_link, make_engine, make_tracers
from megarl.world import World
from tools.curve_orders import BATCHES_FILE, Orderer, Plan

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
        """Do as ordered until the phase ends, beginning without a prefix; return its series."""
        self._engine.commit(0)
        self.series, state = [], State.GO
        while state is State.GO:
            state = self._decode()
        return self.series

    def _decode(self) -> State:
        state, pace = self._report(), Pace(lambda: False)
        while state is State.GO and self._engine.num_unfinished:
            began = time.monotonic()
            self._unreported += self._engine.step()
            stepped = time.monotonic()
            if self._client.agree(pace.is_due(stepped)):
                state = self._report()
                pace.reported(stepped, time.monotonic())
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
        self._times: dict[str, list[list[float]]] = {}  # of each batch, by condition

    def read(self, file: Path) -> None:
        for lengths, parts in torch.load(file, weights_only=False):
            self._batches.append((lengths, parts[self._part]))

    def train(
        self,
        condition: str,
        is_over: Callable[[], bool],
        after_round: Callable[[], None] = lambda: None,
    ) -> None:
        """Train on all batches, again and again until it is over; that step does not count.

        Each batch counts at least once.
        """
        from megatron_bridge.runtime import setup

        found = self._times.setdefault(condition, [[] for _ in self._batches])
        with self._world.inside(TRAINER):
            while True:
                for times, (_, batch) in zip(found, self._batches, strict=True):
                    seconds = self._step(batch)
                    if setup.any_rank(is_over()) and found[-1]:
                        return
                    times.append(seconds)
                after_round()

    def cases(self) -> dict[str, list[dict[str, Any]]]:
        """Return a case for each batch, by condition."""
        return {
            condition: [
                asdict(
                    TrainCase(
                        sequences=len(lengths),
                        tokens=sum(lengths),
                        squares=sum(length**2 for length in lengths),
                        seconds=usual_mean(times),
                        steps=len(times),
                    )
                )
                for times, (lengths, _) in zip(found, self._batches, strict=True)
            ]
            for condition, found in self._times.items()
        }

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

    def begin(self) -> None:
        """Find lengths and the batches to train on."""
        self.sample("first")
        if self._orderer:
            self._write("orders", self._orderer.describe())
        self._world.barrier("batches")
        if self._trainer:
            self._trainer.read(self._plan.folder / BATCHES_FILE)
            self._trainer.train("first", lambda: True)  # allocators and caches warm up

    def decode(self) -> None:
        def order(orderer: Orderer) -> dict[str, Any]:
            orderer.decode(self._plan.seconds)
            return {}

        self._phase("decode", order)

    def sample(self, name: str) -> None:
        self._phase(name, lambda orderer: {"rounds": orderer.sample(lambda: True)})

    def train(self) -> None:
        self._world.barrier("training")
        until = time.monotonic() + self._plan.seconds
        if self._trainer:
            self._trainer.train("alone", lambda: time.monotonic() > until)
        self._world.barrier("end of training")

    def both(self) -> None:
        """Sample until the trainer has trained on each batch, and train until that was sampled."""
        trained, sampled = (self._plan.folder / name for name in ("trained", "sampled"))

        def sample(orderer: Orderer) -> dict[str, Any]:
            rounds = orderer.sample(trained.exists)
            sampled.touch()
            return {"rounds": rounds}

        self._phase(
            "beside", sample, lambda trainer: trainer.train("beside", sampled.exists, trained.touch)
        )

    def _phase(
        self,
        name: str,
        order: Callable[[Orderer], dict[str, Any]],
        train: Callable[[_Trainer], None] | None = None,
    ) -> None:
        """Have all work, between two barriers; write what generators and orderer found."""
        self._world.barrier(name)
        if self._orderer:
            self._write(name, order(self._orderer))
        if self._generator:
            with self._world.inside(GENERATOR):
                series = self._generator.serve()
            seconds = sum(sum(each.seconds) for each in series)
            self._write(name, decoded(series) if name == "decode" else {"seconds": seconds})
        if self._trainer and train:
            train(self._trainer)
        self._world.barrier(f"end of {name}")

    def _write(self, name: str, found: dict[str, Any]) -> None:
        file = self._plan.folder / f"{name}.{self._world.rank}.json"
        file.write_text(json.dumps(found))

    def close(self) -> None:
        """Write the trainer's times, and end the engines."""
        if self._trainer:
            self._write("train", self._trainer.cases())
        for each in (self._trainer, self._generator, self._orderer):
            if each:
                each.close()


def measure(rank: Rank, plan: Plan) -> None:
    """All phases, on any rank."""
    ranks = _Ranks(rank, plan)
    collect_as_usual()
    ranks.begin()
    ranks.decode()
    ranks.train()
    ranks.sample("before")
    if not rank.config.is_colocated:
        ranks.both()
    ranks.sample("after")
    ranks.train()
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
    prepare_process()
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
