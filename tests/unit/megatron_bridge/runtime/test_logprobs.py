"""The split softmax against torch's own, in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_bridge.runtime.logprobs import (
    token_entropy,
    token_logprobs,
    token_logprobs_and_entropy,
)
from tests.processes import run_ranks

SIZE, PADDED, TEMPERATURE = 11, 16, 0.6


def _make_problem() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, PADDED, generator=generator) * 4
    logits[:, SIZE:] += 50  # padding that would swallow the softmax if it were let in
    targets = torch.randint(0, SIZE, (7,), generator=generator)
    return logits, targets, *torch.randn(2, 7, generator=generator)


def _expected() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, targets, weights, entropy_weights = _make_problem()
    dense = logits.double().requires_grad_()
    table = (dense[:, :SIZE] / TEMPERATURE).log_softmax(1)
    logprobs = table.gather(1, targets[:, None])[:, 0]
    entropy = -(table.exp() * table).sum(1)
    (logprobs * weights + entropy * entropy_weights).sum().backward()
    assert dense.grad is not None
    return logprobs.detach().float(), entropy.detach().float(), dense.grad.float()


def _check(rank: int, size: int) -> int:
    import torch.distributed as dist

    group = dist.group.WORLD if size > 1 else None
    logits, targets, weights, entropy_weights = _make_problem()
    expected_logprobs, expected_entropy, expected_grad = _expected()
    local = logits.chunk(size, dim=1)[rank].clone().requires_grad_()
    logprobs, entropy = token_logprobs_and_entropy(local, targets, TEMPERATURE, group, SIZE)
    (logprobs * weights + entropy * entropy_weights).sum().backward()
    assert local.grad is not None
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    grad = expected_grad.chunk(size, dim=1)[rank]
    torch.testing.assert_close(local.grad, grad, atol=1e-5, rtol=1e-4)
    return 1


def test_one_rank_agrees_with_log_softmax_and_its_gradients() -> None:
    assert _check(0, 1) == 1


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 4])  # of 4 ranks with 4 columns the last holds padding only
def test_ranks_that_share_the_vocabulary_agree_with_log_softmax(size: int) -> None:
    assert run_ranks(_check, size) == [1] * size


def test_each_result_alone_has_its_own_gradient() -> None:
    logits, targets, weights, _ = _make_problem()
    for ours, of_table in (
        (
            lambda x: token_logprobs(x, targets, 1.0, vocab_size=SIZE),
            lambda t: t.gather(1, targets[:, None])[:, 0],
        ),
        (
            lambda x: token_entropy(x, 1.0, vocab_size=SIZE),
            lambda t: -(t.exp() * t).sum(1),
        ),
    ):
        split, dense = logits.clone().requires_grad_(), logits.double().requires_grad_()
        (ours(split) * weights).sum().backward()
        (of_table(dense[:, :SIZE].log_softmax(1)) * weights).sum().backward()
        assert split.grad is not None
        assert dense.grad is not None
        torch.testing.assert_close(split.grad, dense.grad.float(), atol=1e-5, rtol=1e-4)


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    logits, targets, _, _ = _make_problem()
    rough = logits.bfloat16().requires_grad_()
    found = token_logprobs(rough, targets, 1.0, vocab_size=SIZE)
    assert found.dtype == torch.float32
    table = rough.detach().double()[:, :SIZE].log_softmax(1)
    torch.testing.assert_close(
        found.double(), table.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=0
    )
    found.sum().backward()
    assert rough.grad is not None
    assert rough.grad.dtype == torch.bfloat16


def test_a_vanished_probability_gives_no_nan() -> None:
    logits = torch.tensor([[0.0, 500.0, -500.0]]).requires_grad_()
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([0]), 1.0)
    (logprobs + entropy).sum().backward()
    assert float(logprobs) == -500.0
    assert float(entropy) == 0.0
    torch.testing.assert_close(logits.grad, torch.tensor([[1.0, -1.0, 0.0]]))
