"""What of a batch the trainer compares with the generators."""

import torch

from megarl.executors.trainer import sampled_by
from megarl.types import TrainBatch


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
