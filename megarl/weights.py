"""When and by which plan a run's weights travel, from its configuration alone; no torch.

Called by the composition root, controller and reward executor on every rank, and by planning
tools, which have no ranks.
"""

from __future__ import annotations

from pathlib import Path

from megarl.config import RunConfig, WeightForwarding
from megarl.errors import ConfigError
from megatron_bridge.cluster import Cluster, load_cluster
from megatron_bridge.cost import Costed, cheapest, choose_plan, costed_plans
from megatron_bridge.flows import Forwarding, Seat
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.layouts.vllm import vllm_side
from megatron_bridge.models.families import load_spec
from megatron_bridge.models.released import load_sizes
from megatron_bridge.plan import PlanPolicy, TransferPlan, plan
from megatron_bridge.side import Side
from megatron_bridge.spec import ModelSpec


def run_spec(config: RunConfig) -> ModelSpec:
    """Return the sizes of the model that is trained: from its folder, or ``model.architecture``.

    Raises:
        ConversionError, ConfigError: a file that cannot be read, or layers that cannot be trained.
    """
    folder, file = Path(config.model.path), config.model.architecture
    if not file or (folder / "config.json").is_file():
        spec = load_spec(folder)
    else:
        spec = load_sizes(Path(file))
    if spec.num_mtp_layers and not config.model.drop_mtp:
        raise ConfigError(
            f"the model has {spec.num_mtp_layers} layers that predict further tokens, which cannot "
            "be trained; model.drop_mtp=true leaves them out of training, generators and export"
        )
    return spec.without_mtp()


def sync_due(tick: int, first: int, last: int, every: int) -> bool:
    """Whether the generators get the weights at a tick: each ``every``-th, the first and the last.

    All ranks must say the same, so it depends on nothing that one of them alone knows.
    """
    return tick % every == 0 or tick in (first, last)


def run_sides(config: RunConfig, spec: ModelSpec, *, te: bool) -> tuple[Side, Side]:
    """Return what the trainer's and the generators' ranks hold; ``te`` as `megatron_side`."""
    layout = config.trainer.layout
    target = vllm_side(
        spec,
        config.generator.layout,
        first_rank=config.first_generator_rank,
        dtype=config.generator_dtype,
    )
    return megatron_side(spec, layout, te=te, dtype=config.model.dtype), target


def run_cluster(config: RunConfig) -> Cluster | None:
    """Return the links that ``weights.cluster`` describes, if it names a file.

    Raises:
        PlanError: a bad cluster file.
    """
    file = config.weights.cluster
    return load_cluster(Path(file)) if file else None


def plan_policy(
    config: RunConfig, cluster: Cluster | None, seats: tuple[Seat, ...] = ()
) -> PlanPolicy:
    """Return what the configuration says of messages and places; forwarding not yet chosen."""
    if cluster and not seats:
        seats = cluster.seats(config.num_engine_ranks)
    return PlanPolicy(message_bytes=int(config.weights.message_mib * 2**20), seats=seats)


def costed_run_plans(
    config: RunConfig, sides: tuple[Side, Side], cluster: Cluster
) -> tuple[dict[Forwarding, Costed], Costed]:
    """Return what each forwarding costs on a cluster, and the one that the configuration takes.

    Raises:
        ConfigError: a forwarding that the generators cannot do.
        PlanError: there is no plan.
    """
    plans = costed_plans(*sides, plan_policy(config, cluster), cluster)
    wanted = config.weights.forwarding
    forwarding = cheapest(plans) if wanted is WeightForwarding.AUTO else Forwarding(wanted.value)
    if forwarding not in plans:
        raise ConfigError(
            f"weights.forwarding is {forwarding.value}, but generators cannot pass on what they "
            "quantise after the transfer; expected none or auto"
        )
    return plans, plans[forwarding]


def weight_plan(
    config: RunConfig, spec: ModelSpec, *, te: bool, seats: tuple[Seat, ...] = ()
) -> TransferPlan:
    """Return the plan from all trainer ranks to all generator ranks; the same on every rank.

    Args:
        seats: host and NIC of each global rank; without them ranks fill the hosts of
            ``weights.cluster`` in order.

    Raises:
        PlanError: a layout that the model does not fit, a forwarding that the layouts do not
            allow, or a bad cluster file.
    """
    source, target = run_sides(config, spec, te=te)
    cluster, wanted = run_cluster(config), config.weights.forwarding
    policy = plan_policy(config, cluster, seats)
    if wanted is WeightForwarding.AUTO and cluster:
        return choose_plan(source, target, policy, cluster)
    direct = plan(source, target, policy)
    if wanted is not WeightForwarding.AUTO:
        return direct.with_forwarding(Forwarding(wanted.value))
    more = len(target.ranks) > len(source.ranks)
    return direct.with_forwarding(Forwarding.RING) if more and not direct.unforwardable else direct
