"""Plan a run's weight transfers on a laptop: ``python -m tools.plan_reshard CONFIG [key=value ...]``.

Makes both sides from the configuration, plans, proves, and predicts the seconds of a transfer on
the cluster that ``weights.cluster`` describes. Needs no GPU, no weights and no ranks, and imports no
torch. What cannot be planned is one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod

from megarl.config import RunConfig
from megarl.config_file import load_config
from megarl.errors import ConfigError
from megarl.weights import costed_run_plans, plan_policy, run_cluster, run_sides, run_spec
from megatron_bridge.cluster import Cluster
from megatron_bridge.cost import Costed, Floors, floors, link_loads
from megatron_bridge.errors import BridgeError
from megatron_bridge.flows import Forwarding, forwards, single_stripes, unicast_stripes
from megatron_bridge.layouts.kinds import kinds_of
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.layouts.vllm import vllm_side
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.plan import PlanPolicy, TransferPlan, plan
from megatron_bridge.proof import prove_coverage, prove_stripes
from megatron_bridge.routes import build_routes
from megatron_bridge.side import Side
from megatron_bridge.spec import ModelSpec

_REPEATS = 3
_CACHES = (megatron_side, vllm_side, kinds_of, canonical_tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A configuration's plans, the chosen one of them, and how long planning took."""

    config: RunConfig
    spec: ModelSpec
    cluster: Cluster
    plans: dict[Forwarding, Costed]
    chosen: Costed
    floors: Floors
    wall_seconds: float  # of the whole plan and its proof
    process_seconds: float  # the same, without the time others had the core

    @property
    def num_stages(self) -> int:
        return self.config.trainer.layout.pp


def make_study(config: RunConfig) -> Study:
    """Plan a configuration in every way its generators can pass weights on.

    Raises:
        ConfigError: no cluster file, or a forwarding that the generators cannot do.
        BridgeError: a model, a layout or a cluster that cannot be.
    """
    cluster, spec = run_cluster(config), run_spec(config)
    if cluster is None:
        raise ConfigError(
            "weights.cluster is empty; expected a file of link speeds, such as "
            "weights.cluster=configs/clusters/dgx_h100.yaml"
        )
    wall, process = time.perf_counter(), time.process_time()
    source, target = _fresh_sides(config, spec)
    plan(source, target, plan_policy(config, cluster))
    wall, process = time.perf_counter() - wall, time.process_time() - process
    plans, chosen = costed_run_plans(config, (source, target), cluster)
    return Study(
        config=config,
        spec=spec,
        cluster=cluster,
        plans=plans,
        chosen=chosen,
        floors=floors(chosen.plan, cluster),
        wall_seconds=wall,
        process_seconds=process,
    )


def _fresh_sides(config: RunConfig, spec: ModelSpec) -> tuple[Side, Side]:
    """Return the sides as a process makes them that has made none before."""
    for cached in _CACHES:
        cached.cache_clear()
    return run_sides(config, spec, te=True)


