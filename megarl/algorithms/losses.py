"""Policy losses (AIPO, PPO, GRPO) and the table of metric names; called by the trainer.

Losses and statistics are *sums* over the loss tokens of one micro-batch: they add up over
micro-batches and data-parallel ranks, and only then are divided, once, by the number of loss tokens
of the whole batch. A mean of means would weigh tokens by the rank they happened to land on.

Here mu is always the generator's own log-probability of the token, recorded when it was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.config import AlgorithmConfig, PolicyLoss

# exp(20) = 4.9e8: beyond any ratio that means something, and its square still fits float32.
MAX_LOG_RATIO = 20.0

# sum -> name of its mean over the loss tokens; `entropy` and `kl_ref` are added by the caller
MEAN_NAMES = {
    "pg_loss": "actor/pg_loss",
    "nll": "sft/loss",
    "clipped": "actor/pg_clipfrac",
    "kl_mu_pi_k1": "actor/ppo_kl",
    "entropy": "actor/entropy",
    "kl_ref": "actor/kl_loss",
    "importance_ratio": "rollout_corr/importance_ratio_mean",
    "kl_mu_pi": "rollout_corr/k3_kl",
    "logprob_abs_diff": "training/rollout_logprobs_diff_mean",
    "prob_abs_diff": "training/rollout_probs_diff_mean",
}
MAX_NAMES = {
    "importance_ratio_max": "rollout_corr/importance_ratio_max",
    "logprob_abs_diff_max": "training/rollout_logprobs_diff_max",
    "prob_abs_diff_max": "training/rollout_probs_diff_max",
}
ESS_NAME = "rollout_corr/ess"


class SummedLoss(NamedTuple):
    """A loss and its statistics, summed (or maximised) over the masked tokens."""

    loss_sum: Tensor  # [] with gradient
    sums: dict[str, Tensor]  # each [] float64, add over micro-batches and ranks
    maxima: dict[str, Tensor]  # each [] float64, maximise over micro-batches and ranks


def policy_loss(
    logprobs_T: Tensor,
    mu_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    algorithm: AlgorithmConfig,
) -> SummedLoss:
    """Return the summed policy loss of `algorithm.policy_loss` with its statistics.

    Args:
        logprobs_T: [T] float32 or float64, log pi of each token, with gradient.
        mu_logprobs_T: [T] log mu, from the generator.
        advantages_T: [T]
        mask_T: [T] 1 where the token enters the loss; other entries may hold anything, even nan.
        algorithm: chooses the loss and its bounds.
    """
    loss = {PolicyLoss.AIPO: _aipo, PolicyLoss.PPO: _clipped, PolicyLoss.GRPO: _clipped}
    inside_T = mask_T > 0
    # Zero outside *before* any arithmetic: nan * 0 would still be nan, in the gradient too.
    pi_T = logprobs_T.where(inside_T, 0.0)
    mu_T = mu_logprobs_T.where(inside_T, 0.0)
    advantages_T = advantages_T.where(inside_T, 0.0)
    loss_T, clipped_T = loss[algorithm.policy_loss](pi_T, mu_T, advantages_T, algorithm)
    loss_sum = loss_T.where(inside_T, 0.0).sum()
    sums, maxima = _statistics(pi_T.detach(), mu_T, inside_T)
    sums["pg_loss"] = loss_sum.detach().double()
    sums["clipped"] = (clipped_T & inside_T).sum(dtype=torch.float64)
    return SummedLoss(loss_sum, sums, maxima)


def _aipo(
    logprobs_T: Tensor, mu_T: Tensor, advantages_T: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Asynchronous importance-weighted policy optimisation (LlamaRL, section 6).

    loss = -sg[min(pi/mu, rho)] A log pi, so that its gradient is the paper's
    -min(pi/mu, rho) A grad log pi. The bound is one-sided: a token that pi has abandoned
    (pi/mu near 0) loses its push, whatever the sign of A.
    """
    log_ratio_T = logprobs_T.detach() - mu_T
    # min(exp(x), rho) = exp(min(x, log rho)): exact, and cannot overflow.
    weight_T = log_ratio_T.clamp(max=math.log(algorithm.rho)).exp()
    return -weight_T * advantages_T * logprobs_T, log_ratio_T > math.log(algorithm.rho)


