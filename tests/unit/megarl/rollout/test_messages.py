"""Requests and samples come out of their messages as they went in, over the wire format too."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.channels.wire import pack, unpack
from megarl.rollout.engine import Sample, SampleRequest
from megarl.rollout.messages import (
    State,
    Work,
    pack_samples,
    pack_work,
    unpack_samples,
    unpack_work,
)
from megarl.types import Message, Orders, Report

EOS = 2
tokens = st.integers(3, 200_000)
tuples = st.lists(tokens, min_size=1, max_size=6).map(tuple)
floats = st.floats(-50, 0, width=32)


@st.composite
def responses(draw: st.DrawFn, most: int) -> dict[str, tuple]:
    length = draw(st.integers(0, most))
    columns = {"tokens": tokens, "logprobs": floats, "versions": st.integers(0, 9999)}
    return {
        name: tuple(draw(st.lists(values, min_size=length, max_size=length)))
        for name, values in columns.items()
    }


@st.composite
def requests(draw: st.DrawFn) -> SampleRequest:
    begun = draw(responses(5))
    return SampleRequest(
        request_id=draw(st.integers(0, 1 << 40)),
        prompt=draw(tuples),
        max_tokens=len(begun["tokens"]) + draw(st.integers(1, 99)),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1 / 3])),
        seed=draw(st.integers(0, (1 << 32) - 1)),
        eos_token_id=EOS,
        generated=begun["tokens"],
        logprobs=begun["logprobs"],
        versions=begun["versions"],
    )


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    return Sample(
        request_id=draw(st.integers(0, 1 << 40)),
        finished=draw(st.booleans()),
        **draw(responses(6)),
    )


def _over_the_wire(message: Message) -> Message:
    return unpack(type(message), *pack(message), "test")


@settings(deadline=None)
@given(
    state=st.sampled_from(State),
    requests=st.lists(requests(), max_size=5),
    aborts=st.lists(st.integers(0, 1 << 40), max_size=4),
)
def test_work_comes_out_as_it_went_in(
    state: State, requests: list[SampleRequest], aborts: list[int]
) -> None:
    work = Work(state=state, requests=requests, aborts=aborts)
    orders = pack_work(work, EOS)
    received = _over_the_wire(orders)
    assert isinstance(received, Orders)
    assert unpack_work(orders) == unpack_work(received) == work


@settings(deadline=None)
@given(samples=st.lists(samples(), max_size=6))
def test_samples_come_out_as_they_went_in(samples: list[Sample]) -> None:
    report = pack_samples(samples)
    received = _over_the_wire(report)
    assert isinstance(received, Report)
    assert unpack_samples(report) == unpack_samples(received) == samples


def test_columns_of_orders_follow_the_tokens() -> None:
    begun = SampleRequest(
        request_id=7,
        prompt=(5, 6, 7),
        max_tokens=9,
        temperature=0.5,
        seed=11,
        eos_token_id=EOS,
        generated=(8, 9),
        logprobs=(-0.5, -0.25),
        versions=(3, 4),
    )
    fresh = dataclasses.replace(
        begun, request_id=8, prompt=(5,), generated=(), logprobs=(), versions=()
    )
    orders = pack_work(Work(state=State.GO, requests=[begun, fresh], aborts=[1]), EOS)
    assert orders.tokens.tolist() == [5, 6, 7, 8, 9, 5]
    assert orders.logprobs.tolist() == [0, 0, 0, -0.5, -0.25, 0]
    assert orders.versions.tolist() == [-1, -1, -1, 3, 4, -1]
    assert orders.lengths.tolist() == [5, 1]
    assert orders.prompt_lengths.tolist() == [3, 1]
    assert orders.temperatures.dtype == torch.float64
    assert (int(orders.state), int(orders.eos), orders.aborts.tolist()) == (0, EOS, [1])
