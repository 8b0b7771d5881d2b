"""One rank of a job: join the worlds, run the command, report how it ended.

``python -m megarl.train COMMAND CONFIG [key=value ...]`` is one rank; RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT say which, as torchrun, srun and `launch.local` set them. What only one
command or one executor needs is imported there: engines take seconds to import.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from megarl import checkpoint
from megarl.check import SAVES, Command, check_run, check_world_size, topology_of
from megarl.config import RunConfig
from megarl.config_file import load_config
from megarl.controller import (
    WEIGHTS,
    ExecutorController,
    Stage,
    tick_order,
    ticks,
)
from megarl.errors import ConfigError
from megarl.executors.base import Executor
from megarl.observe import logs
from megarl.observe.metrics import (
    METRICS_FILE,
    MetricsLog,
    build_summary,
    read_metrics,
    write_summary,
)
from megarl.observe.trace import merge_traces
from megarl.progress import RESTARTS_VARIABLE
from megarl.topology import REWARD, TRAINER
from megarl.wiring import (
    Rank,
    close,
    export_link,
    initialize,
    make_channels,
    make_executors,
    make_tracers,
)
from megarl.world import Rendezvous, World

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # prctl(2)
_FINISH_LABEL = "end of run"
# Importing engines makes millions of objects that stay: Python's default has a fifth of that time go
# into looking for garbage among them.
_START_THRESHOLD, _RUN_THRESHOLD = (100_000, 20, 20), gc.get_threshold()


def rendezvous(config: RunConfig) -> Rendezvous:
    """Read from the environment who this rank is and where its peers meet.

    Raises:
        ConfigError: a variable is missing.
    """
    try:
        return Rendezvous(
            rank=int(os.environ["RANK"]),
            host=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            is_store_host=os.environ["RANK"] == "0"
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout_seconds=config.fault.timeout_seconds,
        )
    except KeyError as error:
        raise ConfigError(
            f"environment variable {error} is not set: start ranks with `megarl`, torchrun or srun"
        ) from error


def run_training(rank: Rank) -> None:
    """One rank of ``megarl train``, from building to the summary."""
    config, world = rank.config, rank.world
    metrics = _open_metrics(rank) if world.place.name == REWARD else None
    executors = make_executors(rank, metrics.write if metrics else None)
    order = tick_order(config)
    try:
        world.set_status("starting the engine")
        initialize(rank, executors)
        collect_as_usual()
        channels = make_channels(rank, executors)
        world.barrier("start")
        all_ticks, on_step = ticks(rank.start.step, config.max_steps), _step_hook(world)
        ExecutorController(executors, channels, order, all_ticks, on_step, world.inside).run()
        channels[WEIGHTS].settle()
        _write_trace(rank)
        world.barrier(_FINISH_LABEL)
        if metrics is not None:
            metrics.close()
            finish(rank)
    finally:
        close(rank, executors)


def run_sft(rank: Rank) -> None:
    """One rank of ``megarl sft``."""
    from megarl.executors.sft import SftExecutor, Surroundings

    config, world = rank.config, rank.world
    metrics = _open_metrics(rank) if world.rank == 0 else None
    surroundings = Surroundings(
        link=export_link(world),
        sink=metrics.write if metrics else _discard,
        stop_requested=world.stop_requested,
    )
    executor = SftExecutor(config, rank.start, world.rank, surroundings, rank.tracers[TRAINER])
    with closing(executor):
        _run_alone(rank, executor)
        world.barrier(_FINISH_LABEL)


def run_replay(rank: Rank) -> None:
    """One rank of ``megarl replay``."""
    from megarl.executors import replay, trainer

    config, world, tracer = rank.config, rank.world, rank.tracers[TRAINER]
    metrics = _open_metrics(rank) if world.rank == 0 else None
    around = trainer.Surroundings(link=export_link(world), arrive=world.arrive, commits=True)
    learner = trainer.TrainerExecutor(config, rank.start, world.rank, around, tracer)
    surroundings = replay.Surroundings(
        sink=metrics.write if metrics else _discard, stop_requested=world.stop_requested
    )
    executor = replay.ReplayExecutor(config, world.rank, learner, surroundings, tracer)
    with closing(executor):
        _run_alone(rank, executor)
        _write_trace(rank)
        world.barrier(_FINISH_LABEL)
        if metrics is not None:
            metrics.close()
            finish(rank)


def _run_alone(rank: Rank, executor: Executor) -> None:
    """Build and step trainer ranks that have no peers; one tick a batch."""
    config, world = rank.config, rank.world
    world.set_status("starting the engine")
    executor.init()
    collect_as_usual()
    order = (Stage(prepares=(TRAINER,), steps=(TRAINER,)),)
    all_ticks, on_step = range(rank.start.step, config.max_steps), _step_hook(world)
    ExecutorController((executor,), {}, order, all_ticks, on_step, world.inside).run()


def run_evaluation(rank: Rank) -> None:
    """One rank of ``megarl eval``."""
    from megarl.evaluate import evaluate

    evaluate(rank)


def run_doctor(rank: Rank) -> None:
    """One rank of ``megarl doctor``."""
    from megarl.doctor import examine

    examine(rank)


def collect_as_usual() -> None:
    """Look for garbage as often as Python does, but not among what was there before the first tick."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_RUN_THRESHOLD)


