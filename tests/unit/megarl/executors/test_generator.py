"""A replica's rank on a scripted link: what it reports, when it leaves a tick, what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from megarl.checkpoint import StartPoint
from megarl.config import RunConfig
from megarl.errors import ChannelError
from megarl.executors.generator import GeneratorExecutor, Pace, Replica
from megarl.observe.trace import Tracer
from megarl.rollout.engine import Engine, Sample, SampleRequest
from megarl.rollout.messages import State, Work, pack_work, unpack_samples
from megarl.types import MetricValues, Orders, Report
from megatron_bridge.spec import RankManifest


class _FakeEngine(Engine):
    """Samples token 5 until ``max_tokens``, one token a step."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[SampleRequest, int]] = {}
        self.version = -1

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def transforms(self) -> dict[str, str]:
        return {}

    def poison(self) -> None: ...

    def commit(self, version: int) -> None:
        self.version = version

    def add(self, requests: Sequence[SampleRequest]) -> None:
        self.running |= {request.request_id: (request, 0) for request in requests}

    def step(self) -> list[Sample]:
        self.running = {key: (r, done + 1) for key, (r, done) in self.running.items()}
        ended = [key for key, (r, done) in self.running.items() if done == r.max_tokens]
        samples = [sample for sample in self.unfinished() if sample.request_id in ended]
        self.abort(ended)
        return samples

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    @property
    def recomputed_tokens(self) -> int:
        return 0

    def unfinished(self) -> list[Sample]:
        return [
            Sample(
                request_id=key,
                tokens=(5,) * done,
                logprobs=(-1.0,) * done,
                versions=(self.version,) * done,
                finished=False,
            )
            for key, (_, done) in self.running.items()
        ]

    def abort(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            del self.running[request_id]

    def sleep(self) -> None: ...

    def close(self) -> None: ...


class _FakeClient:
    """Answers report k with the k-th work; a report is due after ``patience`` looks."""

    def __init__(self, *works: Work, patience: int = 3) -> None:
        self._works, self._patience, self._looks = list(works), patience, 0
        self.reports: list[list[Sample]] = []

    def agree(self, due: bool) -> bool:
        self._looks += 1
        return self._looks % self._patience == 0

    def exchange(self, report: Report) -> Orders:
        self.reports.append(unpack_samples(report))
        return pack_work(self._works.pop(0), 2)


def _make_request(request_id: int, max_tokens: int) -> SampleRequest:
    return SampleRequest(
        request_id=request_id,
        prompt=(1,),
        max_tokens=max_tokens,
        temperature=1.0,
        seed=0,
        eos_token_id=2,
    )


def _make_executor(client: _FakeClient, engine: _FakeEngine) -> GeneratorExecutor:
    executor = GeneratorExecutor(
        RunConfig(),
        StartPoint(step=6, trainer_folder=Path("nowhere")),  # so that no checkpoint is compared
        Replica(
            manifest=RankManifest(rank=0, params=()), client=client, has_arrived=lambda tick: False
        ),
        lambda: engine,
        Tracer("generator", 0),
    )
    executor.init()
    executor.commit_update(6, 100)
    return executor


def test_a_tick_decodes_reports_and_leaves_the_unfinished_where_it_is() -> None:
    requests = [_make_request(0, 2), _make_request(1, 50), _make_request(2, 50)]
    client = _FakeClient(
        Work(state=State.GO, requests=requests),
        Work(state=State.GO, aborts=[2]),
        Work(state=State.BOUNDARY),
    )
    engine = _FakeEngine()
    executor = _make_executor(client, engine)
    executor.step()
    assert [[sample.request_id for sample in report] for report in client.reports] == [[], [0], []]
    assert client.reports[1][0].tokens == (5, 5)
    assert client.reports[1][0].versions == (6, 6)
    assert list(engine.running) == [1]
    (message,) = executor.get_output("metrics/generator")
    assert isinstance(message, MetricValues)
    metrics = message.to_dict()
    assert metrics["step"] == 7.0
    assert metrics["generator/unfinished"] == 1.0
    assert metrics["perf/weight_sync_bytes"] == 100.0


def test_before_a_checkpoint_it_shows_what_it_has_begun_and_keeps_it() -> None:
    client = _FakeClient(
        Work(state=State.GO, requests=[_make_request(4, 50)]),
        Work(state=State.HAND_OVER),
        Work(state=State.BOUNDARY),
    )
    engine = _FakeEngine()
    _make_executor(client, engine).step()
    (partial,) = client.reports[2]
    assert (partial.request_id, partial.finished) == (4, False)
    assert len(partial.tokens) == engine.running[4][1] > 0


def test_orders_that_break_off_a_hand_over_are_refused() -> None:
    client = _FakeClient(Work(state=State.HAND_OVER), Work(state=State.GO))
    with pytest.raises(ChannelError, match="after handing over the orders say GO"):
        _make_executor(client, _FakeEngine()).step()


def test_reports_are_rare_until_the_trainer_stands_at_the_boundary() -> None:
    arrived: list[bool] = []
    pace = Pace(lambda: bool(arrived))
    assert pace.is_due(10.0)
    pace.reported(10.0, 10.002)  # a fiftieth of the time
    assert not pace.is_due(10.1)
    assert pace.is_due(10.103)
    pace.reported(11.0, 13.0)  # however long one took
    assert not pace.is_due(13.19)
    assert pace.is_due(13.21)
    pace.reported(13.3, 13.4)
    arrived.append(True)
    assert pace.is_due(13.45)  # at once
    pace.reported(13.45, 13.452)  # then a twentieth, since the tick may go on
    assert not pace.is_due(13.48)
    assert pace.is_due(13.493)
