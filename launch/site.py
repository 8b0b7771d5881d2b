"""The machines that a run is launched on: links, devices and Slurm's partition, from a cluster file.

Called by the launch command. Links are `megatron_bridge.cluster`'s part of the file; the groups
``device``, ``slurm`` and ``preflight`` are this module's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.errors import ConfigError
from megatron_bridge.cluster import LAUNCH_GROUPS, Cluster, load_cluster

GIB = 2**30
_COUNTS = ("hosts", "spare_hosts", "cpus_per_host", "generator_cpus_per_host", "signal_seconds")


class Container(StrEnum):
    """How ranks come to their software: as `Slurm.venv` says, or in `Slurm.image`."""

    NONE = "none"
    PYXIS = "pyxis"
    APPTAINER = "apptainer"


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank computes with; its memory, and what of its peaks is reached."""

    is_gpu: bool = True
    memory_gib: float = 0.0
    reserve_gib: float = 0.0  # context, NCCL's buffers, graphs and what lies between allocations
    peak_tflops: float = 0.0
    train_efficiency: float = 0.4  # share of the peak that a training step reaches
    memory_bytes_per_second: float = 0.0
    decode_efficiency: float = 0.6  # share of the memory's rate that decoding reaches
    allreduce_seconds: float = 0.0  # of a decoding step's small tensors; two a layer where tp > 1

    @property
    def flops_per_second(self) -> float:
        """What a rank reaches in matrix products."""
        return self.peak_tflops * 1e12 * self.train_efficiency

    @property
    def decode_bytes_per_second(self) -> float:
        """What a rank reads of its memory while it decodes."""
        return self.memory_bytes_per_second * self.decode_efficiency

    @property
    def usable_bytes(self) -> float:
        """The memory without what is kept back."""
        return (self.memory_gib - self.reserve_gib) * GIB


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable of the ranks' environment, with the reason for its value."""

    name: str = ""
    value: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """How a job asks for hosts; an empty text leaves its option out."""

    partition: str = ""
    generator_partition: str = ""  # where not that of the trainer: a heterogeneous job
    account: str = ""
    qos: str = ""
    time: str = "04:00:00"
    hosts: int = 0  # there are; 0: not said
    spare_hosts: int = 0  # held beside the needed ones
    cpus_per_host: int = 0
    generator_cpus_per_host: int = 0  # of generator_partition; 0: as many
    signal_seconds: int = 600  # before the time limit: to finish a step and save
    preflight: bool = True  # examine hosts before the ranks start
    venv: str = ""
    container: Container = Container.NONE
    image: str = ""
    mounts: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)  # shell lines before the ranks, such as modules
    environment: list[Variable] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What is asked of every host before ranks start on it, see docs/preflight.md."""

    list_gpus: str = ""  # a shell command that prints a line a GPU; empty: nvidia-smi, where is_gpu
    timeout_seconds: float = 120.0  # for all hosts to meet
    clock_skew_seconds: float = 1.0
    open_files: int = 4096
    shm_gib: float = 1.0  # of /dev/shm, by which processes of a host exchange
    memory_gib: float = 0.0  # free, of the host
    gpu_used_gib: float = 2.0  # of a GPU, by whatever should not run there
    link_share: float = 0.7  # of nic_bytes_per_second x nic_efficiency; 0: links are not measured
    link_rounds: int = 4  # in each of which every host meets another one


@dataclass(frozen=True, kw_only=True)
class _Groups:
    device: Device = field(default_factory=Device)
    slurm: Slurm = field(default_factory=Slurm)
    preflight: Preflight = field(default_factory=Preflight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A whole cluster file."""

    links: Cluster
    device: Device
    slurm: Slurm
    preflight: Preflight = field(default_factory=Preflight)

    @property
    def link_bytes_per_second(self) -> float:
        """What one NIC is to reach, in each direction."""
        return self.links.nic_bytes_per_second * self.links.nic_efficiency

    def computing_ranks(self, num_ranks: int) -> int:
        """Return how many of ``num_ranks``, which fill hosts in order, compute at the same time."""
        if self.device.is_gpu:
            return num_ranks
        hosts = -(-num_ranks // self.links.ranks_per_host)
        return min(num_ranks, hosts * self.links.cores_per_host)


def load_site(path: Path) -> Site:
    """Read a cluster file.

    Raises:
        PlanError, ConfigError: missing or malformed file, an unknown key, a value that cannot be.
    """
    links = load_cluster(path)
    content = OmegaConf.load(path)
    assert isinstance(content, DictConfig)  # else `load_cluster` had refused it
    given = OmegaConf.masked_copy(content, [key for key in LAUNCH_GROUPS if key in content])
    try:
        groups = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(_Groups), given))
    except OmegaConfBaseException as error:
        raise ConfigError(f"cluster file {path}: {str(error).splitlines()[0]}") from error
    assert isinstance(groups, _Groups)
    _check(path, groups)
    return Site(links=links, device=groups.device, slurm=groups.slurm, preflight=groups.preflight)


def _check(path: Path, groups: _Groups) -> None:
    device, slurm = groups.device, groups.slurm
    for name in ("memory_gib", "peak_tflops", "memory_bytes_per_second"):
        value = getattr(device, name)
        if value <= 0:
            raise ConfigError(f"cluster file {path}: device.{name} is {value}, expected above 0")
    for name in ("train_efficiency", "decode_efficiency"):
        value = getattr(device, name)
        if not 0 < value <= 1:
            raise ConfigError(f"cluster file {path}: device.{name} is {value}, expected in (0, 1]")
    for name in _COUNTS:
        value = getattr(slurm, name)
        if value < 0:
            raise ConfigError(f"cluster file {path}: slurm.{name} is {value}, expected at least 0")
    for item in fields(Preflight):
        value = getattr(groups.preflight, item.name)
        if not isinstance(value, str) and value < 0:
            raise ConfigError(
                f"cluster file {path}: preflight.{item.name} is {value}, expected at least 0"
            )
    if (slurm.container is Container.NONE) == bool(slurm.image):
        raise ConfigError(
            f"cluster file {path}: slurm.container is {slurm.container.value} and slurm.image is "
            f"{slurm.image!r}; expected both or neither"
        )
