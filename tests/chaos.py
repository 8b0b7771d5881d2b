"""A job whose ranks are killed at chosen moments and which goes on from its last checkpoint.

`run_with_kills` runs all ranks of a training job in processes of its own. A rank ends itself with
SIGKILL in the middle of a span (a weight transfer, a save, a decoding step ..), as a lost machine
would; then all others are killed and the job starts again with ``resume=auto``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megarl.config import RunConfig
from megarl.config_file import load_config
from tests.processes import PRELOAD

_RUN_SECONDS = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """When a rank dies: ``delay_seconds`` after it entered a span in a tick."""

    rank: int
    tick: int
    span: str
    delay_seconds: float = 0.0


def run_with_kills(
    config_path: Path, overrides: tuple[str, ...], kills: list[Kill]
) -> list[tuple[Kill, int]]:
    """Run the job to its end; return each kill that happened and the ticks done again because of it.

    Raises:
        AssertionError: a rank failed by itself, a kill never happened, or time is up.
    """
    import torch.distributed as dist

    from megarl.check import Command, topology_of

    config = load_config(config_path, (*overrides, "resume=auto"))
    size = topology_of(Command.TRAIN, config).size
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    happened: list[tuple[Kill, int]] = []
    for kill in [*kills, None]:
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        children = [
            context.Process(target=_rank, args=(rank, store.port, config, kill))
            for rank in range(size)
        ]
        for child in children:
            child.start()
        try:
            ended = _await(children)
        finally:
            for child in children:
                child.kill()
                child.join()
        if kill is None:
            assert ended is None, f"rank {ended} failed"
            return happened
        assert ended == kill.rank, f"rank {ended} ended instead of {kill}"
        happened.append((kill, kill.tick - _saved_step(config.folder)))
    raise AssertionError("unreachable")


def _saved_step(folder: Path) -> int:
    latest = folder / "checkpoints" / "latest"
    return int(latest.read_text().removeprefix("step_")) if latest.is_file() else 0


def _await(children: list[Any]) -> int | None:
    """Return the rank that was killed first, None when all ended well."""
    deadline = time.monotonic() + _RUN_SECONDS
    while time.monotonic() < deadline:
        codes = [child.exitcode for child in children]
        killed = [rank for rank, code in enumerate(codes) if code == -signal.SIGKILL]
        if killed:
            return killed[0]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            time.sleep(0.5)  # whom it lost may be the killed one
            late = [r for r, child in enumerate(children) if child.exitcode == -signal.SIGKILL]
            return (late or failed)[0]
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)
    raise AssertionError(f"the job did not end in {_RUN_SECONDS} s: exit codes {codes}")


def _rank(rank: int, port: int, config: RunConfig, kill: Kill | None) -> None:
    import torch

    from megarl import checkpoint
    from megarl.check import Command, topology_of
    from megarl.observe.trace import Tracer
    from megarl.train import run_training
    from megarl.wiring import Rank
    from megarl.world import Rendezvous, World

    torch.set_num_threads(1)
    log = os.open(
        config.folder.parent / f"{config.name}.{rank}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    topology = topology_of(Command.TRAIN, config)
    at = Rendezvous(
        rank=rank, host="127.0.0.1", port=port, is_store_host=False, timeout_seconds=60.0
    )
    world = World(topology, at)

    def on_enter(span: str) -> None:
        if kill is not None and (rank, world._step, span) == (kill.rank, kill.tick, kill.span):
            threading.Timer(kill.delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    parts = Rank(
        config=config,
        topology=topology,
        world=world,
        tracers={world.place.name: Tracer(world.place.name, rank, on_enter=on_enter)},
        start=checkpoint.find_start(config),
        began=time.monotonic(),
    )
    run_training(parts)
    os._exit(0)


def consumed_prompts(folder: Path) -> list[int]:
    """Return every prompt that a run trained on, in the order of its batches."""
    lines = (folder / "order.jsonl").read_text().splitlines()
    return [prompt for line in lines for prompt in json.loads(line)["prompts"]]
