"""Advantages of the samples of a prompt against their group; called by the reward executor."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.config import AdvantageEstimator
from megarl.errors import ConfigError

# As in the common GRPO implementations: added to the standard deviation, not to the variance.
STD_EPS = 1e-6


def group_advantages(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    estimator: AdvantageEstimator,
    norm_by_std: bool = False,
) -> Tensor:
    """Return one advantage a sample; samples of equal id form a group, in any order.

    group_mean:     r_i - mean(r)
    leave_one_out:  r_i - mean of the others' r = (r_i - mean(r)) * G / (G - 1)
    none:           r_i

    With `norm_by_std` the result is divided by the group's sample standard deviation (G - 1 in the
    denominator, as in GRPO). A group of equal rewards gives exactly 0 against either baseline.

    Args:
        rewards_B: [B] float.
        group_ids_B: [B] integer.
        estimator: the baseline.
        norm_by_std: divide by the group's standard deviation.

    Raises:
        ConfigError: `none` with `norm_by_std`, or `leave_one_out` in a group of one.
    """
    if estimator is AdvantageEstimator.NONE:
        if norm_by_std:
            raise ConfigError(
                "algorithm.norm_adv_by_std must be false with algorithm.adv_estimator=none: "
                "a group of equal rewards has standard deviation 0 and no baseline to cancel it"
            )
        return rewards_B
    _, groups_B, sizes = torch.unique(group_ids_B, return_inverse=True, return_counts=True)
    rewards = rewards_B.double()
    # Relative to the group's smallest reward, so that equal rewards give 0 without rounding.
    smallest = rewards.new_zeros(len(sizes)).scatter_reduce(
        0, groups_B, rewards, "amin", include_self=False
    )
    excess_B = rewards - smallest[groups_B]
    centered_B = excess_B - (_sum_by_group(excess_B, groups_B, len(sizes)) / sizes)[groups_B]
    advantages_B = centered_B
    if estimator is AdvantageEstimator.LEAVE_ONE_OUT:
        if int(sizes.min()) < 2:
            raise ConfigError(
                "algorithm.adv_estimator=leave_one_out needs at least 2 samples in each group, "
                "got a group of 1"
            )
        advantages_B = centered_B * (sizes / (sizes - 1))[groups_B]
    if norm_by_std:
        squares = _sum_by_group(centered_B.square(), groups_B, len(sizes))
        std = (squares / (sizes - 1).clamp(min=1)).sqrt()
        advantages_B = advantages_B / (std + STD_EPS)[groups_B]
    return advantages_B.to(rewards_B.dtype)


def _sum_by_group(values_B: Tensor, groups_B: Tensor, num_groups: int) -> Tensor:
    return values_B.new_zeros(num_groups).index_add(0, groups_B, values_B)
