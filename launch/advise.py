"""Which layouts train a model fastest: problems (6) and (7) of the LlamaRL paper over real layouts.

Called by ``megarl advise``. Tensor-parallel ranks stay in a host, hosts belong to one executor, batch
sizes are powers of two. The synchronous baseline has both engines on all GPUs in one layout and its
weights for nothing; asynchronous training has layouts of its own for each, FP8 generators if they
pay, and waits for its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from launch.engine_costs import (
    GeneratorPlan,
    Sizes,
    TrainerPlan,
    Workload,
    activation_bytes,
    cache_bytes,
    decode_seconds,
    generate_steadily,
    generate_to_the_end,
    generator_bytes,
    micro_batch_seconds,
    prefill_seconds,
    sizes_of,
    train_seconds,
    trainer_bytes,
)
from launch.simulate import STEPS_TO_FILL, Pipeline, SimulatedStep, simulate, steady
from launch.site import Site
from launch.theorem import Problem, solve_asynchronous, solve_synchronous
from megarl.errors import ConfigError
from megatron_bridge.cost import cheapest, costed_plans
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.layouts.vllm import vllm_side
from megatron_bridge.parallel import GeneratorLayout, Quantization, TrainerLayout
from megatron_bridge.plan import PlanPolicy
from megatron_bridge.spec import ModelSpec

_POWERS = tuple(2**power for power in range(13))
_MAX_STAGES = 16
_COUNTED_STEPS = 12  # of a simulation
_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is to be planned."""

    model: str
    spec: ModelSpec
    num_gpus: int
    site: Site
    workload: Workload
    max_staleness: int = 1
    fp8: bool = True  # generators may hold their weights in it

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.spec, self.workload)

    @property
    def gpu_bytes(self) -> float:
        return self.site.device.usable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous:
    """The baseline: trainer and generators on the same GPUs, in turns."""

    trainer: TrainerPlan
    generator: GeneratorPlan

    @property
    def step_seconds(self) -> float:
        return self.trainer.seconds + self.generator.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """Trainer and generators at the same time; ``sync_seconds`` once it has been planned."""

    trainer: TrainerPlan
    generator: GeneratorPlan
    max_staleness: int
    sync_seconds: float = 0.0

    @property
    def work_seconds(self) -> float:
        """The slower side's, or what the longest response asks for.

        Admitted at the head of a step, it must have ended when ``max_staleness`` steps later the
        trainer has all but its own work of that step still to do.
        """
        train = self.trainer.seconds
        bound = (self.generator.longest_seconds + train) / (self.max_staleness + 1)
        return max(train, self.generator.seconds, bound)

    @property
    def step_seconds(self) -> float:
        return self.work_seconds + self.sync_seconds

    @property
    def trainer_share(self) -> float:
        return self.trainer.ranks / (self.trainer.ranks + self.generator.ranks)

    @property
    def idle_ratios(self) -> tuple[float, float]:
        """Return the trainer's and the generators' shares of a step without work."""
        busy = self.trainer.seconds, self.generator.seconds
        trainer, generator = ((self.work_seconds - each) / self.step_seconds for each in busy)
        return trainer, generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An asynchronous layout and what it does in simulated time."""

    layout: Asynchronous
    simulated: SimulatedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The baseline, and the best few asynchronous layouts by their simulated step time."""

    setting: Setting
    synchronous: Synchronous
    proposals: tuple[Proposal, ...]
    frontier: tuple[Asynchronous, ...]  # the best of each division of the GPUs, by formula
    theorem_speedup: float  # of the paper's own model of costs, at its continuous optima

    @property
    def best(self) -> Proposal:
        return self.proposals[0]

    @property
    def speedup(self) -> float:
        return self.synchronous.step_seconds / self.best.simulated.step_seconds


def advise(setting: Setting, count: int = 3) -> Advice:
    """Return the best layouts of a setting.

    Raises:
        ConfigError: no layout fits, or the GPUs do not fill at least two hosts.
    """
    if setting.max_staleness < 1:
        raise ConfigError(
            f"max_staleness is {setting.max_staleness}, expected at least 1: with less trainer and "
            "generators take turns, and gain nothing from GPUs of their own"
        )
    frontier = asynchronous_frontier(setting)
    proposals: list[Proposal] = []
    for point in sorted(frontier, key=lambda point: point.step_seconds)[:count]:
        layout = replace(point, sync_seconds=sync_seconds(setting, point))
        proposals.append(Proposal(layout=layout, simulated=simulate_point(setting, layout)))
    proposals.sort(key=lambda proposal: proposal.simulated.step_seconds)
    return Advice(
        setting=setting,
        synchronous=best_synchronous(setting),
        proposals=tuple(proposals),
        frontier=frontier,
        theorem_speedup=theorem_speedup(setting),
    )


