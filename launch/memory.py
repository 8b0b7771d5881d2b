"""Bytes of each rank's memory, by what they hold, and whether they fit; pure.

Called by the launch command. Weights are counted from the manifests by which they travel; what
Megatron adds to them are float32 gradients (``grad_reduce_in_fp32``), and float32 copies with two
moments as its optimizers hold them: 18 bytes a bfloat16 parameter, or 6 + 12 / d over d
data-parallel ranks with the distributed optimizer (Megatron-LM's ``theoretical_memory_usage``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from launch.activations import stage_bytes
from launch.site import GIB, Device
from megarl.config import MIN_BATCHED_TOKENS, RunConfig
from megarl.errors import ConfigError
from megatron_bridge.operations import ITEMSIZE
from megatron_bridge.side import Side, Variant
from megatron_bridge.spec import ModelSpec

_FLOAT32_BYTES = 4
_MOMENTS_BYTES = 8  # Adam's two, float32
_SAMPLER_COPIES = 3  # logits of the sampled positions in float32: raw, scaled, sorted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank."""

    rank: int
    executor: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0  # the frozen starting model of a KL term
    activations: int = 0
    kv_cache: int = 0
    staging: int = 0  # DDMA's slots
    reserve: int = 0  # what the cluster file keeps back

    @property
    def total(self) -> int:
        return sum(amount for _, amount in self.amounts())

    def amounts(self) -> Iterator[tuple[str, int]]:
        """Yield (what, bytes)."""
        for item in fields(self)[2:]:
            yield item.name, getattr(self, item.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds of the model."""

    nbytes: int = 0
    dense: int = 0  # parameters, without those of experts
    experts: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(
            nbytes=self.nbytes + other.nbytes,
            dense=self.dense + other.dense,
            experts=self.experts + other.experts,
        )


def _count(variant: Variant, dtype: str) -> Held:
    nbytes = dense = experts = 0
    for param in variant:
        size = 1
        for length in param.shape:
            size *= length
        nbytes += size * ITEMSIZE[param.dtype or dtype]
        if "experts." in param.name and "shared_experts" not in param.name:
            experts += size
        else:
            dense += size
    return Held(nbytes=nbytes, dense=dense, experts=experts)


def held_by_rank(side: Side) -> dict[int, Held]:
    """Return what each rank of a side holds, padding included."""
    counted: dict[int, Held] = {}  # blocks of one kind share their variants
    found: dict[int, Held] = {}
    for block in side.blocks:
        for variant, ranks in zip(block.variants, block.ranks, strict=True):
            if id(variant) not in counted:
                counted[id(variant)] = _count(variant, side.dtype)
            for rank in ranks:
                found[rank] = found.get(rank, Held()) + counted[id(variant)]
    return found


def optimizer_bytes(config: RunConfig, dense: int, experts: int) -> int:
    """Return the bytes of Adam's states, and of float32 weights where the model's are narrower."""
    layout = config.trainer.layout
    copy = _FLOAT32_BYTES if config.model.dtype != "float32" else 0
    replicas, expert_replicas = 1, 1
    if config.trainer.distributed_optimizer:
        replicas = layout.dp * layout.cp
        expert_replicas = layout.tp * replicas // (layout.ep * layout.etp)
    return (_MOMENTS_BYTES + copy) * (-(-dense // replicas) + -(-experts // expert_replicas))


def cached_elements(spec: ModelSpec, tp: int = 1) -> int:
    """Return how many elements a token's keys and values have in one layer of one rank."""
    if spec.mla:
        return spec.mla.kv_lora_rank + spec.mla.rope_head_dim
    return 2 * -(-spec.num_kv_heads // tp) * spec.head_dim


def kv_bytes_per_token(config: RunConfig, spec: ModelSpec) -> float:
    """Return the bytes that a token's keys and values take on one rank of a replica."""
    layout, itemsize = config.generator.layout, ITEMSIZE[config.generator_dtype]
    return itemsize * cached_elements(spec, layout.tp) * spec.num_layers / layout.pp


def _trainer_memory(config: RunConfig, spec: ModelSpec, side: Side) -> Iterator[RankMemory]:
    layout = config.trainer.layout
    activations = [stage_bytes(config, spec, stage) for stage in range(layout.pp)]
    for rank, held in held_by_rank(side).items():
        yield RankMemory(
            rank=rank,
            executor="trainer",
            weights=held.nbytes,
            gradients=_FLOAT32_BYTES * (held.dense + held.experts),
            optimizer=optimizer_bytes(config, held.dense, held.experts),
            reference=held.nbytes if config.algorithm.kl_loss_coef > 0 else 0,
            activations=activations[layout.coordinate(rank).pp],
        )


def _generator_memory(config: RunConfig, spec: ModelSpec, side: Side) -> Iterator[RankMemory]:
    layout, generator = config.generator.layout, config.generator
    tokens = max(MIN_BATCHED_TOKENS, generator.max_running_sequences)
    widest = max(spec.ffn_size, spec.moe_ffn_size * spec.experts_per_token) / layout.tp
    step = tokens * ITEMSIZE[config.generator_dtype] * (4 * spec.hidden_size + 3 * widest)
    logits = generator.max_running_sequences * spec.vocab_size * _FLOAT32_BYTES * _SAMPLER_COPIES
    for rank, held in held_by_rank(side).items():
        yield RankMemory(
            rank=rank,
            executor="generator",
            weights=held.nbytes,
            activations=round(step + logits),
            kv_cache=int(generator.kv_cache_gib * GIB),
        )


def memory_table(
    config: RunConfig, spec: ModelSpec, sides: tuple[Side, Side], device: Device
) -> tuple[RankMemory, ...]:
    """Return each engine rank's bytes at their most, ordered by rank."""
    weights = config.weights
    staging = int(weights.slots * max(weights.chunk_mib, weights.message_mib) * 2**20)
    found: dict[int, RankMemory] = {}
    source, target = sides
    engines = (*_trainer_memory(config, spec, source), *_generator_memory(config, spec, target))
    for one in engines:
        found[one.rank] = _joined(found[one.rank], one) if one.rank in found else one
    extra = {"staging": staging, "reserve": int(device.reserve_gib * GIB)}
    return tuple(replace(found[rank], **extra) for rank in sorted(found))


def _joined(first: RankMemory, second: RankMemory) -> RankMemory:
    """Return the memory of a rank that is both a trainer's and a generator's."""
    added = dict(second.amounts())
    sums = {name: amount + added[name] for name, amount in first.amounts()}
    return replace(first, executor=f"{first.executor} + {second.executor}", **sums)


def check_memory(
    config: RunConfig, spec: ModelSpec, table: tuple[RankMemory, ...], device: Device
) -> None:
    """Refuse what does not fit.

    Raises:
        ConfigError: the fullest rank of an executor, its parts, and what there is.
    """
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    needed = longest * kv_bytes_per_token(config, spec)
    if config.generator.kv_cache_gib * GIB < needed:
        raise ConfigError(
            f"generator.kv_cache_gib is {config.generator.kv_cache_gib}, expected at least "
            f"{needed / GIB:.3f}: a sequence of {longest} tokens must fit"
        )
    fullest = max(table, key=lambda one: one.total)
    if fullest.total <= device.memory_gib * GIB:
        return
    parts = ", ".join(f"{name} {part / GIB:.1f}" for name, part in fullest.amounts() if part)
    raise ConfigError(
        f"rank {fullest.rank} ({fullest.executor}) needs {fullest.total / GIB:.1f} GiB ({parts}), "
        f"the device has {device.memory_gib:.1f}: "
        f"{fullest.total / GIB - device.memory_gib:.1f} GiB too many"
    )