def _clipped(
    logprobs_T: Tensor, mu_T: Tensor, advantages_T: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with r = pi/mu.

    loss = -min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A).

    GRPO (DeepSeekMath, eq. 3) is the same function here. What makes a run GRPO is outside it:
    group-mean advantages divided by the group's standard deviation (`norm_adv_by_std`) and a k3 KL
    to the starting model (`kl_loss_coef`). Two honest differences to the papers: the anchor is the
    generator's mu, not a recomputed pi_old; and tokens are averaged over the whole batch, where
    GRPO's paper averages within each response first.
    """
    ratio_T = _bounded_exp(logprobs_T - mu_T)
    low, high = 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high
    plain_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(low, high) * advantages_T
    return -torch.minimum(plain_T, clipped_T), (clipped_T < plain_T).detach()


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio kept within MAX_LOG_RATIO.

    One token whose pi and mu disagree wildly (log-ratio 100 overflows float32) must not turn the
    loss of a whole batch into inf or nan.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _statistics(
    pi_T: Tensor, mu_T: Tensor, inside_T: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How far pi is from mu on the masked tokens; sampled from mu, so KL means KL(mu || pi)."""
    log_ratio_T = (pi_T - mu_T).double()
    ratio_T = _bounded_exp(log_ratio_T).where(inside_T, 0.0)
    logprob_diff_T = log_ratio_T.abs()
    prob_diff_T = (pi_T.double().exp() - mu_T.double().exp()).abs()
    sums = {
        "importance_ratio": ratio_T.sum(),
        "importance_ratio_squared": ratio_T.square().sum(),
        "kl_mu_pi_k1": -log_ratio_T.sum(),
        # k3 = r - 1 - log r, never negative; see megarl.algorithms.kl
        "kl_mu_pi": (ratio_T - 1.0 - log_ratio_T).where(inside_T, 0.0).sum(),
        "logprob_abs_diff": logprob_diff_T.sum(),
        "prob_abs_diff": prob_diff_T.sum(),
    }
    columns = {
        "importance_ratio_max": ratio_T,
        "logprob_abs_diff_max": logprob_diff_T,
        "prob_abs_diff_max": prob_diff_T,
    }
    # The appended zero is the maximum of an empty micro-batch; no column is negative.
    zero = ratio_T.new_zeros(1)
    maxima = {name: torch.cat([column_T, zero]).max() for name, column_T in columns.items()}
    return sums, maxima


def metrics_from_sums(
    sums: Mapping[str, Tensor | float], maxima: Mapping[str, Tensor | float], num_tokens: int
) -> dict[str, float]:
    """Turn sums and maxima over a whole batch into named metrics.

    `rollout_corr/ess` is the effective sample size as a share of the tokens,
    (sum r)^2 / (num_tokens * sum r^2), 1 when every ratio is equal.

    Raises:
        ValueError: no tokens to average over.
        KeyError: a sum that has no name in the tables above.
    """
    if num_tokens < 1:
        raise ValueError(f"metrics of a batch need at least 1 loss token, got {num_tokens}")
    values = {name: float(value) for name, value in sums.items()}
    squares = values.pop("importance_ratio_squared", 0.0)
    metrics = {MEAN_NAMES[name]: value / num_tokens for name, value in values.items()}
    if squares > 0:
        metrics[ESS_NAME] = values["importance_ratio"] ** 2 / (num_tokens * squares)
    return metrics | {MAX_NAMES[name]: float(value) for name, value in maxima.items()}
