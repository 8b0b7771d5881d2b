"""``megarl doctor``: everything that a training run does before its first optimizer step.

`examine` is called by `megarl.train` on each rank: the ranks, engines, channels and contract of
``megarl train``, one weight transfer, a few short samples, no training. The reward rank writes what
was measured; the command line shows it (`read_findings`, `table`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from megarl.check import Command, folder_of
from megarl.checkpoint import StartPoint
from megarl.config import Mode, Overlong, RunConfig
from megarl.contract import error_bounds
from megarl.controller import (
    BATCH,
    GENERATOR_METRICS,
    TRAINER_METRICS,
    WEIGHTS,
    ExecutorController,
    Stage,
)
from megarl.observe import logs
from megarl.observe.files import replacing
from megarl.topology import GENERATOR, REWARD, TRAINER
from megarl.wiring import Rank, close, initialize, make_channels, make_executors

logger = logging.getLogger(__name__)

FINDINGS_FILE = "doctor.json"
_NUM_PROMPTS, _NUM_SAMPLES, _RESPONSE_LENGTH = 4, 2, 32

# One tick without the optimizer step.
_ORDER = (
    Stage(channel=WEIGHTS),
    Stage(prepares=(REWARD,)),
    Stage(channel=BATCH),
    Stage(steps=(GENERATOR, REWARD)),
)
_COLOCATED_ORDER = (
    Stage(channel=WEIGHTS),
    Stage(prepares=(REWARD,), steps=(GENERATOR,)),
    Stage(channel=BATCH),
    Stage(steps=(REWARD,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check that held, or that this start has no use for."""

    check: str
    measured: str
    bound: str
    skipped: bool = False


def examination(config: RunConfig, start: StartPoint) -> RunConfig:
    """Return what is sampled: the first prompts of data.train_path, a few short responses each."""
    num_prompts = max(
        _NUM_PROMPTS,
        config.generator.layout.replicas,
        -(-config.trainer.layout.dp // _NUM_SAMPLES),
    )
    length = min(config.rollout.max_response_length, _RESPONSE_LENGTH)
    return replace(
        config,
        name=folder_of(Command.DOCTOR, config).name,
        mode=Mode.SYNC,
        max_steps=start.step + 2,  # more than this one, so that nothing is saved
        trainer=replace(config.trainer, updates_per_batch=1),
        checkpoint=replace(config.checkpoint, save_freq=0),
        data=replace(config.data, train_batch_size=num_prompts, shuffle=False, eval_path=""),
        rollout=replace(
            config.rollout,
            n=_NUM_SAMPLES,
            max_response_length=length,
            dynamic_sampling=False,
            overlong=Overlong.KEEP,
        ),
    )


def examine(rank: Rank) -> None:
    """One rank's part of the examination; a check that does not hold raises its own error."""
    rank = replace(rank, start=replace(rank.start, rollout_file=None))  # it samples its own
    world, start = rank.world, rank.start
    folder = folder_of(Command.DOCTOR, rank.config)
    work = examination(rank.config, start)
    executors = make_executors(rank, lambda step, metrics: None, work)
    order = _COLOCATED_ORDER if work.is_colocated else _ORDER
    try:
        world.set_status("starting the engine")
        initialize(rank, executors)
        channels = make_channels(rank, executors)
        world.barrier("start")

        def on_step(step: int) -> None:
            world.set_step(step)
            logs.set_step(step)

        if executors[0].name == TRAINER:
            world.arrive(start.step + 1)  # it takes no step: nobody waits for its end
        tick = range(start.step, start.step + 1)
        ExecutorController(executors, channels, order, tick, on_step, world.inside).run()
        executor = executors[0]
        if executor.name == TRAINER:
            from megarl.executors.trainer import TrainerExecutor

            assert isinstance(executor, TrainerExecutor)
            with world.inside(TRAINER):
                executor.check_agreement()
        channels[TRAINER_METRICS].communicate()
        channels[GENERATOR_METRICS].communicate()
        if executor.name == REWARD:
            from megarl.executors.reward import RewardExecutor

            assert isinstance(executor, RewardExecutor)
            _write(folder, findings(work, start, executor.record(start.step + 1)))
        world.barrier("end of examination")
    finally:
        close(rank, executors)


def findings(config: RunConfig, start: StartPoint, measured: Mapping[str, float]) -> list[Finding]:
    """Say of each check what was measured and what it was held against."""
    generator, trainer = config.generator.layout, config.trainer.layout
    largest, mean = error_bounds(config)
    equal = (
        f"{measured['contract/equal_bytes']:,.0f} bytes a rank, padding zero"
        if start.trainer_folder is None
        else f"not compared: the run resumes at step {start.step}"
    )
    responses = config.data.train_batch_size * config.rollout.n
    bad = [f"{measured[f'reward/{kind}']:.0f} {kind}" for kind in ("errors", "timeouts")]
    return [
        Finding(
            check="configuration, model, tokenizer, data",
            measured=f"{trainer.world_size} trainer ranks, {generator.world_size} generator ranks",
            bound="no contradiction",
        ),
        Finding(
            check="engines hold the parameters of the manifest",
            measured=f"{measured['contract/parameters']:.0f} parameters a rank",
            bound="names, shapes, dtypes, nothing transformed",
        ),
        Finding(
            check="weights after poison and transfer are the checkpoint's",
            measured=equal,
            bound="every bit",
            skipped=start.trainer_folder is not None,
        ),
        Finding(
            check="log-probabilities, largest difference",
            measured=f"{measured['contract/max_logprob_error']:.2e}",
            bound=f"{largest:.0e}",
        ),
        Finding(
            check="log-probabilities, mean difference",
            measured=f"{measured['contract/mean_logprob_error']:.2e} "
            f"over {measured['contract/tokens']:.0f} tokens",
            bound=f"{mean:.0e}",
        ),
        Finding(
            check=f"reward {config.reward.path}",
            measured=f"{', '.join(bad)} in {responses} responses",
            bound="runs",
        ),
    ]


def _write(folder: Path, found: list[Finding]) -> None:
    for item in found:
        logger.info("%s: %s (%s)", item.check, item.measured, item.bound)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / FINDINGS_FILE) as text:
        json.dump([asdict(item) for item in found], text, indent=1)


def read_findings(folder: Path) -> list[Finding]:
    """Return what an examination that ended well wrote."""
    return [Finding(**item) for item in json.loads((folder / FINDINGS_FILE).read_text())]


def table(found: list[Finding]) -> Table:
    """Return the findings for a terminal."""
    shown = Table("check", "result", "measured", "bound", title="megarl doctor")
    for item in found:
        result = "[yellow]skipped[/yellow]" if item.skipped else "[green]holds[/green]"
        shown.add_row(item.check, result, item.measured, item.bound)
    return shown
