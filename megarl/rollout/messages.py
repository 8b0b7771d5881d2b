"""Requests and samples as messages between the reward executor and the generators' replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from megarl.rollout.engine import Sample, SampleRequest
from megarl.types import Orders, Report


class State(IntEnum):
    """Of a tick, as a replica is told. GO on decoding; HAND_OVER what is unfinished, in a report of
    its own, for a checkpoint; at the BOUNDARY leave the step."""

    GO = 0
    HAND_OVER = 1
    BOUNDARY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a replica is to do, as objects."""

    state: State
    requests: Sequence[SampleRequest] = ()
    aborts: Sequence[int] = ()


def pack_work(work: Work, eos: int) -> Orders:
    """Return the message of a replica's work."""
    requests = work.requests
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for request in requests:
        tokens += [*request.prompt, *request.generated]
        logprobs += [0.0] * len(request.prompt) + list(request.logprobs)
        versions += [-1] * len(request.prompt) + list(request.versions)
    return Orders(
        state=_long([work.state]),
        eos=_long([eos]),
        aborts=_long(work.aborts),
        request_ids=_long([request.request_id for request in requests]),
        prompt_lengths=_long([len(request.prompt) for request in requests]),
        lengths=_long([len(request.prompt) + len(request.generated) for request in requests]),
        max_tokens=_long([request.max_tokens for request in requests]),
        seeds=_long([request.seed for request in requests]),
        temperatures=torch.tensor([r.temperature for r in requests], dtype=torch.float64),
        tokens=_long(tokens),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        versions=_long(versions),
    )


def unpack_work(orders: Orders) -> Work:
    """Return what `pack_work` packed."""
    eos = int(orders.eos)
    tokens, logprobs, versions = (
        [part.tolist() for part in column.split(orders.lengths.tolist())]
        for column in (orders.tokens, orders.logprobs, orders.versions)
    )
    rows = zip(
        orders.request_ids.tolist(),
        orders.prompt_lengths.tolist(),
        orders.max_tokens.tolist(),
        orders.seeds.tolist(),
        orders.temperatures.tolist(),
        strict=True,
    )
    requests = [
        SampleRequest(
            request_id=request_id,
            prompt=tuple(tokens[row][:length]),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            eos_token_id=eos,
            generated=tuple(tokens[row][length:]),
            logprobs=tuple(logprobs[row][length:]),
            versions=tuple(versions[row][length:]),
        )
        for row, (request_id, length, max_tokens, seed, temperature) in enumerate(rows)
    ]
    return Work(state=State(int(orders.state)), requests=requests, aborts=orders.aborts.tolist())


def pack_samples(samples: Sequence[Sample]) -> Report:
    """Return the message of a replica's samples."""
    return Report(
        request_ids=_long([sample.request_id for sample in samples]),
        lengths=_long([len(sample.tokens) for sample in samples]),
        finished=_long([int(sample.finished) for sample in samples]),
        tokens=_long([token for sample in samples for token in sample.tokens]),
        logprobs=torch.tensor(
            [value for sample in samples for value in sample.logprobs], dtype=torch.float32
        ),
        versions=_long([version for sample in samples for version in sample.versions]),
    )


def unpack_samples(report: Report) -> list[Sample]:
    """Return what `pack_samples` packed."""
    columns = [
        [part.tolist() for part in column.split(report.lengths.tolist())]
        for column in (report.tokens, report.logprobs, report.versions)
    ]
    ids, finished = report.request_ids.tolist(), report.finished.tolist()
    return [
        Sample(
            request_id=request_id,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            finished=bool(ended),
        )
        for request_id, ended, tokens, logprobs, versions in zip(
            ids, finished, *columns, strict=True
        )
    ]


def _long(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
