"""Group advantages against numbers worked out by hand and against torch's own statistics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import STD_EPS, group_advantages
from megarl.config import AdvantageEstimator
from megarl.errors import ConfigError

MEAN, LOO, NONE = (
    AdvantageEstimator.GROUP_MEAN,
    AdvantageEstimator.LEAVE_ONE_OUT,
    AdvantageEstimator.NONE,
)


def test_hand_computed_groups_of_unequal_size_in_mixed_order() -> None:
    # group 7: 1, 0, 0, 1 (mean .5); group 3: 2, 5 (mean 3.5)
    rewards = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0, 1.0])
    groups = torch.tensor([7, 3, 7, 7, 3, 7])
    assert group_advantages(rewards, groups, MEAN).tolist() == [0.5, -1.5, -0.5, -0.5, 1.5, 0.5]
    leave_one_out = group_advantages(rewards, groups, LOO)
    # 1 - (0+0+1)/3; 2 - 5; 0 - (1+0+1)/3; ..
    expected = torch.tensor([2 / 3, -3.0, -2 / 3, -2 / 3, 3.0, 2 / 3])
    torch.testing.assert_close(leave_one_out, expected)
    assert group_advantages(rewards, groups, NONE).tolist() == rewards.tolist()


def test_std_normalisation_uses_the_sample_standard_deviation() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 9.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    result = group_advantages(rewards, groups, MEAN, norm_by_std=True)
    for group in (0, 1):
        own = rewards[groups == group]
        expected = (own - own.mean()) / (own.std() + STD_EPS)
        torch.testing.assert_close(result[groups == group], expected)


@given(
    reward=st.floats(-1e6, 1e6, width=32),
    size=st.integers(1, 33),
    norm=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_equal_rewards_give_exactly_zero(reward: float, size: int, norm: bool) -> None:
    rewards = torch.full((size + 2,), reward)
    rewards[-2:] = torch.tensor([0.0, 1.0])
    groups = torch.tensor([5] * size + [6, 6])
    assert (group_advantages(rewards, groups, MEAN, norm)[:size] == 0).all()
    if size > 1:
        assert (group_advantages(rewards, groups, LOO, norm)[:size] == 0).all()


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.sampled_from([MEAN, LOO]))
@settings(max_examples=50, deadline=None)
def test_a_baselined_group_sums_to_zero_and_ignores_a_shift(
    values: list[float], estimator: AdvantageEstimator
) -> None:
    rewards = torch.tensor(values, dtype=torch.float64)
    groups = torch.zeros(len(values), dtype=torch.long)
    result = group_advantages(rewards, groups, estimator)
    assert abs(float(result.sum())) < 1e-9
    torch.testing.assert_close(result, group_advantages(rewards + 10, groups, estimator))


def test_impossible_combinations_are_refused() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1])
    with pytest.raises(ConfigError, match="norm_adv_by_std"):
        group_advantages(rewards, groups, NONE, norm_by_std=True)
    with pytest.raises(ConfigError, match="at least 2 samples"):
        group_advantages(rewards, groups, LOO)
