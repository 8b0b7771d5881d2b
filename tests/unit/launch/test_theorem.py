"""Theorem 7.5 and lemmas B.1 to B.3 of the LlamaRL paper, at the continuous optima."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.theorem import (
    AsynchronousOptimum,
    Problem,
    asynchronous_seconds,
    solve_asynchronous,
    solve_synchronous,
    synchronous_seconds,
)

_POSITIVE = st.floats(0.01, 100.0)


def _eta(floor: float, scale: float, power: float):
    """Decreasing in the batch size, as assumption 7.1 asks."""
    return lambda batch: floor + scale * batch**-power


@st.composite
def _problems(draw: st.DrawFn, power: st.SearchStrategy[float] | None = None) -> Problem:
    power = power or st.floats(0.2, 2.0)
    train, generate = (_eta(draw(_POSITIVE), draw(_POSITIVE), draw(power)) for _ in range(2))
    return Problem(
        num_gpus=draw(st.floats(8, 1024)),
        batch_size=draw(st.floats(64, 4096)),
        gpu_bytes=80.0,
        model_bytes=draw(st.floats(1.0, 1000.0)),
        train_bytes=draw(_POSITIVE),
        generate_bytes=draw(_POSITIVE),
        eta_train=train,
        eta_generate=generate,
    )


@settings(max_examples=60, deadline=None)
@given(_problems())
def test_theorem_7_5_asynchronous_training_is_strictly_faster(problem: Problem):
    assert solve_asynchronous(problem).seconds < solve_synchronous(problem).seconds * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(_problems())
def test_lemma_b1_a_synchronous_optimum_fills_the_memory(problem: Problem):
    best = solve_synchronous(problem)
    held = 5 * problem.model_bytes + problem.train_bytes * best.train_batch
    held += problem.generate_bytes * best.generate_batch
    assert held / best.parallel == pytest.approx(problem.gpu_bytes)
    # With any memory left over, the same GPUs would hold a larger batch and be faster.
    roomier = replace(problem, gpu_bytes=problem.gpu_bytes * 1.1)
    room = (roomier.gpu_bytes - problem.gpu_bytes) * best.parallel / problem.train_bytes
    more = synchronous_seconds(roomier, best.train_batch + room, best.generate_batch, best.parallel)
    assert more < best.seconds


@settings(max_examples=60, deadline=None)
@given(_problems())
def test_lemma_b2_an_asynchronous_optimum_fills_both_memories(problem: Problem):
    best = solve_asynchronous(problem)
    trainer = 4 * problem.model_bytes + problem.train_bytes * best.train_batch
    generator = problem.model_bytes + problem.generate_bytes * best.generate_batch
    assert trainer / best.train_parallel == pytest.approx(problem.gpu_bytes)
    assert generator / best.generate_parallel == pytest.approx(problem.gpu_bytes)


@settings(max_examples=60, deadline=None)
@given(_problems(), st.floats(0.5, 2.0), st.floats(0.5, 2.0), st.floats(0.8, 1.25))
def test_lemma_b3_both_sides_take_equally_long_and_no_neighbour_is_faster(
    problem: Problem, train: float, generate: float, share: float
):
    best = solve_asynchronous(problem)
    train_side = problem.eta_train(best.train_batch) * best.train_parallel / best.trainer_share
    generate_side = problem.eta_generate(best.generate_batch) * best.generate_parallel
    assert train_side == pytest.approx(generate_side / (1 - best.trainer_share))
    assert asynchronous_seconds(problem, best) == pytest.approx(best.seconds)
    train_batch, generate_batch = best.train_batch * train, best.generate_batch * generate
    other = AsynchronousOptimum(
        train_batch=train_batch,
        generate_batch=generate_batch,
        train_parallel=problem.trainer_bytes(train_batch) / problem.gpu_bytes,
        generate_parallel=problem.generator_bytes(generate_batch) / problem.gpu_bytes,
        trainer_share=min(0.999, best.trainer_share * share),
        seconds=math.nan,
    )
    assert asynchronous_seconds(problem, other) >= best.seconds * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(_problems(), st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_no_feasible_neighbour_of_a_synchronous_optimum_is_faster(
    problem: Problem, train: float, generate: float
):
    best = solve_synchronous(problem)
    batches = best.train_batch * train, best.generate_batch * generate
    held = problem.trainer_bytes(batches[0]) + problem.generator_bytes(batches[1])
    seconds = synchronous_seconds(problem, *batches, held / problem.gpu_bytes)
    assert seconds >= best.seconds * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(_POSITIVE, _POSITIVE, _POSITIVE, _POSITIVE, st.floats(1.0, 1000.0), _POSITIVE, _POSITIVE)
def test_etas_with_one_over_the_batch_have_optima_in_closed_form(
    train_floor: float,
    train_scale: float,
    generate_floor: float,
    generate_scale: float,
    model: float,
    activations: float,
    cache: float,
):
    """By Cauchy and Schwarz (x + y b)(f + s / b) >= (sqrt(x f) + sqrt(y s))^2, and so on."""
    problem = Problem(
        num_gpus=256,
        batch_size=2048,
        gpu_bytes=80.0,
        model_bytes=model,
        train_bytes=activations,
        generate_bytes=cache,
        eta_train=_eta(train_floor, train_scale, 1.0),
        eta_generate=_eta(generate_floor, generate_scale, 1.0),
    )
    train, generate = math.sqrt(activations * train_scale), math.sqrt(cache * generate_scale)
    train_seconds = (math.sqrt(4 * model * train_floor) + train) ** 2 / 80 * 8
    generate_seconds = (math.sqrt(model * generate_floor) + generate) ** 2 / 80 * 8
    together = (math.sqrt(5 * model * (train_floor + generate_floor)) + train + generate) ** 2
    best = solve_asynchronous(problem)
    assert best.seconds == pytest.approx(train_seconds + generate_seconds)
    assert best.trainer_share == pytest.approx(train_seconds / (train_seconds + generate_seconds))
    assert solve_synchronous(problem).seconds == pytest.approx(together / 80 * 8)
