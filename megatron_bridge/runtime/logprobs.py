"""Log-probabilities and entropies over a vocabulary that is split across tensor-parallel ranks.

Called by `model` and `train` on the last pipeline stage. Logits are never gathered: a softmax
costs one maximum and one sum over [3, T] numbers, and its backward pass no communication.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp


class _SplitSoftmax(torch.autograd.Function):
    """(logits [T, V/tp]) -> (log-probability of the target [T], entropy [T]), in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        tp_group: ProcessGroup | None,
        vocab_size: int | None,
    ) -> tuple[Tensor, Tensor]:
        num_columns = logits.shape[1]
        start, num_real = 0 if tp_group is None else tp_group.rank() * num_columns, num_columns
        if vocab_size is not None:  # what lies past it is padding and stays out of the softmax
            num_real = min(max(vocab_size - start, 0), num_columns)
        scaled = logits[:, :num_real].float()
        if temperature != 1.0:
            scaled = scaled / temperature
        peak = scaled.amax(1) if num_real else scaled.new_full((len(scaled),), -torch.inf)
        _reduce(peak, ReduceOp.MAX, tp_group)
        scaled = scaled - peak[:, None]
        weights = scaled.exp()

        columns = targets - start
        mine = (columns >= 0) & (columns < num_real)
        columns = columns.where(mine, 0)[:, None]
        chosen = scaled.gather(1, columns)[:, 0].where(mine, 0) if num_real else peak * 0
        sums = torch.stack([weights.sum(1), chosen, torch.linalg.vecdot(weights, scaled)])
        _reduce(sums, ReduceOp.SUM, tp_group)
        total, chosen, moment = sums
        log_total = total.log()
        entropy = log_total - moment / total

        probabilities = weights.div_(total[:, None])
        ctx.save_for_backward(probabilities, entropy, columns, mine)
        ctx.temperature, ctx.num_columns, ctx.dtype = temperature, num_columns, logits.dtype
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        probabilities, entropy, columns, mine = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        if grad_logprob is None:
            grad = torch.zeros_like(probabilities)
        else:
            grad_logprob = grad_logprob / ctx.temperature
            grad = probabilities * -grad_logprob[:, None]
            if grad.shape[1]:
                grad.scatter_add_(1, columns, grad_logprob.where(mine, 0)[:, None])
        if grad_entropy is not None:  # dH/dz = -p (log p + H)
            slope = torch.xlogy(probabilities, probabilities) + probabilities * entropy[:, None]
            grad -= slope * (grad_entropy / ctx.temperature)[:, None]
        if ctx.num_columns > grad.shape[1]:
            grad = torch.nn.functional.pad(grad, (0, ctx.num_columns - grad.shape[1]))
        return grad.to(ctx.dtype), None, None, None, None


def _reduce(values: Tensor, op: ReduceOp.RedOpType, tp_group: ProcessGroup | None) -> None:
    if tp_group is not None and tp_group.size() > 1:
        dist.all_reduce(values, op=op, group=tp_group)


def token_logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    tp_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probability of each target and entropy (nats) of each row from one softmax.

    Args:
        logits: [T, V/tp], this rank's columns of the padded vocabulary.
        targets: [T] int64, token ids of the whole vocabulary; the same on all ranks.
        temperature: logits are divided by it.
        tp_group: the ranks that share the vocabulary, all of which enter; None: only this one.
        vocab_size: number of real entries over all ranks; None: no padding.

    Returns:
        Two float32 tensors [T], differentiable, the same on all ranks of the group.
    """
    return _SplitSoftmax.apply(logits, targets, temperature, tp_group, vocab_size)  # pyright: ignore


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    tp_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the log-probability of each target [T]; see `token_logprobs_and_entropy`."""
    return token_logprobs_and_entropy(logits, targets, temperature, tp_group, vocab_size)[0]


def token_entropy(
    logits: Tensor,
    temperature: float,
    tp_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the entropy of each row [T] in nats; see `token_logprobs_and_entropy`."""
    targets = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    return token_logprobs_and_entropy(logits, targets, temperature, tp_group, vocab_size)[1]
