"""Spans and idle arithmetic on a clock moved by hand; the merged timeline."""

import json
import logging
from pathlib import Path

import pytest

from megarl.errors import DataError
from megarl.observe.trace import SpanKind, Tracer, merge_traces


class _FakeClock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _make_tracer(executor: str = "trainer", rank: int = 0, start: float = 50.0, wall: float = 1e9):
    clock = _FakeClock(start)
    return Tracer(executor, rank, clock=clock, wall_clock=lambda: wall), clock


def test_a_drain_reports_seconds_by_name_and_kind_and_the_waiting_share():
    tracer, clock = _make_tracer()
    with tracer.span("train"):
        clock.sleep(3)
    with tracer.span("wait_batch", SpanKind.WAIT):
        clock.sleep(4)
    with tracer.span("wait_batch", SpanKind.WAIT):
        clock.sleep(1)
    with tracer.span("update_weights", SpanKind.SYNC):
        clock.sleep(0.5)
    clock.sleep(1.5)  # in no span
    assert tracer.drain() == {
        "timing_s/train": 3,
        "timing_s/wait_batch": 5,
        "timing_s/update_weights": 0.5,
        "timing_s/wait": 5,
        "timing_s/sync": 0.5,
        "idle_ratio": 0.5,
    }


def test_nested_waits_count_once_and_work_inside_a_wait_is_not_idle():
    tracer, clock = _make_tracer()
    with tracer.span("update_weights", SpanKind.SYNC):
        clock.sleep(1)
        with tracer.span("wait_fence", SpanKind.WAIT):
            clock.sleep(2)
            with tracer.span("wait_peer", SpanKind.WAIT):
                clock.sleep(3)
            with tracer.span("unpack"):
                clock.sleep(4)
    metrics = tracer.drain()
    assert metrics["timing_s/update_weights"] == 10
    assert metrics["timing_s/wait_fence"] == 9
    assert metrics["timing_s/wait_peer"] == 3
    assert (metrics["timing_s/sync"], metrics["timing_s/wait"]) == (1, 5)
    assert metrics["idle_ratio"] == 0.5


def test_a_name_nested_in_itself_counts_once():
    tracer, clock = _make_tracer()
    with tracer.span("forward"), tracer.span("forward"):
        clock.sleep(2)
    assert tracer.drain()["timing_s/forward"] == 2


def test_a_span_open_at_a_drain_is_split_between_the_two_periods():
    tracer, clock = _make_tracer()
    with tracer.span("wait_batch", SpanKind.WAIT):
        clock.sleep(2)
        first = tracer.drain()
        clock.sleep(1)
    clock.sleep(3)
    second = tracer.drain()
    assert (first["timing_s/wait_batch"], first["idle_ratio"]) == (2, 1.0)
    assert (second["timing_s/wait_batch"], second["idle_ratio"]) == (1, 0.25)


def test_a_drain_without_time_or_spans_is_not_idle():
    tracer, _ = _make_tracer()
    assert tracer.drain() == {"timing_s/wait": 0, "timing_s/sync": 0, "idle_ratio": 0}


def test_on_enter_hears_the_innermost_open_span():
    heard: list[str] = []
    tracer = Tracer("trainer", 0, heard.append)
    with tracer.span("step"), tracer.span("forward"):
        pass
    assert heard == ["step", "forward", "step", ""]


def test_an_exception_closes_its_spans():
    tracer, clock = _make_tracer()

    def fail() -> None:
        clock.sleep(1)
        raise KeyError

    with pytest.raises(KeyError), tracer.span("step"), tracer.span("forward"):
        fail()
    clock.sleep(1)
    metrics = tracer.drain()
    assert (metrics["timing_s/step"], metrics["timing_s/forward"]) == (1, 1)


@pytest.mark.parametrize("name", ["wait", "sync"])
def test_the_names_of_the_sums_are_refused(name: str):
    tracer, _ = _make_tracer()
    with pytest.raises(ValueError, match=f"timing_s/{name}"), tracer.span(name):
        pass


def test_the_oldest_spans_are_dropped_at_the_cap_and_this_is_logged_once(tmp_path, caplog):
    clock = _FakeClock()
    tracer = Tracer("trainer", 0, clock=clock, wall_clock=lambda: 0.0, max_events=3)
    with caplog.at_level(logging.WARNING):
        for number in range(6):
            with tracer.span(f"span_{number}"):
                clock.sleep(1)
    assert len(caplog.records) == 1
    assert [event["name"] for event in _spans(_write(tracer, tmp_path))] == [
        "span_3",
        "span_4",
        "span_5",
    ]


