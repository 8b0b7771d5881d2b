"""Curves through measured cases: what was put in comes out, and is simulated as a run is configured."""

from dataclasses import replace
from pathlib import Path

import pytest

from launch.curves import (
    Curves,
    DecodeCase,
    DecodeCurve,
    Rates,
    TrainCase,
    TrainCurve,
    eta_generate,
    eta_train,
    load_curves,
    measured_pipeline,
    pipeline_of,
    slow_down,
    write_curves,
)
from launch.simulate import simulate, steady
from megarl.config import RunConfig
from megarl.config_file import load_config
from megarl.errors import ConfigError

ROOT = Path(__file__).parents[3]


def _decode_cases() -> tuple[DecodeCase, ...]:
    """Return cases of 0.01 + 0.002 a sequence + 1e-6 a token held."""
    return tuple(
        DecodeCase(
            running=running,
            held=running * each,
            seconds=0.01 + 0.002 * running + 1e-6 * running * each,
            steps=10,
        )
        for running in (1, 4, 16)
        for each in (50.0, 150.0)
    )


def _train_case(lengths: list[int], parts: tuple[float, float, float]) -> TrainCase:
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    seconds = parts[0] + parts[1] * tokens + parts[2] * squares
    return TrainCase(
        sequences=len(lengths), tokens=tokens, squares=squares, seconds=seconds, steps=3
    )


def _train_cases(parts: tuple[float, float, float]) -> tuple[TrainCase, ...]:
    batches = ([20] * 8, [50] * 8, [20, 200, 70, 10], [30] * 32)
    return tuple(_train_case(lengths, parts) for lengths in batches)


def _make_curves(**changes) -> Curves:
    parts = (0.1, 1e-3, 1e-6)
    base = Curves(
        provenance={"host": "here"},
        alone=Rates(decode=_decode_cases(), train=_train_cases(parts)),
        train_beside=tuple(replace(c, seconds=1.2 * c.seconds) for c in _train_cases(parts)),
        dp=1,
        replicas=1,
        trainer_ranks=1,
        generator_ranks=1,
        sampling_seconds=0.0,
        tick_seconds=0.05,
        reward_sample_seconds=1e-4,
        prompt_length=10.0,
        group_size=2,
        lengths=(10, 40, 20, 30),
    )
    return replace(base, **changes)


def _make_config(*overrides: str) -> RunConfig:
    own = (
        "trainer.layout.tp=1",
        "trainer.layout.dp=1",
        "data.train_batch_size=2",
        "rollout.n=2",
        "max_steps=12",
        *overrides,
    )
    return load_config(ROOT / "configs/quickstart.yaml", own)


@pytest.mark.parametrize("running", [1, 2, 4, 10, 16, 20])
def test_a_decoding_step_costs_what_the_cases_cost_and_lines_lead_between_and_beyond(running: int):
    expected = 0.01 + 0.002 * running + 1e-6 * 700
    assert DecodeCurve(_decode_cases())(running, 700.0) == pytest.approx(expected)


def test_a_step_that_was_faster_with_more_tokens_does_not_depend_on_them():
    cases = [
        DecodeCase(running=2, held=held, seconds=seconds, steps=1)
        for held, seconds in ((10.0, 0.03), (100.0, 0.01))
    ]
    assert DecodeCurve(cases)(2, 1e6) == pytest.approx(0.02)


@pytest.mark.parametrize("parts", [(0.1, 1e-3, 1e-6), (0.0, 2e-3, 0.0), (0.3, 0.0, 1e-5)])
def test_training_costs_what_its_cases_are_made_of(parts: tuple[float, float, float]):
    lengths = [33, 7, 180]
    expected = _train_case(lengths, parts).seconds
    assert TrainCurve(_train_cases(parts))(lengths) == pytest.approx(expected, rel=1e-6)


def test_no_part_of_training_is_negative():
    cases = [replace(c, seconds=c.tokens**0.5) for c in _train_cases((0.0, 1.0, 0.0))]
    found = TrainCurve(cases)
    assert 0 < found([1]) < found([100]) < found([100, 100])


def test_unit_times_fall_with_the_batch():
    rates = _make_curves().alone
    train, decode = dict(eta_train(rates)), dict(eta_generate(rates))
    assert list(decode) == [1, 4, 16]
    assert decode[1] > decode[4] > decode[16]
    assert decode[4] == pytest.approx((0.01 + 0.008 + 1e-6 * 400) / 4)
    assert list(train) == [4, 8, 32]


def test_working_beside_one_another_takes_as_many_times_longer_as_measured():
    sampled = {"sampling_seconds": 2.0, "sampling_beside_seconds": 3.0}
    assert slow_down(_make_curves(**sampled)) == pytest.approx((1.2, 1.5))
    assert slow_down(_make_curves(train_beside=())) == (1.0, 1.0)


def test_a_file_holds_all_of_it(tmp_path: Path):
    for curves in (_make_curves(), _make_curves(train_beside=())):
        write_curves(curves, tmp_path / "curves.json")
        assert load_curves(tmp_path / "curves.json") == curves


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"lengths": [], "alone": 3}'])
def test_what_is_no_file_of_curves_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "curves.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"curves\.json.*tools\.measure_curves writes them"):
        load_curves(file)
    with pytest.raises(ConfigError, match="no decode case"):
        Rates(decode=(), train=_train_cases((1.0, 1.0, 1.0)))


def test_a_synchronous_run_takes_its_training_its_decoding_and_the_tick():
    """Batches of 10 + 40 and 20 + 30 tokens; the tail of a batch decodes with fewer sequences."""
    curves = _make_curves()
    pipeline = pipeline_of(curves, _make_config("mode=sync"), known_lengths=True)
    found = steady(simulate(pipeline, 12))
    lengths = [20, 50, 30, 40]
    decode, held = 0.0, 40.0
    for running, steps in ((4, 10), (3, 10), (2, 10), (1, 10)):
        middle = held + running * steps / 2
        decode += steps * DecodeCurve(curves.alone.decode)(running, middle)
        held += running * steps - (50 - 10 * running + 10)  # the one that ended, with its prompt
    train = TrainCurve(curves.alone.train)(lengths)
    assert found.train_seconds == pytest.approx(train)
    assert found.step_seconds == pytest.approx(train + decode + 0.05, rel=0.01)


def test_curves_of_another_layout_are_refused():
    with pytest.raises(ConfigError, match=r"\(1, 1, False\), expected \(2, 1, False\)"):
        pipeline_of(_make_curves(), _make_config("trainer.layout.dp=2"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_group_costs_what_sampling_took_longer_than_decoding(replicas: int):
    lengths = (20, 20) * 12
    curves = _make_curves(lengths=lengths, replicas=replicas)
    one = replace(measured_pipeline(curves, known_lengths=True), batch_groups=12)
    decoding = simulate(one, 1)[0].wait_seconds
    slower = replace(curves, sampling_seconds=decoding + 12 * 0.03 / replicas)
    assert measured_pipeline(slower).group_seconds == pytest.approx(0.03)
    sampled = replace(measured_pipeline(slower, known_lengths=True), batch_groups=12)
    assert simulate(sampled, 1)[0].wait_seconds == pytest.approx(slower.sampling_seconds)
