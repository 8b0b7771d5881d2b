"""Per-token estimators of KL(pi || ref) to the frozen starting model; called by the trainer.

J. Schulman, "Approximating KL Divergence" (2020), with x = log ref - log pi of the sampled token:

    k1 = -x                 unbiased, high variance, of either sign
    k2 = x^2 / 2            biased, never negative
    k3 = exp(x) - 1 - x     unbiased, never negative (`low_var_kl` elsewhere)

The estimators are unbiased as *values*, for tokens sampled from pi. Used as a loss, autograd
differentiates them pathwise, which is another matter: in expectation k1 has gradient 0 (it only adds
noise), k2 has the gradient of KL(pi || ref), k3 that of KL(ref || pi). All three vanish at pi = ref.
"""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.losses import MAX_LOG_RATIO
from megarl.config import KLEstimator


def kl_per_token(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the estimate of KL(pi || ref) of each token.

    Args:
        logprobs_T: [T] log pi, with gradient.
        ref_logprobs_T: [T] log ref, without.
        estimator: k1, k2 or k3.
    """
    log_ratio_T = ref_logprobs_T - logprobs_T
    match estimator:
        case KLEstimator.K1:
            return -log_ratio_T
        case KLEstimator.K2:
            return log_ratio_T.square() / 2
        case KLEstimator.K3:
            # The bound keeps a token that pi has abandoned from turning the loss into inf.
            return log_ratio_T.clamp(max=MAX_LOG_RATIO).exp() - 1.0 - log_ratio_T
