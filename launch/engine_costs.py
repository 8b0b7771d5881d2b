"""What training and decoding cost on a layout, modelled from a device's peaks: seconds and bytes.

Called by the advisor, which asks for thousands of layouts: so these are sums over a whole model, where
`memory` counts a chosen layout's tensors one by one. Communication inside an engine is part of the
shares of the peaks that a cluster file states, but for the all-reduces of decoding.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, prod

from launch.decoding import Replica, Response, StepSeconds, seconds_to_empty
from launch.lengths import Lengths
from launch.memory import cached_elements
from launch.site import Device
from megarl.errors import ConfigError
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.models.flops import training_flops
from megatron_bridge.spec import ModelSpec

_WEIGHT_BYTES = 2
_GRADIENT_BYTES = 4
_OPTIMIZER_BYTES = 12  # float32 copy and Adam's two moments, divided over data-parallel ranks
_LAYER_BYTES = 34  # of a layer while it is computed, a token and hidden feature (arXiv 2205.05198)
_LOGIT_BYTES = 8  # float32 logits and their gradients
_PASSES = 4 / 3  # forward, backward and, recomputed, forward again over the first two
_TRAIN_LAYER_SECONDS = 3e-4  # a layer's kernel launches in these passes, whatever the batch
_DECODE_LAYER_SECONDS = 1e-5  # the same in a decoding step, from a CUDA graph
_QUANTILES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A step's samples."""

    prompts: int = 512
    samples: int = 4
    prompt_length: int = 200
    lengths: Lengths = field(default_factory=Lengths)

    @property
    def batch(self) -> int:
        return self.prompts * self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the costs of a dense model depend on."""

    spec: ModelSpec
    parameters: int
    embedding: int  # parameters of one matrix of the vocabulary
    response: float  # mean tokens
    context: float  # mean tokens that a running sequence holds
    train_flops: float  # of a sequence, forward and backward
    token_flops: float  # of a decoded token
    kv_bytes: float  # of a token, in bf16


@lru_cache(maxsize=32)
def sizes_of(spec: ModelSpec, workload: Workload) -> Sizes:
    """Return what the costs of ``spec`` under ``workload`` depend on.

    Raises:
        ConfigError: a mixture of experts, whose costs depend on more.
    """
    if spec.num_experts:
        raise ConfigError(
            f"the advisor plans dense models, got {spec.num_experts} experts a layer; plan a mixture "
            "by hand and look at it with megarl launch --dry-run"
        )
    lengths = workload.lengths.spread_out(_QUANTILES)
    mean = sum(lengths) / len(lengths)
    whole = [workload.prompt_length + length for length in lengths]
    return Sizes(
        spec=spec,
        parameters=sum(prod(tensor.shape) for tensor in canonical_tensors(spec)),
        embedding=spec.vocab_size * spec.hidden_size,
        response=mean,
        # Long responses run longer: the mean over time weighs each by its length.
        context=workload.prompt_length + sum(x * x for x in lengths) / len(lengths) / mean / 2,
        train_flops=training_flops(spec, whole) / len(whole),
        token_flops=training_flops(spec, [1]) / 3,
        kv_bytes=_WEIGHT_BYTES * cached_elements(spec) * spec.num_layers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """A trainer's layout; its seconds of a step and the bytes of its fullest rank."""

    tp: int
    pp: int
    dp: int
    micro_batch: int  # b_t, sequences
    seconds: float = 0.0
    nbytes: float = 0.0

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorPlan:
    """The generators' layout; their seconds of a step and the bytes of a rank."""

    tp: int
    pp: int
    replicas: int
    slots: int  # b_g, sequences
    weight_bytes: int = _WEIGHT_BYTES  # of a parameter: 1 is FP8
    seconds: float = 0.0
    longest_seconds: float = 0.0  # of a batch's longest response, among as many as run
    nbytes: float = 0.0

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.replicas


def activation_bytes(sizes: Sizes, workload: Workload, pp: int = 1) -> float:
    """Return A_t, of one sequence on all ranks of a stage together, with recomputation."""
    tokens, hidden = workload.prompt_length + sizes.response, sizes.spec.hidden_size
    kept = ceil(sizes.spec.num_layers / pp) * pp  # layer inputs of as many micro-batches as stages
    logits = _LOGIT_BYTES * sizes.spec.vocab_size
    return tokens * (hidden * (_WEIGHT_BYTES * kept + _LAYER_BYTES) + logits)