# --- Layouts ------------------------------------------------------------------------------------


def stage_layers(num_layers: int, pp: int) -> tuple[int, int] | None:
    """Return the layers of the first and last of ``pp`` stages, as even as Megatron can have them.

    (0, 0) stands for all equal, None for no such pipeline.
    """
    if num_layers % pp == 0:
        return 0, 0
    middle = -(-num_layers // pp)
    rest = num_layers - middle * (pp - 2)
    first = rest // 2
    return (first, rest - first) if first > 0 and rest - first <= middle else None


def _instances(setting: Setting, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (tp, pp) of the instances that divide ``ranks``."""
    spec = setting.spec
    for tp in _POWERS:
        if tp > setting.site.links.ranks_per_host or spec.num_heads % tp:
            break
        for pp in _POWERS:
            if pp > min(_MAX_STAGES, spec.num_layers):
                break
            if ranks % (tp * pp) == 0 and stage_layers(spec.num_layers, pp) is not None:
                yield tp, pp


def _trainers(setting: Setting, ranks: int) -> Iterator[TrainerPlan]:
    """Yield the trainers on ``ranks`` that fit, with their costs."""
    sizes, workload = setting.sizes, setting.workload
    for tp, pp in _instances(setting, ranks):
        dp = ranks // (tp * pp)
        for micro_batch in _POWERS:
            if dp * micro_batch > workload.batch:
                break
            plan = TrainerPlan(tp=tp, pp=pp, dp=dp, micro_batch=micro_batch)
            nbytes = trainer_bytes(sizes, workload, plan)
            if nbytes > setting.gpu_bytes:
                break
            seconds = train_seconds(sizes, workload, plan, setting.site.device)
            yield replace(plan, nbytes=nbytes, seconds=seconds)


def _generators(setting: Setting, ranks: int, *, fp8: bool) -> Iterator[GeneratorPlan]:
    """Yield the generators on ``ranks`` that fit, without their seconds."""
    sizes, workload = setting.sizes, setting.workload
    for tp, pp in _instances(setting, ranks):
        replicas = ranks // (tp * pp)
        if replicas > workload.prompts:
            continue
        for weight_bytes in (2, 1) if fp8 else (2,):
            for slots in _POWERS:
                plan = GeneratorPlan(
                    tp=tp, pp=pp, replicas=replicas, slots=slots, weight_bytes=weight_bytes
                )
                nbytes = generator_bytes(sizes, workload, plan)
                if nbytes > setting.gpu_bytes or slots > 2 * workload.batch / replicas:
                    break
                yield replace(plan, nbytes=nbytes)


# --- The two problems ---------------------------------------------------------------------------


def best_synchronous(setting: Setting) -> Synchronous:
    """Solve problem (6): one layout, one memory, the sum of the seconds.

    Raises:
        ConfigError: nothing fits.
    """
    trainers = list(_trainers(setting, setting.num_gpus))
    found: list[Synchronous] = []
    for generator in _generators(setting, setting.num_gpus, fp8=False):
        layout = (generator.tp, generator.pp)
        room = setting.gpu_bytes - generator.nbytes
        beside = [t for t in trainers if (t.tp, t.pp) == layout and t.nbytes <= room]
        if beside:
            seconds = generate_to_the_end(
                setting.sizes, setting.workload, generator, setting.site.device
            )
            trainer = min(beside, key=lambda trainer: trainer.seconds)
            found.append(
                Synchronous(trainer=trainer, generator=replace(generator, seconds=seconds))
            )
    if not found:
        raise ConfigError(
            f"{setting.model} does not fit on {setting.num_gpus} GPUs with both engines"
        )
    return min(found, key=lambda point: point.step_seconds)


def asynchronous_frontier(setting: Setting) -> tuple[Asynchronous, ...]:
    """Solve problem (7) for each division of the hosts: each side alone is as fast as it can be.

    Raises:
        ConfigError: no division fits, or there are fewer than two hosts to divide.
    """
    size = setting.site.links.ranks_per_host
    if setting.num_gpus % size or setting.num_gpus < 2 * size:
        raise ConfigError(
            f"{setting.num_gpus} GPUs are not two or more whole hosts of {size}; expected a multiple"
        )
    found: list[Asynchronous] = []
    for ranks in range(size, setting.num_gpus, size):
        trainers = list(_trainers(setting, ranks))
        points = [
            Asynchronous(
                trainer=min(trainers, key=lambda plan: plan.seconds),
                generator=generate_steadily(
                    setting.sizes, setting.workload, generator, setting.site.device
                ),
                max_staleness=setting.max_staleness,
            )
            for generator in _generators(setting, setting.num_gpus - ranks, fp8=setting.fp8)
            if trainers
        ]
        if points:
            found.append(min(points, key=lambda point: point.step_seconds))
    if not found:
        raise ConfigError(
            f"{setting.model} does not fit on {setting.num_gpus} GPUs in any division"
        )
    return tuple(found)


def layouts_of(setting: Setting, at: Asynchronous) -> tuple[TrainerLayout, GeneratorLayout]:
    """Return the two layouts as a run's configuration has them."""
    first, last = stage_layers(setting.spec.num_layers, at.trainer.pp) or (0, 0)
    trainer = TrainerLayout(
        tp=at.trainer.tp,
        pp=at.trainer.pp,
        dp=at.trainer.dp,
        sequence_parallel=at.trainer.tp > 1,
        num_layers_in_first_stage=first or None,
        num_layers_in_last_stage=last or None,
    )
    quantization = Quantization.FP8_BLOCK if at.generator.weight_bytes == 1 else Quantization.NONE
    generator = GeneratorLayout(
        tp=at.generator.tp,
        pp=at.generator.pp,
        replicas=at.generator.replicas,
        quantization=quantization,
    )
    return trainer, generator


def sync_seconds(setting: Setting, at: Asynchronous) -> float:
    """Plan the weight transfer and return its predicted seconds."""
    trainer, generator = layouts_of(setting, at)
    source = megatron_side(setting.spec, trainer, te=True, dtype="bfloat16")
    target = vllm_side(setting.spec, generator, first_rank=trainer.world_size, dtype="bfloat16")
    links = setting.site.links
    policy = PlanPolicy(message_bytes=_MESSAGE_BYTES, seats=links.seats(setting.num_gpus))
    found = costed_plans(source, target, policy, links)
    return found[cheapest(found)].prediction.seconds


def simulate_point(setting: Setting, at: Asynchronous) -> SimulatedStep:
    """Run a layout in simulated time, with random lengths and its staleness bound."""
    sizes, workload, device = setting.sizes, setting.workload, setting.site.device
    per_token = at.trainer.seconds / (workload.batch * (workload.prompt_length + sizes.response))
    pipeline = Pipeline(
        batch_groups=workload.prompts,
        group_size=workload.samples,
        max_staleness=setting.max_staleness,
        replicas=at.generator.replicas,
        slots=at.generator.slots,
        lengths=workload.lengths,
        step_seconds=decode_seconds(sizes, at.generator, device),
        train_seconds=lambda lengths: per_token * sum(lengths),
        sync_seconds=at.sync_seconds,
        prefill_seconds=prefill_seconds(sizes, workload, at.generator.tp * at.generator.pp, device)
        / (workload.prompts * workload.prompt_length),
        prompt_length=workload.prompt_length,
    )
    first = STEPS_TO_FILL + 2 * setting.max_staleness
    steps = simulate(pipeline, first + _COUNTED_STEPS + setting.max_staleness)
    return steady(steps, last=setting.max_staleness, first=first)


def theorem_speedup(setting: Setting) -> float:
    """Return the speed-up of theorem 7.5 with this setting's etas, as they are on one host.

    There a larger instance takes as long for a sample as a small one: it buys memory only.
    """
    sizes, workload, site = setting.sizes, setting.workload, setting.site
    host = site.links.ranks_per_host
    engine = GeneratorPlan(tp=host, pp=1, replicas=1, slots=1)
    step = decode_seconds(sizes, engine, site.device)
    problem = Problem(
        num_gpus=setting.num_gpus,
        batch_size=workload.batch,
        gpu_bytes=setting.gpu_bytes,
        model_bytes=2 * sizes.parameters,
        train_bytes=activation_bytes(sizes, workload),
        generate_bytes=cache_bytes(sizes, workload),
        eta_train=lambda b: micro_batch_seconds(sizes, b, host, site.device) / b,
        eta_generate=lambda b: sizes.response * step(round(b), b * sizes.context) / b,
        smallest_batch=1.0,
        largest_batch=float(workload.batch),
    )
    return solve_synchronous(problem).seconds / solve_asynchronous(problem).seconds
