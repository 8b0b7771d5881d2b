"""Supervised loss on demonstrations; called by the trainer in `megarl sft`."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.losses import SummedLoss


def sft_loss(logprobs_T: Tensor, mask_T: Tensor) -> SummedLoss:
    """Return the negative log-likelihood summed over the masked tokens.

    Args:
        logprobs_T: [T] log pi of each token, with gradient.
        mask_T: [T] 1 where the token enters the loss (response and EOS).
    """
    loss_sum = -logprobs_T.where(mask_T > 0, 0.0).sum()
    return SummedLoss(loss_sum, {"nll": loss_sum.detach().double()}, {})
