"""Which host and seat each rank gets, and why that is no good where it is not; pure.

Called by the launch command. Ranks fill hosts in the order of `megarl.topology`: the trainer's,
the generators', and the reward executor's, which needs no device, beside the last of them. So the
hosts of `Cluster.seats`, by which weights are planned, are these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from megarl.config import RunConfig
from megarl.errors import ConfigError
from megarl.topology import GENERATOR, REWARD, TRAINER, Topology, rl_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank's place; ``parts`` name what it is, both executors where they are colocated."""

    rank: int
    host: int
    local_rank: int
    parts: tuple[str, ...]  # such as "trainer stage 3 dp 1", "generator 7"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All ranks on their hosts."""

    seats: tuple[Seat, ...]  # by rank
    num_hosts: int
    spare_hosts: int
    devices_per_host: int
    hosts_per_replica: int  # above 1 where the generators' layout asks for more than a host has
    rail_aligned: bool  # pipeline neighbours on two hosts use the same NIC of each

    def on_host(self, host: int) -> tuple[Seat, ...]:
        return tuple(seat for seat in self.seats if seat.host == host)


def place(
    config: RunConfig, devices_per_host: int, *, spare_hosts: int = 0, num_hosts: int = 0
) -> Placement:
    """Place the ranks of a run.

    Args:
        devices_per_host: ranks that a host has devices for; they share its fast links.
        spare_hosts: held for the place of one that fails.
        num_hosts: there are; 0: not known.

    Raises:
        ConfigError: tensor-parallel ranks or a replica would cross hosts, or hosts are too few.
    """
    trainer, generator = config.trainer.layout, config.generator.layout
    topology = rl_topology(trainer, generator, colocated=config.is_colocated)
    hosts = -(-config.num_engine_ranks // devices_per_host)
    last = config.num_engine_ranks - 1
    seats = [
        Seat(
            rank=rank,
            host=rank // devices_per_host,
            local_rank=rank % devices_per_host,
            parts=_parts(config, topology, rank),
        )
        for rank in range(config.num_engine_ranks)
    ]
    beside = last % devices_per_host + 1
    seats.append(Seat(rank=last + 1, host=hosts - 1, local_rank=beside, parts=(REWARD,)))
    _check_tensor_parallel(trainer.tp, trainer.world_size, devices_per_host)
    per_replica = _check_replicas(topology, generator.ranks_per_replica, devices_per_host)
    if num_hosts and hosts + spare_hosts > num_hosts:
        raise ConfigError(
            f"{config.num_engine_ranks} ranks need {hosts} hosts of {devices_per_host}, with "
            f"{spare_hosts} spare {hosts + spare_hosts}; the cluster has {num_hosts}"
        )
    return Placement(
        seats=tuple(seats),
        num_hosts=hosts,
        spare_hosts=spare_hosts,
        devices_per_host=devices_per_host,
        hosts_per_replica=per_replica,
        rail_aligned=_is_rail_aligned(config, devices_per_host),
    )


def trainer_hosts(placement: Placement) -> int:
    """Return how many hosts, the first ones, the trainer has; the generators have the others.

    Raises:
        ConfigError: a host has ranks of both.
    """
    for host in range(placement.num_hosts):
        if GENERATOR in (found := _executors(placement.on_host(host))):
            if TRAINER in found:
                raise ConfigError(
                    f"host {host} has trainer and generator ranks; expected a trainer of whole hosts "
                    f"of {placement.devices_per_host} for a partition of the generators' own"
                )
            return host
    return placement.num_hosts


def _parts(config: RunConfig, topology: Topology, rank: int) -> tuple[str, ...]:
    parts: list[str] = []
    for executor in topology.places_of(rank):
        if executor.name == TRAINER:
            at = config.trainer.layout.coordinate(rank)
            parts.append(f"{TRAINER} stage {at.pp} dp {at.dp}")
        elif executor.name == GENERATOR:
            parts.append(f"{GENERATOR} {executor.group_index(rank)}")
    return tuple(parts)


def _check_tensor_parallel(tp: int, num_ranks: int, devices: int) -> None:
    """Tensor-parallel ranks exchange activations in each layer: only a host's links carry that."""
    for first in range(0, num_ranks, tp):
        if first // devices != (first + tp - 1) // devices:
            raise ConfigError(
                f"trainer.layout.tp is {tp}: ranks {first} to {first + tp - 1} would cross hosts; "
                f"expected a divisor of the {devices} devices of a host"
            )


def _check_replicas(topology: Topology, size: int, devices: int) -> int:
    """Return how many hosts a replica has: as few as can be, and whole ones where it needs more."""
    expected = -(-size // devices)
    for index, replica in enumerate(topology.place(GENERATOR).groups):
        hosts = replica[-1] // devices - replica[0] // devices + 1
        if hosts != expected or (expected > 1 and (size % devices or replica[0] % devices)):
            raise ConfigError(
                f"generator replica {index} of {size} ranks, {replica[0]} to {replica[-1]}, would "
                f"lie on {hosts} hosts of {devices} devices beside others; expected "
                "generator.layout.tp x pp to divide a host's devices or to be whole hosts, and a "
                "trainer that leaves it a place to start at"
            )
    return expected


def _is_rail_aligned(config: RunConfig, devices: int) -> bool:
    layout = config.trainer.layout
    stage = layout.world_size // layout.pp
    return all(
        rank % devices == (rank + stage) % devices
        for rank in range(layout.world_size - stage)
        if rank // devices != (rank + stage) // devices
    )


# --- The picture in text ----------------------------------------------------------------------


def picture(placement: Placement, most_hosts: int = 12) -> list[str]:
    """Return a line for each host; of more than ``most_hosts`` of one executor some at both ends."""
    lines: list[str] = []
    hosts = range(placement.num_hosts)
    for _, group in groupby(hosts, key=lambda host: _executors(placement.on_host(host))):
        alike = [_line(placement, host) for host in group]
        if len(alike) > most_hosts:
            half = most_hosts // 2
            alike[half:-half] = [f"     ... | {len(alike) - 2 * half} more"]
        lines += alike
    if placement.spare_hosts:
        lines.append(f"   spare | {placement.spare_hosts} more")
    return lines


def _executors(seats: tuple[Seat, ...]) -> set[str]:
    """Return which engines a host has ranks of."""
    parts = {part.split()[0] for seat in seats for part in seat.parts}
    return parts - {REWARD}


def _line(placement: Placement, host: int) -> str:
    return f"host {host:4d} | " + " | ".join(_runs(placement.on_host(host)))


def _runs(seats: tuple[Seat, ...]) -> Iterator[str]:
    """Yield neighbours of one part together: "0-7 trainer stage 0 dp 0"."""
    for parts, group in groupby(seats, key=lambda seat: seat.parts):
        local = [seat.local_rank for seat in group]
        span = f"{local[0]}-{local[-1]}" if len(local) > 1 else f"{local[0]}"
        yield f"{span} {' + '.join(parts)}"
