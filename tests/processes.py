"""Run a function on several local gloo ranks and return what each of them returned.

`run_ranks` is for tests of collectives: it forks fresh processes with one thread each, makes the
default process group, calls ``target(rank, world_size, *args)`` and always ends its children.
"""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# Imported once by the server that children are forked from: importing the engines takes many
# seconds, and a test of eight ranks would pay it eight times. The server computes nothing, so no
# thread of theirs is running when it forks.
PRELOAD = ["tests.preload", "tests.processes"]


def _child(target: Callable, rank: int, size: int, args: tuple, store: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if store:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=60),
            )
        results.put((rank, True, target(rank, size, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise


def run_ranks(
    target: Callable,
    size: int,
    *args: object,
    timeout: float = 180.0,
    default_group: bool = True,
) -> list[Any]:
    """Call ``target(rank, size, *args)`` on ``size`` processes; return their results by rank.

    ``target`` must be importable (module level) and its result picklable. Without
    ``default_group`` the target makes its own process groups.

    Raises:
        AssertionError: a rank failed (with its traceback) or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(
                target=_child,
                args=(target, rank, size, args, f"{folder}/store" * default_group, results),
            )
            for rank in range(size)
        ]
        for child in children:
            child.start()
        try:
            return _collect(children, results, size, timeout)
        finally:
            for child in children:
                child.kill()
                child.join()


def _collect(children: list, results: Any, size: int, timeout: float) -> list[Any]:
    done: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(done) < size:
        try:
            rank, passed, value = results.get(timeout=0.5)
        except queue.Empty:
            dead = [
                r for r, c in enumerate(children) if c.exitcode not in (None, 0) and r not in done
            ]
            assert not dead, f"ranks {dead} died without a word"
            missing = sorted(set(range(size)) - set(done))
            assert time.monotonic() < deadline, f"ranks {missing} did not end in {timeout} s"
            continue
        assert passed, f"rank {rank} failed:\n{value}"
        done[rank] = value
    return [done[rank] for rank in range(size)]
