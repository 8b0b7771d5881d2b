"""Which global ranks are which executor's, and how they group; no torch.

Ranks are handed out in one order: the trainer's, then the generators', then the reward executor's.
So ranks of the trainer and of the generators are the same in the global world and in the group of
the two that carries weights. Where the two are colocated, generators have the trainer's ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bridge.parallel import GeneratorLayout, TrainerLayout

TRAINER, GENERATOR, REWARD = "trainer", "generator", "reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorPlace:
    """One executor's ranks.

    ``groups`` has one tuple of global ranks for each receiver of its own data (a data-parallel
    rank of the trainer, a replica of the generator); its first rank is the head, which sends and
    receives for it. ``worlds`` are the sets of ranks whose default process group is common.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    worlds: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for world in self.worlds for rank in world))

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(group[0] for group in self.groups)

    def world_of(self, rank: int) -> tuple[int, ...]:
        return next(world for world in self.worlds if rank in world)

    def group_index(self, rank: int) -> int:
        return next(index for index, group in enumerate(self.groups) if rank in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All executors of a run."""

    places: tuple[ExecutorPlace, ...]

    @property
    def size(self) -> int:
        return len({rank for place in self.places for rank in place.ranks})

    def place(self, name: str) -> ExecutorPlace:
        return next(place for place in self.places if place.name == name)

    def places_of(self, rank: int) -> tuple[ExecutorPlace, ...]:
        """Return the place of ``rank``, or its two where executors are colocated."""
        return tuple(place for place in self.places if rank in place.ranks)

    def label(self, rank: int) -> str:
        """Return e.g. ``trainer.1``: the (first) executor and the rank's index in it."""
        place = self.places_of(rank)[0]
        return f"{place.name}.{place.ranks.index(rank)}"


def trainer_place(layout: TrainerLayout, first_rank: int = 0) -> ExecutorPlace:
    """Return the trainer's place from global rank ``first_rank`` on."""
    groups = tuple(
        tuple(first_rank + rank for rank in group) for group in layout.data_parallel_groups()
    )
    world = tuple(range(first_rank, first_rank + layout.world_size))
    return ExecutorPlace(name=TRAINER, groups=groups, worlds=(world,))


def generator_place(layout: GeneratorLayout, first_rank: int) -> ExecutorPlace:
    """Return the generators' place: each replica is a world and a group of its own."""
    size = layout.ranks_per_replica
    replicas = tuple(
        tuple(range(first_rank + index * size, first_rank + (index + 1) * size))
        for index in range(layout.replicas)
    )
    return ExecutorPlace(name=GENERATOR, groups=replicas, worlds=replicas)


def rl_topology(
    trainer: TrainerLayout, generator: GeneratorLayout, *, colocated: bool = False
) -> Topology:
    """Return trainer, generators (``colocated``: on the trainer's ranks) and one reward rank."""
    first = 0 if colocated else trainer.world_size
    last = first + generator.world_size
    reward = ExecutorPlace(name=REWARD, groups=((last,),), worlds=((last,),))
    return Topology(places=(trainer_place(trainer), generator_place(generator, first), reward))


def sft_topology(trainer: TrainerLayout) -> Topology:
    """Return a trainer alone."""
    return Topology(places=(trainer_place(trainer),))


def eval_topology(generator: GeneratorLayout) -> Topology:
    """Return one replica of the generator alone."""
    return Topology(places=(generator_place(GeneratorLayout(tp=generator.tp), 0),))
