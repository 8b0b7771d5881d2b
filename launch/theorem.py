"""Section 7 of the LlamaRL paper as two problems that are solved: least step times, continuous.

Problem (6) is synchronous training, both engines on the same GPUs; problem (7) is asynchronous
training, each engine on its own. Batch sizes and model-parallel sizes are real numbers here, memory
is table 2 of the paper and nothing is communicated; `advise` has the discrete problem of real
layouts. Called by `advise` for what the theorem alone promises; no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Eta = Callable[[float], float]  # seconds a sample takes on one model instance, by batch size

_GRID = 48
_GOLDEN = (math.sqrt(5) - 1) / 2
_TOLERANCE = 1e-9  # of a batch size's logarithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Definitions 7.2 and 7.3: what both problems share."""

    num_gpus: float  # G_0
    batch_size: float  # B_0, samples of a step
    gpu_bytes: float  # M_0
    model_bytes: float  # W_0, one copy of the weights
    train_bytes: float  # A_t, activations of a sample, on all GPUs of an instance together
    generate_bytes: float  # K_g, KV cache of a sample, likewise
    eta_train: Eta
    eta_generate: Eta
    smallest_batch: float = 1e-6
    largest_batch: float = 1e9

    def trainer_bytes(self, batch: float) -> float:
        """Return what an instance takes: weights, gradients, two optimizer states, activations."""
        return 4 * self.model_bytes + self.train_bytes * batch

    def generator_bytes(self, batch: float) -> float:
        return self.model_bytes + self.generate_bytes * batch

    @property
    def samples_per_gpu(self) -> float:
        return self.batch_size / self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousOptimum:
    """A point of problem (6): b_t, b_g, m and its step time."""

    train_batch: float
    generate_batch: float
    parallel: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousOptimum:
    """A point of problem (7): b_t, b_g, m_t, m_g, theta and its step time."""

    train_batch: float
    generate_batch: float
    train_parallel: float
    generate_parallel: float
    trainer_share: float  # theta, of all GPUs
    seconds: float


def synchronous_seconds(
    problem: Problem, train_batch: float, generate_batch: float, parallel: float
) -> float:
    """Return equation (2): the trainer's seconds and the generator's, one after the other."""
    eta = problem.eta_train(train_batch) + problem.eta_generate(generate_batch)
    return problem.samples_per_gpu * parallel * eta


def asynchronous_seconds(problem: Problem, at: AsynchronousOptimum) -> float:
    """Return equation (3) at a point, whatever seconds it carries: those of the slower side."""
    train = problem.eta_train(at.train_batch) * at.train_parallel / at.trainer_share
    share = 1 - at.trainer_share
    generate = problem.eta_generate(at.generate_batch) * at.generate_parallel / share
    return problem.samples_per_gpu * max(train, generate)


def solve_synchronous(problem: Problem) -> SynchronousOptimum:
    """Solve problem (6); memory is full at its optimum (lemma B.1), so m follows from b_t, b_g."""

    def parallel(train: float, generate: float) -> float:
        held = problem.trainer_bytes(train) + problem.generator_bytes(generate)
        return held / problem.gpu_bytes

    def seconds(train: float, generate: float) -> float:
        return synchronous_seconds(problem, train, generate, parallel(train, generate))

    def best_generate(train: float) -> float:
        return _argmin(lambda generate: seconds(train, generate), problem)

    train = _argmin(lambda batch: seconds(batch, best_generate(batch)), problem)
    generate = best_generate(train)
    return SynchronousOptimum(
        train_batch=train,
        generate_batch=generate,
        parallel=parallel(train, generate),
        seconds=seconds(train, generate),
    )


def solve_asynchronous(problem: Problem) -> AsynchronousOptimum:
    """Solve problem (7): each side alone is as cheap as can be, theta makes both take as long.

    Both memories are full (lemma B.2) and both sides' GPU seconds least (lemma B.3).
    """

    def train_cost(batch: float) -> float:
        return problem.trainer_bytes(batch) * problem.eta_train(batch) / problem.gpu_bytes

    def generate_cost(batch: float) -> float:
        return problem.generator_bytes(batch) * problem.eta_generate(batch) / problem.gpu_bytes

    train, generate = _argmin(train_cost, problem), _argmin(generate_cost, problem)
    total = train_cost(train) + generate_cost(generate)
    return AsynchronousOptimum(
        train_batch=train,
        generate_batch=generate,
        train_parallel=problem.trainer_bytes(train) / problem.gpu_bytes,
        generate_parallel=problem.generator_bytes(generate) / problem.gpu_bytes,
        trainer_share=train_cost(train) / total,
        seconds=problem.samples_per_gpu * total,
    )


def _argmin(function: Callable[[float], float], problem: Problem) -> float:
    """Return the batch size at which ``function`` is least: a grid, then golden sections.

    Exact where the function is convex in the batch size's logarithm, as it is for every eta that
    is a sum of powers of it.
    """
    low, high = math.log(problem.smallest_batch), math.log(problem.largest_batch)
    points = [low + (high - low) * index / _GRID for index in range(_GRID + 1)]
    best = min(range(_GRID + 1), key=lambda index: function(math.exp(points[index])))
    low, high = points[max(0, best - 1)], points[min(_GRID, best + 1)]
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(math.exp(left)), function(math.exp(right))
    while high - low > _TOLERANCE:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(math.exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(math.exp(right))
    return math.exp((low + high) / 2)
