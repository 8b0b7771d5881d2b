"""How fast the links between ranks are: a cluster file, and where each rank sits in it; no torch.

Called by the cost model and by who plans for a real machine. A file names what `Cluster` has.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_bridge.errors import PlanError
from megatron_bridge.flows import Seat

# Of a cluster file, but not about links: `launch.site` reads them.
LAUNCH_GROUPS = ("device", "slurm", "preflight")
_ABOVE_ZERO = {
    "ranks_per_host",
    "nics_per_host",
    "nic_bytes_per_second",
    "nic_efficiency",
    "local_bytes_per_second",
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Links of equal hosts; rates are bytes a second in one direction."""

    name: str = ""
    ranks_per_host: int = 1
    nics_per_host: int = 1
    nic_bytes_per_second: float = 1.25e9  # of one NIC
    nic_efficiency: float = 0.92  # share of the rate that weights reach
    local_bytes_per_second: float = 3e9  # of one rank to ranks of its host
    host_bytes_per_second: float = 0.0  # of all ranks of a host together; 0: no limit but theirs
    pack_bytes_per_second: float = 0.0  # of one rank's copies into and out of messages; 0: free
    cores_per_host: int = 0  # that do these copies and feed the links; 0: copies hide behind links
    message_seconds: float = 1e-5  # a rank's own time for one message
    sync_seconds: float = 1e-3  # handshake, checksums and vote

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, str):
                continue
            needed = item.name in _ABOVE_ZERO
            if value < 0 or (needed and not value):
                raise PlanError(
                    f"cluster {self.name!r}: {item.name} is {value}, expected "
                    f"{'above 0' if needed else 'at least 0'}"
                )
        if self.nic_efficiency > 1:
            raise PlanError(
                f"cluster {self.name!r}: nic_efficiency is {self.nic_efficiency}, expected at most 1"
            )
        if self.ranks_per_host % self.nics_per_host:
            raise PlanError(
                f"cluster {self.name!r}: {self.nics_per_host} NICs do not divide among "
                f"{self.ranks_per_host} ranks of a host"
            )

    def seats(self, num_ranks: int) -> tuple[Seat, ...]:
        """Return (host, NIC) of each global rank, hosts filled one after another."""
        share = self.ranks_per_host // self.nics_per_host
        return tuple(
            (rank // self.ranks_per_host, rank % self.ranks_per_host // share)
            for rank in range(num_ranks)
        )


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
        PlanError: missing or malformed file, an unknown key, a value that cannot be.
    """
    if not path.is_file():
        raise PlanError(f"cluster file {path} does not exist")
    try:
        content = OmegaConf.load(path)
        if not isinstance(content, DictConfig):
            raise PlanError(f"cluster file {path}: expected a mapping of keys")
        links = [str(key) for key in content if key not in LAUNCH_GROUPS]
        content = OmegaConf.masked_copy(content, links)
        merged = OmegaConf.merge(OmegaConf.structured(Cluster), content)
        cluster = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError) as error:
        raise PlanError(f"cluster file {path}: {str(error).splitlines()[0]}") from error
    assert isinstance(cluster, Cluster)
    return cluster