def sampled_ranks(study: Study) -> tuple[int, ...]:
    """Return the first and last rank of each side and two between."""
    found: set[int] = set()
    for side in (study.chosen.plan.source, study.chosen.plan.target):
        ranks = side.ranks
        found |= {ranks[(len(ranks) - 1) * third // 3] for third in range(4)}
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """How long one rank takes to plan its own messages, from the configuration on."""

    rank: int
    wall_seconds: float
    process_seconds: float
    num_messages: int
    largest_message_bytes: int


def time_rank(study: Study, policy: PlanPolicy, rank: int) -> RankTiming:
    """Do what ``rank`` does that knows the policy: sides, routes, its own messages."""
    wall, process = time.perf_counter(), time.process_time()
    source, target = _fresh_sides(study.config, study.spec)
    routes = tuple(build_routes(source, target, rank))
    messages = TransferPlan(source, target, policy, routes).messages(rank)
    wall, process = time.perf_counter() - wall, time.process_time() - process
    return RankTiming(
        rank=rank,
        wall_seconds=wall,
        process_seconds=process,
        num_messages=len(messages),
        largest_message_bytes=max((message.nbytes for message in messages), default=0),
    )


def _best(study: Study, policy: PlanPolicy, rank: int) -> RankTiming:
    """Return the shortest of a few timings: others use the core, too."""
    gc.collect()
    gc.freeze()  # a rank of its own would not have the study's objects to look through
    timings = [time_rank(study, policy, rank) for _ in range(_REPEATS)]
    gc.unfreeze()
    return replace(
        timings[0],
        wall_seconds=min(timing.wall_seconds for timing in timings),
        process_seconds=min(timing.process_seconds for timing in timings),
    )


def is_exact(whole: TransferPlan) -> bool:
    """Prove a plan anew, and count: generators receive as many elements as they hold.

    Raises:
        PlanError: the proof fails.
    """
    prove_coverage(whole.source, whole.target, whole.routes, whole.policy.unread)
    prove_stripes(whole.routes, whole.policy.seats)
    received = sum(
        len(route.targets) * sum(region.box.numel for region in part.regions)
        for route in whole.routes
        for part in route.parts
    )
    held = sum(
        len(ranks) * sum(shard.box.numel for param in variant for shard in param.shards)
        for block in whole.target.blocks
        for variant, ranks in zip(block.variants, block.ranks, strict=True)
    )
    return received == held


def count_traffic(whole: TransferPlan) -> tuple[int, int]:
    """Return the numbers of operations and of messages of all ranks together."""
    operations = messages = 0
    for route in whole.routes:
        if whole.is_forwarded(route):
            hops = 1 + sum(1 for _ in forwards(whole.policy.forwarding, 0, len(route.targets)))
            stripes = single_stripes(route)
        else:
            hops, stripes = 1, unicast_stripes(route, whole.policy.seats)
        for _, _, low, high in stripes:
            pieces = whole.pieces(route, low, high)
            messages += hops * len(pieces)
            operations += hops * sum(map(len, pieces))
    return operations, messages


def imbalances(study: Study) -> tuple[float, float]:
    """Return the busiest sender's bytes over the trainers' mean, and what stages alone make of it."""
    layout, sent = study.config.trainer.layout, study.chosen.load.sent
    by_stage: dict[int, int] = defaultdict(int)
    for rank in range(layout.world_size):
        by_stage[layout.coordinate(rank).pp] += sent[rank]
    mean = sum(by_stage.values()) / layout.world_size
    busiest = max(sent[rank] for rank in range(layout.world_size))
    stage = max(by_stage.values()) / (layout.world_size // layout.pp)
    if not mean:  # every trainer rank gives only itself
        return 1.0, 1.0
    return busiest / mean, stage / mean


def _extremes(values: Sequence[int]) -> dict[str, float]:
    return {"max": max(values), "mean": sum(values) / len(values), "min": min(values)}


def spread(study: Study) -> dict[str, dict[str, float]]:
    """Return the bytes of ranks and NICs: largest, mean, smallest."""
    load, whole = study.chosen.load, study.chosen.plan
    trainers, generators = whole.source.ranks, whole.target.ranks
    found = {
        "trainer_sent": _extremes([load.sent[rank] for rank in trainers]),
        "generator_received": _extremes([load.received[rank] for rank in generators]),
        "generator_sent": _extremes([load.sent[rank] for rank in generators]),
    }
    nics = link_loads(load, study.cluster).nics
    for direction in ("out", "in"):
        used = [nbytes for (_, _, way), nbytes in nics.items() if way == direction]
        found[f"nic_{direction}"] = _extremes(used or [0])
    return found


def figures(study: Study) -> dict[str, object]:
    """Return everything that ``--json`` prints."""
    whole = study.chosen.plan
    timings = [_best(study, whole.policy, rank) for rank in sampled_ranks(study)]
    operations, messages = count_traffic(whole)
    imbalance, imbalance_floor = imbalances(study)
    weights = study.config.weights
    largest = max(timing.largest_message_bytes for timing in timings)
    return {
        "name": study.config.name,
        "model_parameters": sum(prod(t.shape) for t in canonical_tensors(study.spec)),
        "coverage_exact": is_exact(whole),
        "plan_seconds": study.wall_seconds,
        "plan_process_seconds": study.process_seconds,
        "rank_plan_seconds_max": max(timing.wall_seconds for timing in timings),
        "rank_plan_process_seconds_max": max(timing.process_seconds for timing in timings),
        "rank_messages": {str(timing.rank): timing.num_messages for timing in timings},
        "forwarding": whole.policy.forwarding.value,
        "forwarding_seconds": {
            name.value: costed.prediction.seconds for name, costed in study.plans.items()
        },
        "predicted_seconds": study.chosen.prediction.seconds,
        "prediction": asdict(study.chosen.prediction),
        "floor_seconds": study.floors.seconds,
        "floors": asdict(study.floors),
        "imbalance": imbalance,
        "imbalance_floor": imbalance_floor,
        "bytes_total": sum(study.chosen.load.sent.values()),
        "num_operations": operations,
        "num_messages": messages,
        "largest_message_bytes": largest,
        "staging_bytes_max": int(weights.slots * max(weights.chunk_mib * 2**20, largest)),
        "bytes": spread(study),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser(prog="plan_reshard", description=__doc__)
    parser.add_argument("config", help="YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replace single keys")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="draw who sends how much to whom")
    parser.add_argument(
        "--peer", action="store_true", help="plan with Megatron-Core's resharding, too"
    )
    given = parser.parse_args(arguments)
    try:
        config = load_config(given.config, tuple(given.overrides))
        study = make_study(config)
        found = figures(study)
        if given.peer:
            from tools.mcore_planner import peer_figures  # imports torch

            found["peer"] = asdict(peer_figures(study.spec, config))
    except (BridgeError, ConfigError) as error:
        print(f"plan_reshard: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if given.plot:
        from tools.reshard_report import draw  # imports matplotlib

        draw(study, found, given.plot)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        from tools.reshard_report import show

        show(study, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
