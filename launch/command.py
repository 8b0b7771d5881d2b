"""``megarl launch CONFIG --cluster FILE``: what will run where, and its submission to Slurm.

Called by the command line. With ``--dry-run`` nothing is written and nothing submitted.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launch.dry_run import DryRun, dry_run, memory_rows
from launch.placement import picture
from launch.predict import MeanLengths
from launch.site import GIB, Site, load_site
from launch.slurm import Job, render, submit
from megarl.check import Command, check_run
from megarl.checkpoint import checkpoint_folder
from megarl.config import RunConfig
from megarl.config_file import load_config, to_yaml
from megarl.errors import ConfigError

_CELL = 11  # characters of a figure's column


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl launch", description="Submit a run of `megarl train` to Slurm."
    )
    parser.add_argument("config", type=Path, help="YAML file of a run")
    parser.add_argument("overrides", nargs="*", help="dotted overrides: trainer.lr=1e-4")
    parser.add_argument("--cluster", type=Path, required=True, help="YAML file of the machines")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--json", action="store_true", help="say it as JSON")
    parser.add_argument("--plot", type=Path, help="draw the placement into this PNG file")
    parser.add_argument(
        "--prompt-length", type=float, help="mean tokens, for the step time; half of the longest"
    )
    parser.add_argument("--response-length", type=float, help="the same of responses")
    parser.add_argument("--no-preflight", action="store_true", help="start without examining hosts")
    parser.add_argument(
        "--seeds", type=_seeds, default=(), help="a job array: 1,2,3, each with its own run folder"
    )
    return parser


def _seeds(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 1,2,3")
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def main(arguments: Sequence[str], console: Console) -> int:
    """Study a launch, say what was found and, but for a dry run, submit it."""
    given = _parser().parse_intermixed_args(arguments)
    cluster = f"weights.cluster={given.cluster.absolute()}"
    config = load_config(given.config, (*given.overrides, cluster))
    site = load_site(given.cluster)
    if given.no_preflight:
        site = replace(site, slurm=replace(site.slurm, preflight=False))
    lengths = _lengths(config, given.prompt_length, given.response_length)
    try:
        found = dry_run(config, site, lengths)
    except ConfigError as error:
        if given.json:
            console.file.write(json.dumps({"fits": False, "why": str(error)}, indent=2) + "\n")
        raise
    job = _job(config, site, found, given.seeds)
    script = render(job)
    if given.plot:
        from launch.plot import draw  # imports matplotlib

        draw(found.placement, given.plot)
    submission = {"sbatch": script, "submit": shlex.join(job.submit_command)}
    if not given.json:
        _show(config, site, found, console)
        console.print(script, markup=False, highlight=False, soft_wrap=True)
        console.print(f"submit: {submission['submit']}", markup=False, soft_wrap=True)
    if not given.dry_run:
        configs = dict(zip(job.folders, _configs(config, job), strict=True))
        for each in configs.values():
            check_run(Command.TRAIN, each)
        texts = {folder: to_yaml(each) for folder, each in configs.items()}
        submission["job"] = submit(job, texts, given.cluster.read_text())
        if not given.json:
            folders = ", ".join(str(folder / "logs") for folder in job.folders)
            line = f"submitted as job {submission['job']}; logs in {folders}"
            console.print(line, markup=False, soft_wrap=True)
    if given.json:
        console.file.write(json.dumps(found.figures() | submission, indent=2) + "\n")
    return 0


def _lengths(config: RunConfig, prompt: float | None, response: float | None) -> MeanLengths:
    """Return the mean lengths that are given, or half of the longest.

    Raises:
        ConfigError: a mean that no length within the configuration's bounds can have.
    """
    longest = {
        "prompt": (prompt, config.data.max_prompt_length),
        "response": (response, config.rollout.max_response_length),
    }
    for name, (mean, most) in longest.items():
        if mean is not None and not 0 < mean <= most:
            raise ConfigError(f"--{name}-length is {mean:g}, expected above 0 and at most {most}")
    means = {name: most / 2 if mean is None else mean for name, (mean, most) in longest.items()}
    return MeanLengths(**means)


def _configs(config: RunConfig, job: Job) -> list[RunConfig]:
    """Return the configuration of each run folder."""
    if not job.seeds:
        return [config]
    named = zip(job.seeds, job.folders, strict=True)
    return [replace(config, seed=seed, name=folder.name) for seed, folder in named]


def _job(config: RunConfig, site: Site, found: DryRun, seeds: tuple[int, ...]) -> Job:
    layout = config.trainer.layout
    return Job(
        name=config.name,
        summary=f"{layout.world_size} trainer, {config.generator.layout.world_size} generator "
        f"ranks and the rewards on {found.placement.num_hosts} hosts",
        folder=config.folder.absolute(),
        workdir=Path.cwd(),
        last_checkpoint=checkpoint_folder(config.folder, config.max_steps).name,
        max_restarts=config.fault.max_restarts,
        seeds=seeds,
        placement=found.placement,
        site=site,
    )


# --- What a person reads ----------------------------------------------------------------------


def _show(config: RunConfig, site: Site, found: DryRun, console: Console) -> None:
    console.print(to_yaml(config), markup=False, highlight=False, soft_wrap=True)
    for line in picture(found.placement):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for note in _notes(config, found):
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    for line in _memory(found, site):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    step, lengths = found.step, found.lengths
    # The floor is that of NICs.
    floor = f" (floor {found.floors.seconds:.3g} s)" if found.placement.num_hosts > 1 else ""
    train_idle, generate_idle = step.idle_ratios
    for line in (
        f"weights: {step.sync_seconds:.3g} s a transfer{floor}, "
        f"forwarding {found.transfer.plan.policy.forwarding.value}, "
        f"{sum(found.transfer.load.sent.values()) / 1e9:.3g} GB",
        f"step: {step.step_seconds:.3g} s with {lengths.prompt:.0f} + {lengths.response:.0f} tokens: "
        f"training {step.train_seconds:.3g} s (pipeline x {step.bubble:.2f}), "
        f"generation {step.generate_seconds:.3g} s "
        f"({step.running_sequences} sequences together, {1e3 * step.decode_step_seconds:.3g} ms a token); "
        f"idle: trainer {train_idle:.0%}, generators {generate_idle:.0%}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _notes(config: RunConfig, found: DryRun) -> Iterator[str]:
    if found.placement.hosts_per_replica > 1:
        yield (
            f"each generator replica lies on {found.placement.hosts_per_replica} hosts, as "
            "generator.layout asks: its tensor-parallel exchange crosses the network"
        )
    if not found.placement.rail_aligned:
        yield "pipeline neighbours on two hosts use different NICs: a stage is not whole hosts"
    if not config.fault.max_restarts:
        yield (
            "fault.max_restarts is 0: the job ends when a rank fails, or when it loses a host before "
            "there is a newer checkpoint to go on from"
        )
    if not config.checkpoint.save_freq:
        yield "checkpoint.save_freq is 0: what is saved is the end, and what a time limit ends"


def _memory(found: DryRun, site: Site) -> Iterator[str]:
    """Yield the lines of a table: a row for neighbours that hold as much of each."""
    rows = memory_rows(found.memory)
    parts = [name for name, _ in found.fullest.amounts()]
    used = [name for name in parts if any(dict(one.amounts())[name] for _, one in rows)]
    width = max(len(one.executor) for _, one in rows)
    yield f"GiB a rank, of {site.device.memory_gib:g}"
    heads = "  ".join(f"{name:>{_CELL}}" for name in (*used, "total"))
    yield f"{'ranks':>11}  {'':{width}}  {heads}"
    for (first, last), one in rows:
        amounts = [dict(one.amounts())[name] for name in used]
        cells = "  ".join(f"{amount / GIB:{_CELL}.2f}" for amount in (*amounts, one.total))
        yield f"{f'{first}-{last}':>11}  {one.executor:{width}}  {cells}"
