"""The cases of the weight-transfer benchmark: models, layouts, where ranks sit, floors; no torch.

Called by the benchmark's driver, its ranks and its schemes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_bridge.box import Box
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.layouts.vllm import vllm_side
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.side import Side
from megatron_bridge.spec import ModelSpec, RankManifest

SCHEMES = ("ddma_collective", "ddma_ipc", "mcore", "gather_broadcast", "gather_chain")
DTYPE, ITEMSIZE = "bfloat16", 2  # of all parameters and of the wire


class Unavailable(Exception):
    """A scheme cannot run a case; the text says why, the same on every rank."""


LLAMA = ModelSpec(  # 62 M parameters, 124 MB; on loopback four times that, see `large`
    family="llama",
    vocab_size=8192,
    hidden_size=1024,
    ffn_size=2816,
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    norm_eps=1e-5,
    rope_theta=1e4,
    max_positions=2048,
    tied_embeddings=False,
)
MOE = replace(  # 72 M parameters, 143 MB
    LLAMA,
    family="qwen3_moe",
    qk_norm=True,
    num_experts=8,
    experts_per_token=2,
    moe_ffn_size=512,
)
_TINY = {"vocab_size": 512, "hidden_size": 128, "ffn_size": 256, "num_heads": 8, "head_dim": 16}


def tiny(spec: ModelSpec) -> ModelSpec:
    """Return a spec of the same kind whose transfer takes no time; for tests."""
    return replace(spec, **_TINY, moe_ffn_size=64 if spec.num_experts else 0)


_LARGE = {"vocab_size": 16384, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8}


def large(spec: ModelSpec, replicas: int) -> ModelSpec:
    """Return a spec of the same kind with four times the parameters, or eight for one replica.

    At least a gigabyte then moves, for a tenth of a second: handshakes are not what is measured.
    """
    layers = spec.num_layers * (2 if replicas == 1 else 1)
    experts = 1024 if spec.num_experts else 0
    return replace(spec, **_LARGE, num_layers=layers, ffn_size=5632, moe_ffn_size=experts)


@dataclass(frozen=True)
class Case:
    """One model, its two layouts and the hosts; trainer ranks come first."""

    name: str
    trainer: TrainerLayout
    generator: GeneratorLayout
    spec: ModelSpec = LLAMA
    forwarding: bool = False  # more receivers than senders can serve: they should pass bytes on
    ranks_per_host: int = 1

    @property
    def trainer_ranks(self) -> range:
        return range(self.trainer.world_size)

    @property
    def generator_ranks(self) -> range:
        return range(self.trainer.world_size, self.num_ranks)

    @property
    def num_ranks(self) -> int:
        return self.trainer.world_size + self.generator.world_size

    def host_of(self, rank: int) -> int:
        """Return a rank's host; the two executors share none."""
        first = self.trainer.world_size
        if rank < first:
            return rank // self.ranks_per_host
        trainer_hosts = -(-first // self.ranks_per_host)
        return trainer_hosts + (rank - first) // self.ranks_per_host

    @property
    def num_hosts(self) -> int:
        return self.host_of(self.num_ranks - 1) + 1

    @cached_property
    def source(self) -> Side:
        """What the trainer ranks hold, with Transformer Engine's names."""
        return megatron_side(self.spec, self.trainer, te=True, dtype=DTYPE)

    @cached_property
    def target(self) -> Side:
        """What the generator ranks hold."""
        first = self.trainer.world_size
        return vllm_side(self.spec, self.generator, first_rank=first, dtype=DTYPE)

    @cached_property
    def sources(self) -> tuple[RankManifest, ...]:
        return self.source.manifests()

    @cached_property
    def targets(self) -> tuple[RankManifest, ...]:
        return self.target.manifests()


_TP2_DP2 = TrainerLayout(tp=2, dp=2)
_FORWARDING = Case(
    "tp2dp2->tp2x4", _TP2_DP2, GeneratorLayout(tp=2, replicas=4), LLAMA, forwarding=True
)
CASES = {
    case.name: case
    for case in (
        Case("tp2dp2->tp1x4", _TP2_DP2, GeneratorLayout(tp=1, replicas=4)),
        Case("tp1dp4->tp2x2", TrainerLayout(dp=4), GeneratorLayout(tp=2, replicas=2)),
        Case("tp2pp2dp2->tp4", TrainerLayout(tp=2, pp=2, dp=2), GeneratorLayout(tp=4)),
        _FORWARDING,
        replace(_FORWARDING, name="tp2dp2->tp2x4 two ranks a host", ranks_per_host=2),
        Case(
            "moe tp2ep2etp2->tp2",
            TrainerLayout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
            GeneratorLayout(tp=2),
            MOE,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank is told."""

    case: str
    is_tiny: bool
    rank: int
    address: str  # of rank 0, which hosts the store
    port: int
    interface: str  # that gloo listens on
    host: str  # of the miniature cluster; "" for this machine, whose memory all ranks then share
    rate_mbit: float  # of a host's NIC; 0: there are none
    repeats: int
    result: str  # path of the file that rank 0 writes
    log: str  # path of the file for what the rank says

    def chosen(self) -> Case:
        case = CASES[self.case]
        if self.is_tiny:
            return replace(case, spec=tiny(case.spec))
        if self.rate_mbit:
            return case
        # All ranks share one memory: nobody has to pass weights on.
        spec = large(case.spec, case.generator.replicas)
        return replace(case, spec=spec, forwarding=False)


def num_bytes(manifest: RankManifest) -> int:
    """Return the bytes of weights, without padding, that a rank holds."""
    return sum(shard.box.numel for p in manifest.params for shard in p.shards) * ITEMSIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Bytes that the busiest NIC cannot avoid: it lower-bounds every scheme on a switch."""

    unicast_bytes: int  # every copy of a region leaves a trainer's NIC
    forwarding_bytes: int  # receivers may pass regions on, and ranks of a host share what arrives


def floor_of(case: Case) -> Floor:
    """Return the floors from the manifests alone.

    Out of a set of hosts that alone hold some regions goes at least each of these; into a
    generator's host what its ranks hold.
    """
    arriving: dict[int, int] = defaultdict(int)
    distinct: dict[int, set[tuple[str, Box]]] = defaultdict(set)
    leaving: dict[frozenset[int], list[int]] = defaultdict(lambda: [0, 0])
    seen: set[tuple[str, Box]] = set()
    held = _holders(case)
    for manifest in case.targets:
        host = case.host_of(manifest.rank)
        for shard in (shard for param in manifest.params for shard in param.shards):
            for box, hosts in held[shard.tensor].items():
                region = box.intersect(shard.box)
                if region is None:
                    continue
                size, key = region.numel * ITEMSIZE, (shard.tensor, region)
                arriving[host] += size
                distinct[host].add(key)
                leaving[frozenset(hosts)][0] += size
                leaving[frozenset(hosts)][1] += size if key not in seen else 0
                seen.add(key)
    once = [sum(box.numel for _, box in keys) * ITEMSIZE for keys in distinct.values()]
    return Floor(
        unicast_bytes=max(*arriving.values(), *_spread(leaving, 0)),
        forwarding_bytes=max(*once, *_spread(leaving, 1)),
    )


def _holders(case: Case) -> dict[str, dict[Box, set[int]]]:
    held: dict[str, dict[Box, set[int]]] = defaultdict(lambda: defaultdict(set))
    for manifest in case.sources:
        for shard in (shard for param in manifest.params for shard in param.shards):
            held[shard.tensor][shard.box].add(case.host_of(manifest.rank))
    return held


def _spread(leaving: Mapping[frozenset[int], list[int]], kind: int) -> list[int]:
    """Return, for each set of hosts, the even share of what only they hold."""
    everyone = frozenset[int]().union(*leaving)
    return [
        sum(sizes[kind] for holders, sizes in leaving.items() if holders <= hosts) // len(hosts)
        for hosts in {*leaving, everyone}
    ]
