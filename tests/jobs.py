"""Whole jobs for tests: the command line in a subprocess, or all ranks under this test's eyes.

`start_command` runs ``megarl`` as a person does. `run_job` builds every rank from `megarl.wiring`
in processes of its own and looks at the executor (the rank's last) with ``look`` before each tick and
after the last. `run_replay` trains on what such a job recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from megarl.config import RunConfig
from megarl.config_file import load_config
from tests.processes import run_ranks

ROOT = Path(__file__).parents[1]
Look = Callable[[Any], object]  # executor -> something picklable


def start_command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start ``megarl ARGUMENTS`` in the project's root; stdout and stderr are one pipe."""
    environment = options.pop("env", os.environ)
    return subprocess.Popen(
        [sys.executable, "-m", "megarl.cli", *arguments],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


@contextmanager
def launched(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``megarl ARGUMENTS``; nothing of it is left after the block."""
    launcher = start_command(*arguments)
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            for child in psutil.Process(launcher.pid).children(recursive=True):
                child.kill()
            launcher.kill()
        launcher.wait()


def run_command(*arguments: str, timeout: float = 300.0, **options: Any) -> str:
    """Run ``megarl ARGUMENTS`` and return its output.

    Raises:
        AssertionError: it failed (with its output) or took longer than ``timeout`` seconds.
    """
    process = start_command(*arguments, **options)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=30)
    assert process.returncode == 0, output
    return output


def run_job(
    config_path: Path, overrides: tuple[str, ...], look: Look, timeout: float = 240.0
) -> list[list[object]]:
    """Run a training job; return, for each rank, what ``look`` returned at each tick."""
    return _run_ranks("train", _rank, load_config(config_path, overrides), look, timeout=timeout)


def run_replay(config_path: Path, overrides: tuple[str, ...], timeout: float = 120.0) -> None:
    """Replay a recorded job."""
    _run_ranks("replay", _replay_rank, load_config(config_path, overrides), timeout=timeout)


def _run_ranks(
    command: str, target: Callable[..., Any], config: RunConfig, *args: object, timeout: float
) -> list[Any]:
    """Call ``target(rank, size, port of the store, config, *args)`` on the ranks of ``command``."""
    import torch.distributed as dist

    from megarl.check import Command, check_run, topology_of

    check_run(Command(command), config)
    config.folder.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    size = topology_of(Command(command), config).size
    return run_ranks(target, size, store.port, config, *args, timeout=timeout, default_group=False)


def _join(command: str, rank: int, port: int, config: RunConfig) -> Any:
    """Return what the rank's components are built from; its peers are there."""
    import time

    from megarl import checkpoint
    from megarl.check import Command, topology_of
    from megarl.wiring import Rank, make_tracers
    from megarl.world import Rendezvous, World

    topology = topology_of(Command(command), config)
    at = Rendezvous(
        rank=rank, host="127.0.0.1", port=port, is_store_host=False, timeout_seconds=120.0
    )
    world = World(topology, at)
    return Rank(
        config=config,
        topology=topology,
        world=world,
        tracers=make_tracers(world),
        start=checkpoint.find_start(config),
        began=time.monotonic(),
    )


def _replay_rank(rank: int, size: int, port: int, config: RunConfig) -> None:
    from megarl.train import run_replay as run

    run(_join("replay", rank, port, config))


def _rank(rank: int, size: int, port: int, config: RunConfig, look: Look) -> list[object]:
    from megarl.controller import ExecutorController, tick_order, ticks
    from megarl.observe.metrics import MetricsLog
    from megarl.topology import REWARD
    from megarl.wiring import close, initialize, make_channels, make_executors

    parts = _join("train", rank, port, config)
    world = parts.world
    metrics = None
    if world.place.name == REWARD:
        metrics = MetricsLog(config.folder, config.observe, config.name)
        metrics.truncate(parts.start.step)
    executors = make_executors(parts, metrics.write if metrics else None)
    initialize(parts, executors)
    channels = make_channels(parts, executors)
    seen: list[object] = []
    all_ticks = ticks(parts.start.step, config.max_steps)
    order = tick_order(config)

    def on_step(tick: int) -> None:
        seen.append(look(executors[-1]))

    ExecutorController(executors, channels, order, all_ticks, on_step, world.inside).run()
    seen.append(look(executors[-1]))
    world.barrier("end")
    close(parts, executors)
    return seen


def read_rows(config_folder: Path) -> dict[int, dict[str, Any]]:
    """Return the training rows of a run's metrics.jsonl by step."""
    lines = (config_folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row for row in rows if "actor/loss" in row}