def _discard(step: int, metrics: dict[str, float]) -> None:
    """Take metrics that another rank reports."""


def _step_hook(world: World) -> Callable[[int], None]:
    def on_step(step: int) -> None:
        world.set_step(step)
        logs.set_step(step)

    return on_step


def count_restarts() -> int:
    """Return how often the job was started again, as `launch.local` or Slurm says."""
    names = (RESTARTS_VARIABLE, "SLURM_RESTART_COUNT")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def _open_metrics(rank: Rank) -> MetricsLog:
    config = rank.config
    metrics = MetricsLog(config.folder, config.observe, config.name, count_restarts())
    metrics.truncate(rank.start.step)
    return metrics


def _trace_folder(config: RunConfig) -> Path:
    return config.folder / "logs"


def _write_trace(rank: Rank) -> None:
    if rank.config.observe.trace:
        for name, tracer in rank.tracers.items():
            file = f"trace.{name}.{rank.world.rank}.json"
            tracer.write(_trace_folder(rank.config) / file)


def finish(rank: Rank) -> None:
    """Write trace, curve and summary of a run; on the reward rank, after all others are done."""
    from megarl.executors.reward import SAMPLES_FILE
    from megarl.observe.plots import plot_learning_curve

    config = rank.config
    if config.observe.trace:
        merge_traces(_trace_folder(config), config.folder / "trace.json")
    plot_learning_curve(config.folder / METRICS_FILE, config.folder / "learning_curve.png")
    samples = config.folder / SAMPLES_FILE
    greedy = (
        [json.loads(line) for line in samples.read_text().splitlines()] if samples.is_file() else []
    )
    summary = {
        **build_summary(read_metrics(config.folder / METRICS_FILE)),
        "wall_seconds": time.monotonic() - rank.began,
        "greedy_before": greedy[0] if greedy else None,
        "greedy_after": greedy[-1] if greedy else None,
    }
    write_summary(config.folder / "summary.json", summary)


def prepare_process() -> None:
    """Die with the launcher, dump stacks on SIGUSR2 or a crash, one thread, own device."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    gc.set_threshold(*_START_THRESHOLD)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # The reward rank stands behind the ranks that have a GPU and needs none.
    if local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)


def _run(command: Command, config: RunConfig, began: float) -> None:
    at = rendezvous(config)
    topology = topology_of(command, config)
    check_world_size(topology, int(os.environ["WORLD_SIZE"]))
    check_run(command, config)
    prepare_process()
    world = World(topology, at)
    logs.setup_logging(world.place.name, world.rank, None)
    try:
        if command in SAVES:  # the others have nothing to save
            world.stop_on(signal.SIGTERM, signal.SIGUSR1)
        rank = Rank(
            config=config,
            topology=topology,
            world=world,
            tracers=make_tracers(world),
            start=checkpoint.find_start(config),
            began=began,
        )
        runs = {
            Command.TRAIN: run_training,
            Command.SFT: run_sft,
            Command.REPLAY: run_replay,
            Command.EVAL: run_evaluation,
            Command.DOCTOR: run_doctor,
        }
        runs[command](rank)
        world.leave()
    except BaseException as error:
        world.report_failure(error, config.folder)
        raise


def main(arguments: list[str]) -> None:
    """Run one rank and end the process: 0, or 1 with the traceback in its log."""
    began = time.monotonic()
    try:
        command, path, *overrides = arguments
        _run(Command(command), load_config(path, tuple(overrides)), began)
    except BaseException:  # the process's own edge: report, then end with a non-zero code
        logging.basicConfig()
        logger.exception("this rank ends")
        _end(1)
    _end(0)


def _end(code: int) -> None:
    """End at once: threads that still wait for a peer must not keep a failed rank alive."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
