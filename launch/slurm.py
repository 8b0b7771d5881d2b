"""A placed run as a Slurm job: the batch script and its submission.

Called by the launch command. The script asks for whole hosts, starts one process a rank by one
``srun`` and comes back after a time limit; `launch/templates` holds its text.
"""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from launch.placement import Placement
from launch.site import Container, Site, Slurm
from megarl.errors import ConfigError, MegarlError

_TEMPLATES = Path(__file__).with_name("templates")
# Each task learns its rank from Slurm, then becomes the rank.
_BECOME = 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"'


class SubmissionError(MegarlError, RuntimeError):
    """Slurm did not take a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run, where and from which folder."""

    name: str
    summary: str
    folder: Path  # of the run, absolute: with its configuration and logs
    workdir: Path  # to which the configuration's paths are relative
    last_checkpoint: str  # its name, by which a job knows that the run is done
    placement: Placement
    site: Site

    @property
    def script(self) -> Path:
        return self.folder / "job.sbatch"

    @property
    def submit_command(self) -> tuple[str, ...]:
        return ("sbatch", "--parsable", str(self.script))


def render(job: Job) -> str:
    """Return the batch script.

    Raises:
        ConfigError: a host has fewer cores than ranks.
    """
    placement, slurm = job.placement, job.site.slurm
    tasks = [len(placement.on_host(host)) for host in range(placement.num_hosts)]
    cores = slurm.cpus_per_host // max(tasks)
    if slurm.cpus_per_host and not cores:
        raise ConfigError(
            f"slurm.cpus_per_host is {slurm.cpus_per_host}, expected at least one for each of "
            f"{max(tasks)} ranks of a host"
        )
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("job.sbatch.j2").render(
        name=job.name,
        summary=job.summary,
        folder=shlex.quote(str(job.folder)),
        workdir=shlex.quote(str(job.workdir)),
        nodes=placement.num_hosts + placement.spare_hosts,
        used_nodes=placement.num_hosts,
        tasks=tasks,
        tasks_per_node=max(tasks),
        ranks=len(placement.seats),
        last_checkpoint=job.last_checkpoint,
        options=[*_options(slurm), *_resources(job, cores)],
        step_options=[*_resources(job, cores), *_container_options(job)],
        setup=[
            *slurm.setup,
            *([f". {shlex.quote(slurm.venv)}/bin/activate"] if slurm.venv else []),
        ],
        environment=[
            {"name": each.name, "value": shlex.quote(each.value), "why": each.why}
            for each in slurm.environment
        ],
        command=_command(job),
    )


def _options(slurm: Slurm) -> list[str]:
    """Return what the whole job is asked with."""
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    options = [f"{name}={shlex.quote(value)}" for name, value in named.items() if value]
    return [*options, f"time={slurm.time}", f"signal=B:USR1@{slurm.signal_seconds}"]


def _resources(job: Job, cores: int) -> list[str]:
    """Return what job and step both must name."""
    devices = job.placement.devices_per_host
    found = [f"gpus-per-node={devices}"] if job.site.device.is_gpu else []
    return [*found, *([f"cpus-per-task={cores}"] if cores else [])]


def _container_options(job: Job) -> list[str]:
    slurm = job.site.slurm
    if slurm.container is not Container.PYXIS:
        return []
    mounts = ",".join(_mounts(job))
    return [
        f"container-image={shlex.quote(slurm.image)}",
        f"container-mounts={shlex.quote(mounts)}",
        f"container-workdir={shlex.quote(str(job.workdir))}",
    ]


def _mounts(job: Job) -> list[str]:
    own = [f"{path}:{path}" for path in dict.fromkeys((job.workdir, job.folder))]
    return [*own, *job.site.slurm.mounts]


def _command(job: Job) -> str:
    slurm, prefix = job.site.slurm, ["bash", "-c", _BECOME, "rank"]
    if slurm.container is Container.APPTAINER:
        binds = [part for mount in _mounts(job) for part in ("--bind", mount)]
        gpus = ["--nv"] if job.site.device.is_gpu else []
        prefix += ["apptainer", "exec", *gpus, *binds, "--pwd", str(job.workdir), slurm.image]
    config = str(job.folder / "config.yaml")
    return shlex.join([*prefix, "python", "-m", "megarl.train", "train", config])


def submit(job: Job, config_yaml: str) -> str:
    """Write the run's configuration and script, hand it to Slurm and return the job's number.

    Raises:
        SubmissionError: sbatch is not there or refuses.
    """
    text = render(job)
    (job.folder / "logs").mkdir(parents=True, exist_ok=True)
    (job.folder / "config.yaml").write_text(config_yaml)
    job.script.write_text(text)
    try:
        result = subprocess.run(
            job.submit_command, capture_output=True, text=True, timeout=120, check=False
        )
    except FileNotFoundError as error:
        raise SubmissionError("sbatch was not found: expected Slurm's commands here") from error
    except subprocess.TimeoutExpired as error:
        raise SubmissionError("sbatch did not answer in 120 s") from error
    if result.returncode:
        raise SubmissionError(
            f"sbatch refused {job.script} with code {result.returncode}: {result.stderr.strip()}"
        )
    return result.stdout.strip().partition(";")[0]
