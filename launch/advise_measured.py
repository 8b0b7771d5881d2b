"""How to divide ranks between trainer and generators at measured rates.

Called by ``megarl advise --curves`` and `tools.plan_layout`. `launch.advise` models costs of any layout
of a model; here one copy of the trainer and one replica were measured on the machine at hand, and the
question is how many of each. Ranks that share processor cores share their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.curves import Curves, DecodeCurve, TrainCurve, slow_down
from launch.simulate import Pipeline, SimulatedStep, simulate, steady
from megarl.data.packing import partition
from megarl.errors import ConfigError

_FIRST_STEPS, _COUNTED_STEPS = 8, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """So many copies of each engine, and a step of theirs in simulated time."""

    dp: int
    replicas: int
    trainer_share: float  # theta, of the ranks
    simulated: SimulatedStep

    @property
    def overrides(self) -> tuple[str, ...]:
        """What a run's configuration must say."""
        return (f"trainer.layout.dp={self.dp}", f"generator.layout.replicas={self.replicas}")


def divide(curves: Curves, run: Pipeline, dp: int, replicas: int, cores: int) -> Pipeline:
    """Return ``run`` with so many copies, which together have ``cores`` (ranks computing at once).

    While more ranks work than there are cores, all of them take as many times longer.
    """
    trainer, generator = dp * curves.trainer_ranks, replicas * curves.generator_ranks
    train, decode, both = (
        max(1.0, ranks / cores) for ranks in (trainer, generator, trainer + generator)
    )
    decode_curve, train_curve = DecodeCurve(curves.alone.decode), TrainCurve(curves.alone.train)
    slower_train, slower_decode = slow_down(curves)

    def train_seconds(lengths: Sequence[int]) -> float:
        parts = partition(lengths, dp)
        return train * max(train_curve([lengths[row] for row in part]) for part in parts)

    return replace(
        run,
        replicas=replicas,
        step_seconds=lambda running, held: decode * decode_curve(running, held),
        train_seconds=train_seconds,
        beside=(slower_train * both / train, slower_decode * both / decode),
    )


def divisions(curves: Curves, run: Pipeline, max_ranks: int, cores: int) -> list[Division]:
    """Return every division of at most ``max_ranks`` ranks, the fastest step first.

    Raises:
        ConfigError: the curves are not those of one copy each, or two copies do not fit.
    """
    if curves.colocated or (curves.dp, curves.replicas) != (1, 1):
        raise ConfigError(
            f"curves of dp {curves.dp}, replicas {curves.replicas}, expected one copy of each "
            "engine on ranks of its own"
        )
    found = []
    for dp in range(1, run.batch_groups * run.group_size + 1):
        for replicas in range(1, run.batch_groups + 1):
            trainer, generator = dp * curves.trainer_ranks, replicas * curves.generator_ranks
            if trainer + generator > max_ranks:
                break
            steps = simulate(
                divide(curves, run, dp, replicas, cores), _FIRST_STEPS + _COUNTED_STEPS
            )
            found.append(
                Division(
                    dp=dp,
                    replicas=replicas,
                    trainer_share=trainer / (trainer + generator),
                    simulated=steady(steps, last=run.max_staleness + 1, first=_FIRST_STEPS),
                )
            )
    if not found:
        least = curves.trainer_ranks + curves.generator_ranks
        raise ConfigError(f"one copy of each engine needs {least} ranks, got {max_ranks}")
    # Of equally fast ones that with fewer ranks.
    return sorted(found, key=lambda each: (each.simulated.step_seconds, each.dp + each.replicas))
