"""Everything that can be said of a launch before it: placement, memory, transfer, step time.

Called by the launch command. Imports no engine and no torch, reads no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from launch.memory import RankMemory, check_memory, held_by_rank, memory_table
from launch.placement import Placement, place
from launch.predict import MeanLengths, StepPrediction, predict_step
from launch.site import GIB, Site
from megarl.config import RunConfig
from megarl.weights import costed_run_plans, run_sides, run_spec
from megatron_bridge.cost import Costed, Floors, floors
from megatron_bridge.models.checks import check_generator_layout, check_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What would run, whether it fits, how long it should take and how the weights travel."""

    placement: Placement
    memory: tuple[RankMemory, ...]
    transfer: Costed
    floors: Floors
    step: StepPrediction
    lengths: MeanLengths

    @property
    def fullest(self) -> RankMemory:
        return max(self.memory, key=lambda one: one.total)

    def figures(self) -> dict[str, object]:
        """Return what ``--json`` prints, without the job's script."""
        train_idle, generate_idle = self.step.idle_ratios
        load = self.transfer.load
        return {
            "fits": True,  # what does not is refused
            "num_hosts": self.placement.num_hosts,
            "spare_hosts": self.placement.spare_hosts,
            "num_ranks": len(self.placement.seats),
            "hosts_per_replica": self.placement.hosts_per_replica,
            "rail_aligned": self.placement.rail_aligned,
            "memory_gib_max": self.fullest.total / GIB,
            "memory_gib": [
                {"ranks": list(ranks), "executor": one.executor, "total": one.total / GIB}
                | {name: amount / GIB for name, amount in one.amounts()}
                for ranks, one in memory_rows(self.memory)
            ],
            "predicted_step_seconds": self.step.step_seconds,
            "predicted_sync_seconds": self.step.sync_seconds,
            "sync_floor_seconds": self.floors.seconds,
            "prediction": asdict(self.step)
            | {"train_idle_ratio": train_idle, "generate_idle_ratio": generate_idle},
            "lengths": asdict(self.lengths),
            "forwarding": self.transfer.plan.policy.forwarding.value,
            "transfer_bytes": sum(load.sent.values()),
        }


def memory_rows(table: Sequence[RankMemory]) -> list[tuple[tuple[int, int], RankMemory]]:
    """Return ((first rank, last rank), memory) of neighbours that hold as many bytes of each."""
    rows: list[tuple[tuple[int, int], RankMemory]] = []
    for _, group in groupby(table, key=lambda one: (one.executor, tuple(one.amounts()))):
        alike = list(group)
        rows.append(((alike[0].rank, alike[-1].rank), alike[0]))
    return rows


def dry_run(config: RunConfig, site: Site, lengths: MeanLengths) -> DryRun:
    """Study a launch.

    Raises:
        ConfigError, PlanError, ConversionError: what cannot be placed, does not fit or cannot be
            planned.
    """
    spec = run_spec(config)
    check_layout(spec, config.trainer.layout)
    check_generator_layout(spec, config.generator.layout)
    placement = place(
        config,
        site.links.ranks_per_host,
        spare_hosts=site.slurm.spare_hosts,
        num_hosts=site.slurm.hosts,
    )
    sides = run_sides(config, spec, te=site.device.is_gpu)
    memory = memory_table(config, spec, sides, site.device)
    check_memory(config, spec, memory, site.device)
    _, transfer = costed_run_plans(config, sides, site.links)
    held = max(held_by_rank(sides[1]).values(), key=lambda one: one.nbytes)
    draft = predict_step(config, spec, site.device, held, lengths)
    return DryRun(
        placement=placement,
        memory=memory,
        transfer=transfer,
        floors=floors(transfer.plan, site.links),
        step=draft.with_sync(transfer.prediction.seconds),
        lengths=lengths,
    )
