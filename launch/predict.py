"""How long a step should take, from arithmetic and memory traffic alone; pure.

Called by the launch command. The model: training is arithmetic over a share of the peak, stretched
by the pipeline's bubble; decoding reads weights and keys and values at a share of the memory's
rate. Lengths are taken as equal, at their mean; rewards, optimizer and data as free.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.memory import Held, kv_bytes_per_token
from launch.site import GIB, Device
from megarl.config import PartialKv, RunConfig
from megatron_bridge.models.flops import training_flops
from megatron_bridge.spec import ModelSpec

_FORWARD = 1 / 3  # of a training step's arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLengths:
    """Mean tokens of a sequence."""

    prompt: float
    response: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """Seconds of a step and its parts; tokens and sequences are those of one replica."""

    train_seconds: float
    bubble: float  # of the pipeline: time over that of its work
    prefill_seconds: float
    decode_seconds: float
    decode_step_seconds: float
    running_sequences: int
    sync_seconds: float
    step_seconds: float

    @property
    def generate_seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def idle_ratios(self) -> tuple[float, float]:
        """Return the shares of a step for which trainer and generators do nothing."""
        train, generate = self.train_seconds, self.generate_seconds
        return 1 - train / self.step_seconds, 1 - generate / self.step_seconds


def predict_step(
    config: RunConfig, spec: ModelSpec, device: Device, held: Held, lengths: MeanLengths
) -> _Draft:
    """Return a step's parts, without the weight transfer; ``held`` is a generator rank's model."""
    bubble = _bubble(config, lengths)
    running = _running(config, spec, lengths)
    step = _decode_step(config, spec, device, held, (running, lengths))
    steps = _sequences(config) / config.generator.layout.replicas * lengths.response / running
    if config.staleness_bound == 0:  # nothing is carried over: the longest response is waited for
        steps = max(steps, config.rollout.max_response_length)
    return _Draft(
        train=_train(config, spec, device, lengths) * bubble,
        bubble=bubble,
        prefill=_prefill(config, spec, device, (running, lengths)),
        decode=steps * step,
        decode_step=step,
        running=running,
        takes_turns=config.staleness_bound == 0,
        sync_every=config.weights.sync_every,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A prediction that lacks the transfer's seconds."""

    train: float
    bubble: float
    prefill: float
    decode: float
    decode_step: float
    running: int
    takes_turns: bool
    sync_every: int

    def with_sync(self, sync_seconds: float) -> StepPrediction:
        """Trainer and generators work at the same time, or in turns; a transfer stops both."""
        generate = self.prefill + self.decode
        work = self.train + generate if self.takes_turns else max(self.train, generate)
        return StepPrediction(
            train_seconds=self.train,
            bubble=self.bubble,
            prefill_seconds=self.prefill,
            decode_seconds=self.decode,
            decode_step_seconds=self.decode_step,
            running_sequences=self.running,
            sync_seconds=sync_seconds,
            step_seconds=work + sync_seconds / self.sync_every,
        )


def _sequences(config: RunConfig) -> int:
    return config.data.train_batch_size * config.rollout.n


def _bubble(config: RunConfig, lengths: MeanLengths) -> float:
    """Return 1 + (pp - 1) / (vpp x micro-batches) (Narayanan et al. 2021, section 2.2)."""
    trainer, layout = config.trainer, config.trainer.layout
    tokens = _sequences(config) * (lengths.prompt + lengths.response)
    each = tokens / (layout.dp * trainer.updates_per_batch * trainer.max_tokens_per_micro_batch)
    return 1 + (layout.pp - 1) / (layout.vpp * max(each, 1.0))


def _train(config: RunConfig, spec: ModelSpec, device: Device, lengths: MeanLengths) -> float:
    """Return the seconds of all ranks' arithmetic; recomputation and a reference each add a pass."""
    passes = 1 + _FORWARD * (config.trainer.recompute + (config.algorithm.kl_loss_coef > 0))
    length = round(lengths.prompt + lengths.response)
    work = passes * _sequences(config) * training_flops(spec, [length])
    return work / (config.trainer.layout.world_size * device.flops_per_second)


def _running(config: RunConfig, spec: ModelSpec, lengths: MeanLengths) -> int:
    """Return how many sequences a replica decodes together."""
    cache = config.generator.kv_cache_gib * GIB
    in_cache = cache / (kv_bytes_per_token(config, spec) * (lengths.prompt + lengths.response))
    due = _sequences(config) / config.generator.layout.replicas
    return max(int(min(config.generator.max_running_sequences, in_cache, due)), 1)


def _decode_step(
    config: RunConfig, spec: ModelSpec, device: Device, held: Held, load: tuple[int, MeanLengths]
) -> float:
    """Return the seconds in which each of the running sequences gets a token.

    Of the experts only those are read that one of the sequences goes through.
    """
    running, lengths = load
    layout = config.generator.layout
    read = held.nbytes
    if held.experts:
        hit = 1 - (1 - spec.experts_per_token / spec.num_experts) ** running
        read = held.nbytes * (held.dense + held.experts * hit) / (held.dense + held.experts)
    context = lengths.prompt + lengths.response / 2
    read += running * context * kv_bytes_per_token(config, spec)
    traffic = read / device.decode_bytes_per_second
    work = running * _FORWARD * training_flops(spec, [1]) / layout.ranks_per_replica
    exchange = 2 * spec.num_layers * device.allreduce_seconds if layout.tp > 1 else 0.0
    # A token passes the stages one after another.
    return layout.pp * max(traffic, work / device.flops_per_second) + exchange


def _prefill(
    config: RunConfig, spec: ModelSpec, device: Device, load: tuple[int, MeanLengths]
) -> float:
    """Return the seconds of new prompts, once a group where prefixes are cached, and of what
    unfinished sequences recompute under new weights."""
    running, lengths = load
    layout = config.generator.layout
    prompts = config.data.train_batch_size / layout.replicas
    if not config.generator.prefix_caching:
        prompts *= config.rollout.n
    work = prompts * training_flops(spec, [round(lengths.prompt)])
    if config.staleness_bound and config.rollout.partial_kv is PartialKv.RECOMPUTE:
        kept = round(lengths.prompt + lengths.response / 2)
        work += running * training_flops(spec, [kept]) / config.weights.sync_every
    return _FORWARD * work / (layout.ranks_per_replica * device.flops_per_second)
