from __future__ import annotations

import pytest
import torch

from megatron_bridge.runtime.batch import MicroBatch


def test_columns_must_be_as_long_as_the_tokens() -> None:
    with pytest.raises(ValueError, match=r"weights .* shape \(2,\), expected \(3,\)"):
        MicroBatch(
            lengths=torch.tensor([1, 2]),
            tokens=torch.zeros(3, dtype=torch.int64),
            columns={"weights": torch.zeros(2)},
        )


@pytest.mark.parametrize("lengths", [[], [2, 0]])
def test_empty_sequences_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="1 token or more"):
        MicroBatch(
            lengths=torch.tensor(lengths, dtype=torch.int64),
            tokens=torch.zeros(sum(lengths), dtype=torch.int64),
        )
