"""Jobs whose ranks are killed at any moment: no prompt is lost or trained twice, no loss changes.

``make chaos`` kills thirty times at random moments; without it, four times at the worst ones.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos import Kill, consumed_prompts, run_with_kills
from tests.e2e.conftest import Task
from tests.jobs import ROOT, read_rows

pytestmark = pytest.mark.e2e

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
TRAINER, GENERATOR, REWARD = 0, 2, 3
WORST = [
    Kill(rank=GENERATOR, tick=1, span="update_weights", delay_seconds=0.002),
    Kill(rank=TRAINER, tick=2, span="save_checkpoint", delay_seconds=0.02),
    Kill(rank=REWARD, tick=2, span="save_checkpoint"),
    Kill(rank=GENERATOR, tick=3, span="gen", delay_seconds=0.1),
]
SPANS = {
    TRAINER: ("update_actor", "save_checkpoint", "wait/batch"),
    GENERATOR: ("update_weights", "gen"),
    REWARD: ("collect", "reward", "serve", "save_checkpoint"),
}


def _random_kills(count: int, seed: int, last_tick: int) -> list[Kill]:
    generator = random.Random(seed)
    kills = []
    for index in range(count):
        rank = generator.choice(list(SPANS))
        kill = Kill(
            rank=rank,
            tick=1 + index * (last_tick - 1) // count,
            span=generator.choice(SPANS[rank]),
            delay_seconds=generator.choice((0.0, 0.002, 0.02, 0.1)),
        )
        kills.append(kill)
    return kills


def _overrides(task: Task, folder: Path, name: str, mode: str, steps: int) -> tuple[str, ...]:
    return task.overrides(
        folder,
        f"name={name}",
        f"mode={mode}",
        "max_staleness=2",
        f"max_steps={steps}",
        "trainer.lr=1e-3",
        "trainer.lr_warmup_steps=2",
        "checkpoint.save_freq=1",
        "checkpoint.export_hf=false",
        f"reward.path={Path(__file__).with_name('odd_length.py')}:score",
        f"data.eval_path={'' if mode == 'async' else task.folder / 'eval.jsonl'}",
    )


def _check(task: Task, folder: Path, mode: str, kills: list[Kill], steps: int) -> None:
    run_with_kills(QUICKSTART, _overrides(task, folder, "whole", mode, steps), [])
    happened = run_with_kills(QUICKSTART, _overrides(task, folder, "broken", mode, steps), kills)
    assert len(happened) == len(kills)
    whole, broken = consumed_prompts(folder / "whole"), consumed_prompts(folder / "broken")
    assert sorted(whole) == sorted(broken) == list(range(8 * steps))
    expected, got = read_rows(folder / "whole"), read_rows(folder / "broken")
    assert sorted(expected) == sorted(got) == list(range(1, steps + 1))
    assert all(row["staleness/max"] <= (0 if mode == "sync" else 2) for row in got.values())
    if mode == "sync":
        assert whole == broken
        for step, row in expected.items():
            for key in ("rollout/reward", "rollout/response_length_mean", "perf/total_tokens"):
                assert got[step][key] == row[key], (step, key)
            for key in ("actor/loss", "actor/grad_norm", "actor/lr"):
                assert got[step][key] == pytest.approx(row[key], rel=1e-6, abs=1e-9), (step, key)


def test_four_kills_at_the_worst_moments_lose_nothing_and_change_no_loss(
    task: Task, tmp_path: Path
) -> None:
    _check(task, tmp_path, "sync", WORST, steps=4)


@pytest.mark.skipif("MEGARL_KILLS" not in os.environ, reason="takes some six minutes: make chaos")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_many_kills_at_random_moments_lose_nothing(mode: str, task: Task, tmp_path: Path) -> None:
    count = int(os.environ["MEGARL_KILLS"]) // 2
    steps = count + 2
    _check(task, tmp_path, mode, _random_kills(count, seed=0, last_tick=steps), steps)