def _write(tracer: Tracer, folder: Path) -> Path:
    path = folder / f"trace.{tracer.executor}.{tracer.rank}.json"
    tracer.write(path)
    return path


def _events(path: Path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


def _spans(path: Path) -> list[dict]:
    return [event for event in _events(path) if event["ph"] == "X"]


def test_a_fragment_is_a_chrome_trace_with_open_spans_up_to_now(tmp_path):
    tracer, clock = _make_tracer(start=50.0, wall=1000.0)
    clock.sleep(1)
    with tracer.span("step"):
        clock.sleep(0.25)
        with tracer.span("wait_batch", SpanKind.WAIT):
            clock.sleep(0.5)
        spans = {event["name"]: event for event in _spans(_write(tracer, tmp_path))}
    assert (spans["step"]["ts"], spans["step"]["dur"]) == (1_001_000_000, 750_000)
    assert (spans["wait_batch"]["ts"], spans["wait_batch"]["dur"]) == (1_001_250_000, 500_000)
    assert (spans["step"]["cat"], spans["wait_batch"]["cat"]) == ("compute", "wait")
    assert spans["step"]["cname"] != spans["wait_batch"]["cname"]


def test_ranks_whose_monotonic_clocks_differ_meet_on_the_wall_clock(tmp_path):
    # The trainer trains at wall 1010..1014, the generator samples at 1012..1015.
    trainer, trainer_clock = _make_tracer("trainer", 0, start=5.0, wall=1000.0)
    generator, generator_clock = _make_tracer("generator", 10, start=99_000.0, wall=1002.0)
    for tracer, clock, name, seconds in (
        (trainer, trainer_clock, "train", 4),
        (generator, generator_clock, "generate", 3),
    ):
        clock.sleep(10)
        with tracer.span(name):
            clock.sleep(seconds)
        _write(tracer, tmp_path)
    merge_traces(tmp_path, tmp_path / "trace.json")

    spans = {event["name"]: event for event in _spans(tmp_path / "trace.json")}
    train, generate = spans["train"], spans["generate"]
    assert (train["ts"], train["dur"]) == (1_010_000_000, 4_000_000)
    assert generate["ts"] - train["ts"] == 2_000_000  # they overlap for 2 s
    assert generate["dur"] == 3_000_000
    assert train["pid"] != generate["pid"]


def test_a_merged_trace_names_and_orders_a_process_per_rank(tmp_path):
    for executor, rank in (("generator", 10), ("trainer", 2), ("reward", 11), ("reference", 2)):
        tracer, _ = _make_tracer(executor, rank)
        with tracer.span("step"):
            pass
        _write(tracer, tmp_path)
    target = tmp_path / "trace.json"
    merge_traces(tmp_path, target)
    merge_traces(tmp_path, target)  # an older trace.json is no fragment
    labels = [event for event in _events(target) if event["ph"] == "M"]
    names = {e["pid"]: e["args"]["name"] for e in labels if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in labels if e["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(order, key=lambda pid: order[pid])] == [
        "reference 2",
        "trainer 2",
        "generator 10",
        "reward 11",
    ]
    assert {span["pid"] for span in _spans(target)} == set(names)
    for span in _spans(target):
        assert isinstance(span["ts"], int)
        assert span["dur"] >= 0
        assert {"name", "cat", "tid"} <= span.keys()


def test_rounding_to_microseconds_keeps_spans_nested(tmp_path):
    tracer, clock = _make_tracer(start=0.1, wall=1.7e9)
    for _ in range(50):
        with tracer.span("outer"):
            clock.sleep(0.31e-6)
            with tracer.span("inner"):
                clock.sleep(0.77e-6)
            clock.sleep(0.13e-6)
    spans = _spans(_write(tracer, tmp_path))
    inner = [span for span in spans if span["name"] == "inner"]
    outer = [span for span in spans if span["name"] == "outer"]
    for child, parent in zip(inner, outer, strict=True):
        assert parent["ts"] <= child["ts"]
        assert child["ts"] + child["dur"] <= parent["ts"] + parent["dur"]


def test_nothing_to_merge_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nothing to merge"):
        merge_traces(tmp_path, tmp_path / "trace.json")


def test_a_fragment_that_is_no_trace_is_named_and_leaves_the_old_target(tmp_path):
    target = tmp_path / "trace.json"
    target.write_text("old")
    (tmp_path / "trace.trainer.0.json").write_text('{"traceEv')
    with pytest.raises(DataError, match=r"trace\.trainer\.0\.json"):
        merge_traces(tmp_path, target)
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trace.json",
        "trace.trainer.0.json",
    ]
