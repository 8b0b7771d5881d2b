import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.channels.wire import pack, payload_length, unpack
from megarl.errors import ChannelError
from megarl.types import Control, MetricValues, TrainBatch, field_tensors


def _make_batch(lengths: list[int]) -> TrainBatch:
    num_tokens, num_rows = sum(lengths), len(lengths)
    return TrainBatch(
        prompt_ids=torch.arange(num_rows),
        sample_ids=torch.zeros(num_rows, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        tokens=torch.randint(0, 99, (num_tokens,)),
        loss_mask=torch.rand(num_tokens),
        logprobs=torch.randn(num_tokens),
        advantages=torch.randn(num_tokens),
        versions=torch.randint(-1, 9, (num_tokens,)),
        micro_batches=torch.randint(0, 3, (num_rows,)),
        num_micro_batches=torch.tensor([3]),
    )


@given(st.lists(st.integers(1, 30), max_size=12))
def test_a_message_survives_the_wire_bit_for_bit(lengths: list[int]) -> None:
    message = _make_batch(lengths)
    header, payload = pack(message)
    assert payload_length(header, "here") == payload.numel()
    again = unpack(TrainBatch, header, payload, "here")
    for sent, received in zip(field_tensors(message), field_tensors(again), strict=True):
        assert sent.dtype == received.dtype
        assert torch.equal(sent, received)


def test_metrics_survive_the_wire() -> None:
    metrics = {"actor/loss": 0.1, "päth": -1e300}
    message = MetricValues.from_dict(metrics)
    assert unpack(MetricValues, *pack(message), "here").to_dict() == metrics


def test_another_message_type_is_refused() -> None:
    with pytest.raises(ChannelError, match="expected MetricValues with 2 fields"):
        unpack(MetricValues, *pack(Control(stop=torch.tensor([1]))), "channel 'c' with rank 3")


def test_bytes_that_are_no_header_are_refused() -> None:
    with pytest.raises(ChannelError, match="channel 'c'"):
        payload_length(torch.ones(64, dtype=torch.int64), "channel 'c'")


def test_columns_of_unequal_length_are_refused() -> None:
    batch = _make_batch([2, 3])
    with pytest.raises(ValueError, match=r"logprobs has shape \(4,\), expected \(5,\)"):
        TrainBatch(
            **{name: getattr(batch, name) for name in TrainBatch.__slots__}
            | {"logprobs": torch.zeros(4)}
        )
