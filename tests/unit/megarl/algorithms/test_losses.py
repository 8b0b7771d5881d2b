"""Policy losses against closed forms: a softmax policy has grad log pi = onehot - softmax."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.losses import metrics_from_sums, policy_loss
from megarl.algorithms.sft import sft_loss
from megarl.config import AlgorithmConfig, PolicyLoss

TOKENS, VOCAB = 64, 7


def _make_case(seed: int, spread: float = 1.5) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return logits [T, V] with gradient, chosen [T], mu [T], advantages [T], mask [T]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    other = logits + spread * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    chosen = torch.randint(VOCAB, (TOKENS,), generator=generator)
    mu = other.log_softmax(-1)[torch.arange(TOKENS), chosen]
    advantages = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    mask = (torch.rand(TOKENS, generator=generator) < 0.7).double()
    return logits.requires_grad_(), chosen, mu, advantages, mask


def _logprobs(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.log_softmax(-1)[torch.arange(len(chosen)), chosen]


def _score_function(logits: Tensor, chosen: Tensor) -> Tensor:
    onehot = torch.nn.functional.one_hot(chosen, VOCAB).double()
    return onehot - logits.detach().softmax(-1)


@pytest.mark.parametrize("rho", [0.5, 1.0, 2.0, 4.0, 10.0])
@pytest.mark.parametrize("seed", range(5))
def test_aipo_gradient_is_the_papers(rho: float, seed: int) -> None:
    logits, chosen, mu, advantages, mask = _make_case(seed)
    logprobs = _logprobs(logits, chosen)
    loss, sums, _ = policy_loss(logprobs, mu, advantages, mask, AlgorithmConfig(rho=rho))
    loss.backward()
    ratio = (logprobs.detach() - mu).exp()
    weight = -torch.minimum(ratio, torch.tensor(rho, dtype=torch.float64)) * advantages * mask
    torch.testing.assert_close(
        logits.grad, weight[:, None] * _score_function(logits, chosen), rtol=1e-12, atol=1e-14
    )
    assert sums["clipped"] == ((ratio > rho) * mask).sum()


def test_aipo_with_unbounded_rho_is_plain_importance_weighting() -> None:
    logits, chosen, mu, advantages, mask = _make_case(1)
    loss, sums, _ = policy_loss(
        _logprobs(logits, chosen), mu, advantages, mask, AlgorithmConfig(rho=1e30)
    )
    (grad,) = torch.autograd.grad(loss, logits)
    # d/dlogits of the plain surrogate -sum r A
    surrogate = -((_logprobs(logits, chosen) - mu).exp() * advantages * mask).sum()
    (expected,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)
    assert sums["clipped"] == 0


@pytest.mark.parametrize("kind", list(PolicyLoss))
def test_on_policy_every_loss_is_reinforce(kind: PolicyLoss) -> None:
    logits, chosen, _, advantages, mask = _make_case(2)
    logprobs = _logprobs(logits, chosen)
    algorithm = AlgorithmConfig(policy_loss=kind)
    loss, sums, maxima = policy_loss(logprobs, logprobs.detach(), advantages, mask, algorithm)
    loss.backward()
    expected = -(advantages * mask)[:, None] * _score_function(logits, chosen)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-14)
    metrics = metrics_from_sums(sums, maxima, int(mask.sum()))
    assert metrics["rollout_corr/ess"] == pytest.approx(1.0)
    assert metrics["rollout_corr/importance_ratio_max"] == 1.0
    assert metrics["actor/pg_clipfrac"] == metrics["actor/ppo_kl"] == 0.0


@pytest.mark.parametrize("kind", [PolicyLoss.PPO, PolicyLoss.GRPO])
@pytest.mark.parametrize("seed", range(3))
def test_clipped_losses_follow_the_case_table_of_the_surrogate(kind: PolicyLoss, seed: int) -> None:
    logits, chosen, mu, advantages, mask = _make_case(seed, spread=0.3)
    logprobs = _logprobs(logits, chosen)
    algorithm = AlgorithmConfig(policy_loss=kind, clip_ratio_low=0.1, clip_ratio_high=0.3)
    loss, sums, _ = policy_loss(logprobs, mu, advantages, mask, algorithm)
    loss.backward()
    value, clipped, weights = 0.0, 0, []
    rows = zip(logprobs.tolist(), mu.tolist(), advantages.tolist(), mask.tolist(), strict=True)
    for pi_t, mu_t, advantage, inside in rows:
        ratio = math.exp(pi_t - mu_t)
        bound = 1.3 if advantage > 0 else 0.9
        stopped = ratio > bound if advantage > 0 else ratio < bound
        value -= inside * (bound if stopped else ratio) * advantage
        clipped += int(stopped and inside > 0)
        weights.append(0.0 if stopped else -inside * ratio * advantage)
    assert 0 < clipped < mask.sum()
    assert float(loss.detach()) == pytest.approx(value, rel=1e-12)
    assert sums["clipped"] == clipped
    expected = torch.tensor(weights, dtype=torch.float64)[:, None] * _score_function(logits, chosen)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", list(PolicyLoss))
@pytest.mark.parametrize("log_ratio", [-300.0, 300.0])
def test_a_wild_ratio_leaves_loss_gradient_and_metrics_finite(
    kind: PolicyLoss, log_ratio: float
) -> None:
    logprobs = torch.tensor([-1.0 + min(0.0, log_ratio), -0.5], requires_grad=True)
    mu = torch.tensor([-1.0 - max(0.0, log_ratio), -0.5])
    for advantage in (1.0, -1.0):
        loss, sums, maxima = policy_loss(
            logprobs,
            mu,
            torch.tensor([advantage, 1.0]),
            torch.ones(2),
            AlgorithmConfig(policy_loss=kind),
        )
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert torch.isfinite(loss)
        assert torch.isfinite(grad).all()
        assert all(math.isfinite(v) for v in metrics_from_sums(sums, maxima, 2).values())


@pytest.mark.parametrize("kind", list(PolicyLoss))
def test_entries_outside_the_mask_do_not_matter_even_when_nan(kind: PolicyLoss) -> None:
    logits, chosen, mu, advantages, mask = _make_case(3)
    algorithm = AlgorithmConfig(policy_loss=kind)
    logprobs = _logprobs(logits, chosen).detach().requires_grad_()
    keep = mask > 0
    short = policy_loss(logprobs[keep], mu[keep], advantages[keep], mask[keep], algorithm)
    nan = torch.tensor(math.nan, dtype=torch.float64)
    dirty = logprobs.detach().where(keep, nan).requires_grad_()
    full = policy_loss(dirty, mu.where(keep, nan), advantages.where(keep, nan), mask, algorithm)
    full.loss_sum.backward()
    assert dirty.grad is not None
    assert torch.isfinite(dirty.grad).all()
    torch.testing.assert_close(full.loss_sum, short.loss_sum)
    torch.testing.assert_close(full.sums, short.sums)
    torch.testing.assert_close(full.maxima, short.maxima)


@given(cut=st.integers(0, TOKENS))
@settings(max_examples=20, deadline=None)
def test_sums_and_maxima_do_not_depend_on_micro_batches(cut: int) -> None:
    logits, chosen, mu, advantages, mask = _make_case(4)
    columns = (_logprobs(logits, chosen).detach(), mu, advantages, mask)
    whole = policy_loss(*columns, AlgorithmConfig())
    first = policy_loss(*(c[:cut] for c in columns), AlgorithmConfig())
    second = policy_loss(*(c[cut:] for c in columns), AlgorithmConfig())
    torch.testing.assert_close(first.loss_sum + second.loss_sum, whole.loss_sum)
    for name, value in whole.sums.items():
        torch.testing.assert_close(first.sums[name] + second.sums[name], value)
    for name, value in whole.maxima.items():
        assert max(first.maxima[name], second.maxima[name]) == value


def test_metrics_of_a_hand_made_batch() -> None:
    # pi = .5, .2, .4; mu = .25, .4, .4: ratios 2, .5, 1
    pi, mu = torch.tensor([0.5, 0.2, 0.4]).double(), torch.tensor([0.25, 0.4, 0.4]).double()
    advantages = torch.tensor([1.0, -1.0, 0.5]).double()
    _, sums, maxima = policy_loss(
        pi.log(), mu.log(), advantages, torch.ones(3), AlgorithmConfig(rho=1.5)
    )
    metrics = metrics_from_sums(sums | {"entropy": 1.2, "kl_ref": 0.3}, maxima, 3)
    loss = -(1.5 * math.log(0.5) - 0.5 * math.log(0.2) + 0.5 * math.log(0.4)) / 3
    assert metrics == pytest.approx(
        {
            "actor/pg_loss": loss,
            "actor/pg_clipfrac": 1 / 3,
            "actor/ppo_kl": 0.0,  # -(log 2 - log 2 + 0) / 3
            "actor/entropy": 0.4,
            "actor/kl_loss": 0.1,
            "rollout_corr/importance_ratio_mean": 3.5 / 3,
            "rollout_corr/importance_ratio_max": 2.0,
            "rollout_corr/ess": 3.5**2 / (3 * 5.25),
            "rollout_corr/k3_kl": 0.5 / 3,  # (2 - 1 - log 2) + (.5 - 1 + log 2) + 0
            "training/rollout_logprobs_diff_mean": 2 * math.log(2) / 3,
            "training/rollout_logprobs_diff_max": math.log(2),
            "training/rollout_probs_diff_mean": 0.45 / 3,
            "training/rollout_probs_diff_max": 0.25,
        },
        abs=1e-9,
    )


def test_metrics_refuse_an_empty_batch_and_an_unnamed_sum() -> None:
    with pytest.raises(ValueError, match="at least 1 loss token"):
        metrics_from_sums({}, {}, 0)
    with pytest.raises(KeyError, match="novelty"):
        metrics_from_sums({"novelty": 1.0}, {}, 1)


def test_sft_gradient_is_softmax_minus_onehot() -> None:
    logits, chosen, _, _, mask = _make_case(5)
    loss, sums, maxima = sft_loss(_logprobs(logits, chosen), mask)
    loss.backward()
    torch.testing.assert_close(logits.grad, -mask[:, None] * _score_function(logits, chosen))
    expected = torch.nn.functional.cross_entropy(logits.detach(), chosen, reduction="none")
    assert metrics_from_sums(sums, maxima, TOKENS)["sft/loss"] == pytest.approx(
        float((expected * mask).sum()) / TOKENS
    )
