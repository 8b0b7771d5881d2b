"""The learning curve is a picture with something on it."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from megarl.errors import DataError
from megarl.observe.plots import plot_learning_curve


def _make_metrics(folder: Path, rows: list[dict]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _pixels_of(picture: Path, colour: str) -> int:
    """How many pixels have exactly this #rrggbb colour."""
    wanted = tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    return int((pixels == wanted).all(axis=-1).sum())


def _rl_row(step: int) -> dict:
    return {
        "step": step,
        "rollout/reward": 1 - 1 / step,
        "rollout/response_length_mean": 30.0,
        "trainer/idle_ratio": 0.1,
        "generator/idle_ratio": 0.2,
        "staleness/mean": 1.0,
    }


@pytest.mark.parametrize("num_steps", [1, 2, 7, 400])
def test_every_series_of_a_run_is_drawn(tmp_path, num_steps):
    rows = [_rl_row(step) for step in range(1, num_steps + 1)]
    rows[-1]["val/accuracy"] = 0.5
    target = tmp_path / "learning_curve.png"
    plot_learning_curve(_make_metrics(tmp_path, rows), target)
    height, width = imread(target).shape[:2]
    assert width > 1000
    assert height > 800
    for colour in ("#2f6fb7", "#e07b39", "#3a9d6e", "#7d5ba6"):
        assert _pixels_of(target, colour) > 20, colour


def test_panels_without_a_metric_are_left_out(tmp_path):
    rows = [{"step": 1, "rollout/reward": 0.5}, {"step": 2, "rollout/reward": None}]
    target = tmp_path / "learning_curve.png"
    plot_learning_curve(_make_metrics(tmp_path, rows), target)
    assert imread(target).shape[1] < 1000
    assert _pixels_of(target, "#2f6fb7") > 20
    assert _pixels_of(target, "#3a9d6e") == 0


def test_supervised_training_draws_its_loss(tmp_path):
    rows = [
        {"step": step, "sft/loss": 3 / step, "perf/tokens_per_second": 9e3} for step in range(1, 9)
    ]
    target = tmp_path / "learning_curve.png"
    plot_learning_curve(_make_metrics(tmp_path, rows), target)
    assert _pixels_of(target, "#2f6fb7") > 200
    assert _pixels_of(target, "#3a9d6e") > 200


def test_a_log_without_any_of_the_metrics_is_an_error(tmp_path):
    with pytest.raises(DataError, match="none of the metrics"):
        plot_learning_curve(_make_metrics(tmp_path, [{"step": 1, "x": 1.0}]), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