def trainer_bytes(sizes: Sizes, workload: Workload, at: TrainerPlan) -> float:
    """Return the bytes of a rank of the fullest stage, with the distributed optimizer."""
    layers = sizes.parameters - 2 * sizes.embedding
    stage = layers * ceil(sizes.spec.num_layers / at.pp) / sizes.spec.num_layers
    stage += sizes.embedding * (2 if at.pp == 1 else 1)
    state = _WEIGHT_BYTES + _GRADIENT_BYTES + _OPTIMIZER_BYTES / at.dp
    return (stage * state + activation_bytes(sizes, workload, at.pp) * at.micro_batch) / at.tp


def train_seconds(sizes: Sizes, workload: Workload, at: TrainerPlan, device: Device) -> float:
    """Return the seconds of a batch: micro-batches through stages that fill and empty."""
    micro_batches = ceil(workload.batch / (at.dp * at.micro_batch))
    each = micro_batch_seconds(sizes, at.micro_batch, at.tp * at.pp, device) - _layers_seconds(
        sizes
    )
    each += _layers_seconds(sizes) / at.pp
    return (micro_batches + at.pp - 1) * each


def _layers_seconds(sizes: Sizes) -> float:
    return sizes.spec.num_layers * _TRAIN_LAYER_SECONDS


def micro_batch_seconds(sizes: Sizes, batch: float, ranks: int, device: Device) -> float:
    """Return tau_t(b) on an instance of ``ranks`` without stages."""
    work = _PASSES * sizes.train_flops * batch
    return work / (ranks * device.flops_per_second) + _layers_seconds(sizes)


def cache_bytes(sizes: Sizes, workload: Workload) -> float:
    """Return K_g: the KV cache of a whole sequence of mean length."""
    return sizes.kv_bytes * (workload.prompt_length + sizes.response)


def generator_bytes(sizes: Sizes, workload: Workload, at: GeneratorPlan) -> float:
    """Return the bytes of a rank: its weights and the cache of its slots."""
    weights = sizes.parameters * at.weight_bytes
    return (weights + cache_bytes(sizes, workload) * at.slots) / (at.tp * at.pp)


def decode_seconds(sizes: Sizes, at: GeneratorPlan, device: Device) -> StepSeconds:
    """Return the seconds of a decoding step: weights and caches are read, or arithmetic.

    Stages work on a part of the sequences each, one after another: so weights are read ``pp`` times
    as long as the ranks of all stages together would take.
    """
    rate = device.decode_bytes_per_second
    weights = sizes.parameters * at.weight_bytes / (at.tp * rate)
    cache = sizes.kv_bytes / (at.tp * at.pp * rate)
    work = sizes.token_flops / (at.tp * at.pp * device.flops_per_second)
    reduce = 2 * device.allreduce_seconds if at.tp > 1 else 0.0
    fixed = sizes.spec.num_layers * (_DECODE_LAYER_SECONDS + reduce)

    def seconds(running: int, held: float) -> float:
        return max(weights + cache * held, work * running) + fixed

    return seconds


def prefill_seconds(sizes: Sizes, workload: Workload, ranks: int, device: Device) -> float:
    """Return the seconds of a batch's prompts, each computed once for all its samples."""
    tokens = workload.prompts * workload.prompt_length
    return tokens * sizes.token_flops / (ranks * device.flops_per_second)


def generate_steadily(
    sizes: Sizes, workload: Workload, at: GeneratorPlan, device: Device
) -> GeneratorPlan:
    """Return ``at`` with its seconds where those that end are followed by the next batch's."""
    samples = workload.batch / at.replicas
    running = max(1, min(at.slots, int(samples)))
    step = decode_seconds(sizes, at, device)(running, running * sizes.context)
    prefill = prefill_seconds(sizes, workload, at.ranks, device)
    return replace(
        at,
        seconds=samples * sizes.response * step / running + prefill,
        longest_seconds=longest(workload) * step,
    )


def longest(workload: Workload) -> int:
    """Return about how long a batch's longest response is."""
    return workload.lengths.quantile(1 - 0.5 / workload.batch)


def generate_to_the_end(
    sizes: Sizes, workload: Workload, at: GeneratorPlan, device: Device
) -> float:
    """Return the seconds of a batch alone, until the longest response of all replicas has ended."""
    replica = Replica(at.slots, decode_seconds(sizes, at, device))
    lengths = workload.lengths.spread_out(ceil(workload.batch / at.replicas))
    lengths[-1] = longest(workload)
    random.Random(0).shuffle(lengths)  # nobody knows which will be long
    replica.add(
        [
            Response(group=0, length=length, prompt_length=workload.prompt_length)
            for length in lengths
        ]
    )
    return seconds_to_empty(replica) + prefill_seconds(sizes, workload, at.ranks, device)
