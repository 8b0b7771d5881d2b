"""A placed run as a Slurm job: the batch script and its submission.

Called by the launch command. The script asks for whole hosts, leaves out those that are no good,
starts one process a rank by one ``srun`` and comes back after a time limit or a failure;
`launch/templates` holds its text.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from launch.placement import Placement, trainer_hosts
from launch.site import Container, Site
from megarl.errors import ConfigError, MegarlError

_TEMPLATES = Path(__file__).with_name("templates")


class SubmissionError(MegarlError, RuntimeError):
    """Slurm did not take a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run, where and from which folder; with ``seeds`` a job array with a task for each."""

    name: str
    summary: str
    folder: Path  # of the run, absolute: with its configuration and logs
    workdir: Path  # to which the configuration's paths are relative
    last_checkpoint: str  # its name, by which a job knows that the run is done
    max_restarts: int = 0  # in a row without a newer checkpoint
    seeds: tuple[int, ...] = ()
    placement: Placement
    site: Site

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the run folder, of an array those of its seeds."""
        named = [self.folder.with_name(f"{self.folder.name}-seed{seed}") for seed in self.seeds]
        return tuple(named) or (self.folder,)

    @property
    def script(self) -> Path:
        return self.folders[0] / "job.sbatch"

    @property
    def submit_command(self) -> tuple[str, ...]:
        return ("sbatch", "--parsable", str(self.script))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Hosts of one partition and the ranks that fill them; a heterogeneous job has two."""

    directives: list[str]  # of the script's head
    node_list: str  # the variable that holds Slurm's answer
    hosts: int  # that ranks need
    tasks: list[int]  # ranks on each of them
    join: str  # of srun's parts: how this one begins
    step_options: str


def render(job: Job) -> str:
    """Return the batch script.

    Raises:
        ConfigError: a host has fewer cores than ranks; groups of hosts cannot be told apart.
    """
    slurm, is_array = job.site.slurm, bool(job.seeds)
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("job.sbatch.j2").render(
        name=job.name,
        summary=job.summary,
        # %a and the variable are the seed of an array's task.
        output=shlex.quote(f"{job.folder}{'-seed%a' * is_array}/logs/%x_%j.log"),
        run=shlex.quote(str(job.folder)) + "-seed$SLURM_ARRAY_TASK_ID" * is_array,
        job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if is_array else "$SLURM_JOB_ID",
        workdir=shlex.quote(str(job.workdir)),
        ranks=len(job.placement.seats),
        last_checkpoint=job.last_checkpoint,
        max_restarts=job.max_restarts,
        groups=_groups(job),
        setup=[
            *slurm.setup,
            *([f". {shlex.quote(slurm.venv)}/bin/activate"] if slurm.venv else []),
        ],
        environment=[
            {"name": each.name, "value": shlex.quote(each.value), "why": each.why}
            for each in slurm.environment
        ],
        python=shlex.join(_python(job)),
        preflight="preflight" if slurm.preflight else "# no preflight",
    )


def _groups(job: Job) -> list[_Group]:
    """Return the hosts of the job: all, or the trainer's and then the generators'.

    Raises:
        ConfigError: the groups share a host, or the job is an array too.
    """
    slurm, count = job.site.slurm, job.placement.num_hosts
    if not slurm.generator_partition:
        directives = _options(job, slurm.partition)
        directives += [f"--array={','.join(map(str, job.seeds))}"] if job.seeds else []
        return [_group(job, range(count), directives, slurm.cpus_per_host)]
    if job.seeds:
        raise ConfigError(
            "Slurm has no arrays of heterogeneous jobs: expected no --seeds with "
            f"slurm.generator_partition {slurm.generator_partition!r}"
        )
    first = trainer_hosts(job.placement)
    generators = ["hetjob", *_options(job, slurm.generator_partition)]
    cores = slurm.generator_cpus_per_host or slurm.cpus_per_host
    return [
        _group(job, range(first), _options(job, slurm.partition), slurm.cpus_per_host, 0),
        _group(job, range(first, count), generators, cores, 1),
    ]


def _group(
    job: Job, hosts: range, directives: list[str], cores: int, index: int | None = None
) -> _Group:
    """Describe a group; ``index`` is its number in a heterogeneous job."""
    tasks = [len(job.placement.on_host(host)) for host in hosts]
    each = cores // max(tasks)
    if cores and not each:
        raise ConfigError(
            f"slurm.cpus_per_host is {cores}, expected at least one for each of {max(tasks)} ranks "
            "of a host"
        )
    resources = [f"--gpus-per-node={job.placement.devices_per_host}"] * job.site.device.is_gpu
    resources += [f"--cpus-per-task={each}"] if each else []
    shape = [
        f"--nodes={len(hosts) + job.placement.spare_hosts}",
        f"--ntasks-per-node={max(tasks)}",
    ]
    number = [] if index is None else [f"--het-group={index}"]
    return _Group(
        directives=[*directives, *shape, *resources],
        node_list="SLURM_JOB_NODELIST" + ("" if index is None else f"_HET_GROUP_{index}"),
        hosts=len(hosts),
        tasks=tasks,
        join=":" if index else "",
        step_options=shlex.join([*number, *resources, *_container_options(job)]),
    )


def _options(job: Job, partition: str) -> list[str]:
    """Return what hosts of a partition are asked with."""
    slurm = job.site.slurm
    named = {"partition": partition, "account": slurm.account, "qos": slurm.qos}
    options = [f"--{name}={shlex.quote(value)}" for name, value in named.items() if value]
    return [*options, f"--time={slurm.time}", f"--signal=B:USR1@{slurm.signal_seconds}"]


def _container_options(job: Job) -> list[str]:
    slurm = job.site.slurm
    if slurm.container is not Container.PYXIS:
        return []
    return [
        f"--container-image={slurm.image}",
        f"--container-mounts={','.join(_mounts(job))}",
        f"--container-workdir={job.workdir}",
    ]


def _mounts(job: Job) -> list[str]:
    own = [f"{path}:{path}" for path in dict.fromkeys((job.workdir, *job.folders))]
    return [*own, *job.site.slurm.mounts]


def _python(job: Job) -> list[str]:
    """Return the words that start Python where the software is."""
    slurm = job.site.slurm
    if slurm.container is not Container.APPTAINER:
        return ["python"]
    binds = [part for mount in _mounts(job) for part in ("--bind", mount)]
    gpus = ["--nv"] if job.site.device.is_gpu else []
    where = ["--pwd", str(job.workdir)]
    return ["apptainer", "exec", *gpus, *binds, *where, slurm.image, "python"]


def submit(job: Job, configs: Mapping[Path, str], cluster: str) -> str:
    """Write script, configurations and cluster file, and return the number that Slurm gives the job.

    Args:
        configs: the text of each run folder's configuration.
        cluster: the text of the cluster file.

    Raises:
        SubmissionError: sbatch is not there or refuses.
    """
    text = render(job)
    for folder, config in configs.items():
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config)
        (folder / "cluster.yaml").write_text(cluster)
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
