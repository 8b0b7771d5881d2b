"""metrics.jsonl and its readers, TensorBoard events, the summary."""

import json
import math
import subprocess
import sys

import pytest

from megarl.config import ObserveConfig
from megarl.errors import ConfigError, DataError
from megarl.observe.metrics import (
    MetricsLog,
    MetricsTail,
    build_summary,
    read_metrics,
    series,
    write_summary,
)


def _make_log(folder, **observe) -> MetricsLog:
    return MetricsLog(folder, ObserveConfig(**observe), "test")


def test_each_step_is_one_json_line_readable_before_the_log_closes(tmp_path):
    log = _make_log(tmp_path)
    log.write(1, {"rollout/reward": 0.5, "actor/loss": math.nan})
    log.write(2, {"rollout/reward": 0.75, "actor/loss": -math.inf})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 1, "rollout/reward": 0.5, "actor/loss": None},
        {"step": 2, "rollout/reward": 0.75, "actor/loss": None},
    ]
    log.close()


def test_every_line_says_how_often_the_job_was_started_again(tmp_path):
    for restarts in (0, 2):
        log = MetricsLog(tmp_path, ObserveConfig(), "test", restarts)
        log.write(restarts + 1, {"x": 1.0})
        log.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["perf/restarts"]) for row in rows] == [(1, 0), (3, 2)]


def test_a_resumed_run_has_each_step_once(tmp_path):
    log = _make_log(tmp_path)
    for step in (1, 2, 3, 4):
        log.write(step, {"x": step})
    log.close()
    log = _make_log(tmp_path)
    log.truncate(2)
    for step in (3, 4, 5):
        log.write(step, {"x": 10 * step})
    log.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["x"]) for row in rows] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_torn_by_a_crash_is_dropped_when_the_log_opens_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1.0}\n{"step": 2, "x"')
    assert [row["step"] for row in read_metrics(path)] == [1]
    log = _make_log(tmp_path)
    log.write(2, {"x": 2.0})
    log.close()
    assert read_metrics(path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}]


@pytest.mark.parametrize("line", ['{"step": 2,', "[2]", '{"x": 1}', '{"step": "two"}'])
def test_a_malformed_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2: "):
        read_metrics(path)


def test_reading_metrics_that_are_not_there_is_an_error(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_tail_gives_each_complete_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.poll() == []
    with path.open("a") as file:
        file.write('{"step": 1}\n{"st')
        file.flush()
        assert tail.poll() == [{"step": 1}]
        assert tail.poll() == []
        file.write('ep": 2}\n')
        file.flush()
    assert tail.poll() == [{"step": 2}]
    assert tail.poll() == []


def test_a_tail_starts_again_when_the_log_was_truncated(tmp_path):
    log = _make_log(tmp_path)
    for step in (1, 2, 3):
        log.write(step, {})
    tail = MetricsTail(log.path)
    assert [row["step"] for row in tail.poll()] == [1, 2, 3]
    log.truncate(1)
    for step in (2, 3, 4):  # longer than before: its size alone would not tell
        log.write(step, {"again": 1.0})
    log.close()
    assert [row["step"] for row in tail.poll()] == [1, 2, 3, 4]
    assert tail.poll() == []


def test_series_skip_steps_without_a_finite_value():
    rows = [{"step": 1, "x": 1.0}, {"step": 2}, {"step": 3, "x": None}, {"step": 4, "x": math.nan}]
    assert series([*rows, {"step": 5, "x": 0.0}], "x") == ([1, 5], [1.0, 0.0])


def test_tensorboard_events_read_back_and_a_resume_hides_the_old_ones(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = _make_log(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        log.write(step, {"rollout/reward": step / 4})
    log.close()
    log = _make_log(tmp_path, tensorboard=True)
    log.truncate(1)
    for step in (2, 3):
        log.write(step, {"rollout/reward": float(step)})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("rollout/reward")
    assert [(event.step, event.value) for event in events] == [(1, 0.25), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize(
    ("module", "observe", "command"),
    [
        ("wandb", {"wandb_project": "p"}, r"pip install 'megarl\[track\]'"),
        ("torch.utils.tensorboard.writer", {"tensorboard": True}, "pip install tensorboard"),
    ],
)
def test_a_missing_package_that_is_asked_for_says_how_to_install_it(
    tmp_path, monkeypatch, module, observe, command
):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=command):
        _make_log(tmp_path, **observe)


def test_observing_imports_neither_torch_nor_the_optional_packages():
    modules = ["logs", "trace", "metrics", "terminal", "plots"]
    lines = [f"import megarl.observe.{module}" for module in modules]
    lines.append("import sys; print({'torch', 'wandb', 'tensorboard'} & set(sys.modules))")
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "set()", result.stderr


def test_a_summary_of_a_hand_made_run(tmp_path):
    rows = [
        {
            "step": step,
            "rollout/reward": step / 10,
            "rollout/response_length_mean": 20 - step,
            "timing_s/update_weights": 9.0 if step == 1 else 0.25,
            "trainer/idle_ratio": 0.9 if step == 1 else 0.1,
            "generator/idle_ratio": 0.0 if step == 1 else 0.2,
            "staleness/mean": 0.0 if step == 1 else 1.0,
        }
        for step in range(1, 9)
    ]
    rows[0]["val/accuracy"], rows[3]["val/accuracy"], rows[7]["val/accuracy"] = 0.1, 0.3, 0.7
    rows[4]["rollout/reward"] = None
    summary = build_summary(rows)
    assert summary == pytest.approx(
        {
            "steps": 8,
            "rollout_reward_first": 0.1,
            "rollout_reward_last": (0.3 + 0.4 + 0.6 + 0.7 + 0.8) / 5,
            "response_length_first": 19,
            "response_length_last": 14,
            "accuracy_before": 0.1,
            "accuracy_after": 0.7,
            "weight_sync_seconds_mean": 0.25,
            "trainer_idle_ratio": 0.1,
            "generator_idle_ratio": 0.2,
            "staleness_mean": 7 / 8,
        }
    )
    path = tmp_path / "summary.json"
    write_summary(path, {"steps": 0})
    write_summary(path, summary)
    assert json.loads(path.read_text()) == summary
    assert list(tmp_path.iterdir()) == [path]


def test_a_summary_says_none_where_the_run_has_no_such_metric():
    summary = build_summary([{"step": 1, "sft/loss": 3.0}, {"step": 2, "sft/loss": 1.0}])
    assert (summary["steps"], summary["sft_loss_first"], summary["sft_loss_last"]) == (2, 3.0, 2.0)
    assert summary["accuracy_before"] is None
    assert summary["trainer_idle_ratio"] is None
    assert build_summary([])["steps"] == 0
