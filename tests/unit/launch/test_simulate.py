"""The simulator against closed forms, and what it must keep whatever the lengths."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.lengths import Lengths, measured_lengths
from launch.simulate import Pipeline, SimulatedStep, simulate, steady
from megarl.errors import ConfigError

_LENGTH, _TOKEN_SECONDS = 100, 0.01
_GENERATE = _LENGTH * _TOKEN_SECONDS  # seconds of a batch whose responses all fit


def _make_pipeline(*, train_seconds: float = 2.0, **changes) -> Pipeline:
    base = Pipeline(
        batch_groups=4,
        group_size=2,
        max_staleness=1,
        replicas=2,
        slots=4,
        step_seconds=lambda running, held: _TOKEN_SECONDS,
        train_seconds=lambda lengths: train_seconds,
        lengths=Lengths(mean=_LENGTH, spread=0.0),
    )
    return replace(base, **changes)


def _steady(pipeline: Pipeline) -> SimulatedStep:
    return steady(simulate(pipeline, 16), last=2)


@pytest.mark.parametrize("train_seconds", [0.25, 1.0, 2.5])
@pytest.mark.parametrize("sync_seconds", [0.0, 0.5])
def test_on_policy_steps_take_the_sum(train_seconds: float, sync_seconds: float):
    found = _steady(
        _make_pipeline(max_staleness=0, train_seconds=train_seconds, sync_seconds=sync_seconds)
    )
    total = train_seconds + _GENERATE + sync_seconds
    assert found.step_seconds == pytest.approx(total)
    assert found.trainer_idle_ratio == pytest.approx(1 - train_seconds / total)
    assert found.generator_idle_ratio == pytest.approx(train_seconds / total)
    assert found.staleness_mean == found.staleness_max == 0


@pytest.mark.parametrize("train_seconds", [0.25, 1.0, 2.5])
@pytest.mark.parametrize("sync_seconds", [0.0, 0.5])
def test_asynchronous_steps_take_the_larger(train_seconds: float, sync_seconds: float):
    found = _steady(_make_pipeline(train_seconds=train_seconds, sync_seconds=sync_seconds))
    total = max(train_seconds, _GENERATE) + sync_seconds
    assert found.step_seconds == pytest.approx(total)
    assert found.trainer_idle_ratio == pytest.approx(1 - train_seconds / total)
    assert found.generator_idle_ratio == pytest.approx(
        max(0, train_seconds - _GENERATE) / total, abs=1e-9
    )
    # Where the generator is slower, the trainer arrives after this share of the next batch.
    assert found.staleness_mean == pytest.approx(min(1, train_seconds / _GENERATE), abs=1e-9)


def test_more_responses_than_slots_take_several_rounds():
    found = _steady(_make_pipeline(max_staleness=0, slots=2))
    assert found.wait_seconds == pytest.approx(2 * _GENERATE)


def test_a_step_takes_as_long_as_the_tokens_held_say():
    """Eight responses with prompts of 10: the sum over steps of 1e-3 * 4 * (10 + steps so far)."""
    pipeline = _make_pipeline(
        max_staleness=0, prompt_length=10, step_seconds=lambda running, held: 1e-3 * held
    )
    expected = 1e-3 * 4 * (10 * _LENGTH + _LENGTH**2 / 2)
    assert _steady(pipeline).wait_seconds == pytest.approx(expected)


def test_an_on_policy_batch_waits_for_its_longest_response():
    found = simulate(
        _make_pipeline(max_staleness=0, lengths=measured_lengths([10, 20, 400]), replicas=8), 12
    )
    waited = [round(step.wait_seconds / _TOKEN_SECONDS) for step in found]
    assert set(waited) <= {10, 20, 400}
    assert waited.count(400) > 6  # two thirds to the eighth power: nearly every batch has one


def test_recomputing_unfinished_responses_costs_their_tokens():
    kept = _make_pipeline(train_seconds=0.25, prefill_seconds=1e-3)
    again = replace(kept, recompute=True)
    # The trainer arrives after a quarter of the batch, when four responses hold 25 tokens each.
    more = _steady(again).step_seconds - _steady(kept).step_seconds
    assert more == pytest.approx(4 * 25 * 1e-3)


def test_colocated_engines_idle_only_while_another_replica_decodes():
    """Two replicas of four slots, four groups of two: 400 tokens at one, 100 at the other."""
    lengths = (100, 100, 400, 100) * 2  # the first group goes to the first replica, and so on
    found = _steady(_make_pipeline(max_staleness=0, colocated=True, known_lengths=lengths))
    assert found.step_seconds == pytest.approx(4.0 + 2.0)
    assert found.trainer_idle_ratio == 0
    assert found.generator_idle_ratio == pytest.approx((3.0 + 0.0) / 2 / 6.0)
    with pytest.raises(ConfigError, match="colocated with max_staleness 1, expected 0"):
        _make_pipeline(colocated=True)


@pytest.mark.parametrize("train_seconds", [0.25, 2.5])
def test_who_works_beside_another_is_slower_and_alone_is_not(train_seconds: float):
    """Decoding takes a second alone. While both work training takes twice, decoding thrice as long."""
    slow = _make_pipeline(train_seconds=train_seconds, beside=(2.0, 3.0))
    found = _steady(slow)
    if train_seconds < 1:  # trains for 0.5 s, in which a sixth of the batch is decoded
        assert found.train_seconds == pytest.approx(0.5)
        assert found.step_seconds == pytest.approx(0.5 + 1 - 0.5 / 3)
    else:  # decodes for 3 s, in which 1.5 s of training are done
        assert found.step_seconds == pytest.approx(3 + 1)
        assert found.generator_idle_seconds == pytest.approx(1)
    taking_turns = replace(slow, max_staleness=0)
    assert _steady(taking_turns).step_seconds == pytest.approx(train_seconds + _GENERATE)


def test_known_lengths_are_decoded_one_after_another():
    known = tuple(range(1, 25))
    found = simulate(_make_pipeline(max_staleness=0, known_lengths=known), 4)
    assert [step.tokens for step in found] == [sum(range(1, 9)), sum(range(9, 17)), 164, 36]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 4),
    st.floats(0.0, 1.5),
    st.floats(0.05, 5.0),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_staleness_stays_in_its_bound_and_nothing_is_faster_than_either_side(
    bound: int, spread: float, train_seconds: float, slots: int, replicas: int, seed: int
):
    pipeline = _make_pipeline(
        max_staleness=bound,
        lengths=Lengths(mean=50, spread=spread, longest=500),
        train_seconds=train_seconds,
        slots=slots,
        replicas=replicas,
        sync_seconds=0.1,
    )
    steps = simulate(pipeline, 12, seed)
    assert all(-1e-9 <= s.staleness_mean <= s.staleness_max + 1e-9 for s in steps)
    assert all(0 <= step.staleness_max <= bound for step in steps)
    assert all(step.step_seconds >= train_seconds + 0.1 - 1e-9 for step in steps)
    decoded = sum(step.tokens for step in steps)
    total = sum(step.step_seconds for step in steps)
    assert total >= decoded / (slots * replicas) * _TOKEN_SECONDS
    parts = [step.train_seconds + step.wait_seconds + step.sync_seconds for step in steps]
    assert parts == pytest.approx([step.step_seconds for step in steps])
    assert simulate(pipeline, 12, seed) == steps


def test_with_long_tails_a_higher_bound_is_no_slower():
    tails = _make_pipeline(
        lengths=Lengths(mean=100, spread=1.2, longest=400), train_seconds=0.8, slots=8
    )
    seconds = [_steady(replace(tails, max_staleness=b)).step_seconds for b in (0, 1, 2, 8)]
    assert seconds[0] > seconds[1] > seconds[3]
    assert seconds[3] == pytest.approx(0.8, rel=0.05)


def test_the_largest_clusters_simulate_in_seconds():
    pipeline = _make_pipeline(batch_groups=512, group_size=4, replicas=32, slots=64)
    assert len(simulate(replace(pipeline, lengths=Lengths(mean=800)), 8)) == 8


def test_lengths_have_the_mean_that_they_are_given():
    drawn = Lengths(mean=500, spread=0.8).spread_out(4000)
    assert sum(drawn) / 4000 == pytest.approx(500, rel=0.02)
    assert Lengths(mean=500, spread=0.8, longest=600).quantile(0.99) == 600


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ConfigError, match="slots is 0, expected at least 1"):
        _make_pipeline(slots=0)
    with pytest.raises(ConfigError, match="expected more than 4"):
        steady(simulate(_make_pipeline(), 4))
    with pytest.raises(ConfigError, match="no measured response"):
        measured_lengths([])
