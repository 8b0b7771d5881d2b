"""Learning-rate schedules and the settings that cannot be honoured."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megatron_bridge.runtime.train import OptimizerSettings, _make_scheduler


def _rates(steps: int, **settings: object) -> list[float]:
    optimizer = SimpleNamespace(param_groups=[{"max_lr": 2.0, "params": []}])
    scheduler = _make_scheduler(optimizer, OptimizerSettings(lr=2.0, **settings))  # pyright: ignore
    found = []
    for _ in range(steps):
        scheduler.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_constant_stays_at_the_peak_after_its_warm_up() -> None:
    assert _rates(5, lr_warmup_steps=2, min_lr_ratio=0.1) == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_linear_ends_at_the_least_rate_in_its_last_step() -> None:
    found = _rates(6, lr_decay_style="linear", lr_decay_steps=4, min_lr_ratio=0.1)
    assert found == pytest.approx([2 - 0.45, 2 - 0.9, 2 - 1.35, 0.2, 0.2, 0.2])


def test_cosine_is_halfway_down_in_the_middle() -> None:
    found = _rates(4, lr_decay_style="cosine", lr_decay_steps=4, min_lr_ratio=0.5)
    wanted = [1 + 0.5 * (1 + math.cos(math.pi * step / 4)) for step in (1, 2, 3, 4)]
    assert found == pytest.approx(wanted)


def test_a_decay_must_outlast_its_warm_up() -> None:
    with pytest.raises(ValueError, match="lr_decay_steps 3 must be above lr_warmup_steps 3"):
        OptimizerSettings(lr=1.0, lr_decay_style="linear", lr_warmup_steps=3, lr_decay_steps=3)


def test_an_unknown_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="'wsd': constant, linear or cosine"):
        OptimizerSettings(lr=1.0, lr_decay_style="wsd")
