"""What of a batch the trainer compares with the generators, and what it says of several updates."""

import pytest
import torch

from megarl.algorithms.losses import metrics_from_sums
from megarl.executors.trainer import combine, sampled_by
from megarl.types import TrainBatch
from megatron_bridge.runtime.train import StepResult


def test_only_sequences_that_one_version_sampled_alone_are_compared() -> None:
    versions = torch.tensor([-1, 4, 4, -1, 3, 4, -1, -1, 3, -1, 4])
    zeros = torch.zeros(len(versions))
    batch = TrainBatch(
        prompt_ids=torch.arange(4),
        sample_ids=torch.zeros(4, dtype=torch.int64),
        lengths=torch.tensor([3, 3, 3, 2]),
        tokens=zeros.long(),
        loss_mask=(versions >= 0).float(),
        logprobs=zeros,
        advantages=zeros,
        versions=versions,
        micro_batches=torch.zeros(4, dtype=torch.int64),
        num_micro_batches=torch.ones(1, dtype=torch.int64),
    )
    assert sampled_by(batch, 4).loss_mask.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert sampled_by(batch, 3).loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert not sampled_by(batch, 5).loss_mask.any()


def test_updates_are_reported_by_their_tokens_and_their_extremes() -> None:
    ratios = ([0.5, 1.5], [1.0, 2.0, 4.0, 1.0])  # of the tokens of two updates
    results = [
        StepResult(
            loss=-sum(each) / len(each),
            grad_norm=norm,
            lr=lr,
            num_tokens=len(each),
            sums={
                "importance_ratio": sum(each),
                "importance_ratio_squared": sum(ratio**2 for ratio in each),
            },
            maxima={"importance_ratio_max": max(each)},
        )
        for each, norm, lr in zip(ratios, (3.0, 0.5), (1e-3, 2e-3), strict=True)
    ]
    assert combine(results[:1]) is results[0]
    found = combine(results)
    tokens = [*ratios[0], *ratios[1]]
    assert found.loss == pytest.approx(-sum(tokens) / 6)
    assert (found.grad_norm, found.lr, found.num_tokens) == (3.0, 2e-3, 6)
    metrics = metrics_from_sums(found.sums, found.maxima, found.num_tokens)
    assert metrics["rollout_corr/importance_ratio_mean"] == pytest.approx(sum(tokens) / 6)
    assert metrics["rollout_corr/importance_ratio_max"] == 4.0
    ess = sum(tokens) ** 2 / (6 * sum(ratio**2 for ratio in tokens))
    assert metrics["rollout_corr/ess"] == pytest.approx(ess)
