"""What ranks measured becomes cases; what was predicted is held against what a run did."""

import pytest

from tools.check_simulator import compare
from tools.curve_rank import Series, decoded
from tools.measure_curves import rates, sampling


def _series(running: int, seconds: list[float]) -> Series:
    return Series(running=running, prompt=10.0, seconds=seconds)


def test_decoding_steps_become_an_earlier_and_a_later_case_without_first_and_last_ones():
    """A step takes 1 ms a token held, where eight sequences hold 10 + 1 tokens after their first."""
    steps = [0.008 * (11 + step) for step in range(12)]
    found = decoded([_series(8, [0.5, *steps, 9.0, 9.0]), _series(8, [0.5, *steps, 9.0, 9.0])])
    early, late = found["decode"]
    assert (early["steps"], late["steps"]) == (12, 12)
    for case in (early, late):
        assert case["seconds"] == pytest.approx(1e-3 * case["held"])
    assert late["held"] - early["held"] == pytest.approx(8 * 6)
    assert found["prefill_token_seconds"] == pytest.approx((0.5 - early["seconds"]) / 80)


def _train_case(seconds: float) -> dict:
    return {"sequences": 4, "tokens": 40, "squares": 400, "seconds": seconds, "steps": 2}


def _decode_case(seconds: float) -> dict:
    return {"running": 2, "held": 30.0, "seconds": seconds, "steps": 5}


def test_the_slowest_trainer_rank_and_all_replicas_count():
    found = rates(
        [
            {"decode": [_decode_case(0.1)], "prefill_token_seconds": 1e-3},
            {"decode": [_decode_case(0.3)], "prefill_token_seconds": 3e-3},
        ],
        [
            [_train_case(1.0), _train_case(4.0)],
            [_train_case(2.0), _train_case(3.0)],
        ],
    )
    assert [case.seconds for case in found.train] == [2.0, 4.0]
    assert [case.seconds for case in found.decode] == [0.1, 0.3]
    assert found.prefill_token_seconds == pytest.approx(2e-3)


def test_sampling_takes_as_long_as_its_slowest_replica():
    assert sampling([{"seconds": 4.0}, {"seconds": 6.0}, {"rounds": 2}]) == 3.0


@pytest.mark.parametrize(
    ("seconds", "idle", "within"), [(1.14, 0.54, True), (1.16, 0.5, False), (1.0, 0.56, False)]
)
def test_a_prediction_is_within_bounds_or_not(seconds: float, idle: float, within: bool):
    expected = {"step_seconds": 1.0, "trainer_idle_ratio": 0.5, "generator_idle_ratio": 0.1}
    found = compare(expected | {"step_seconds": seconds, "trainer_idle_ratio": idle}, expected)
    assert found["within"] is within
    assert found["step_error"] == pytest.approx(seconds - 1)
