"""KL estimators in exact expectation over a small categorical distribution."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.kl import kl_per_token
from megarl.config import KLEstimator

PI = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REF = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - q.log())).sum()


@pytest.mark.parametrize("estimator", [KLEstimator.K1, KLEstimator.K3])
def test_k1_and_k3_are_unbiased(estimator: KLEstimator) -> None:
    expected = (PI * kl_per_token(PI.log(), REF.log(), estimator)).sum()
    assert float(expected) == pytest.approx(float(_kl(PI, REF)), rel=1e-12)


def test_each_estimator_has_the_value_of_its_formula() -> None:
    pi, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert float(kl_per_token(pi, ref, KLEstimator.K1)) == pytest.approx(math.log(2))
    assert float(kl_per_token(pi, ref, KLEstimator.K2)) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(kl_per_token(pi, ref, KLEstimator.K3)) == pytest.approx(-0.5 + math.log(2))


@pytest.mark.parametrize("estimator", [KLEstimator.K2, KLEstimator.K3])
def test_k2_and_k3_are_never_negative(estimator: KLEstimator) -> None:
    pi = torch.linspace(-50, 0, 101, dtype=torch.float64)
    values = kl_per_token(pi[:, None], pi[None, :], estimator)
    assert (values >= 0).all()
    assert torch.isfinite(values).all()


def test_expected_gradients_are_those_the_docstring_promises() -> None:
    logits = PI.log().requires_grad_()
    ref = REF.log()
    (to_ref,) = torch.autograd.grad(_kl(logits.softmax(0), REF), logits)
    (from_ref,) = torch.autograd.grad(_kl(REF, logits.softmax(0)), logits)
    promised = {
        KLEstimator.K1: torch.zeros(3, dtype=torch.float64),
        KLEstimator.K2: to_ref,
        KLEstimator.K3: from_ref,
    }
    for estimator, expected in promised.items():
        # the weights PI are those of the sampler, so no gradient flows through them
        loss = (PI * kl_per_token(logits.log_softmax(0), ref, estimator)).sum()
        (grad,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


def test_an_abandoned_token_does_not_overflow() -> None:
    values = kl_per_token(torch.tensor([-500.0]), torch.tensor([-0.1]), KLEstimator.K3)
    assert torch.isfinite(values).all()
