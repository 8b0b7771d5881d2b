"""Several updates of a batch are steps taken one after the other on its shares.

The oracle is the trainer without the setting, on one rank: it is given each share as a batch of its
own, with advantages computed here. The trainer under test has two data-parallel ranks, and its second
batch comes after a checkpoint.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import AdvantageEstimator, RunConfig
from megarl.config_file import load_config
from megarl.data.prompts import Prompt
from megarl.data.starting_model import write_starting_model
from megarl.rollout.batch import Scored, split_batch, to_rollouts
from megarl.rollout.engine import Sample
from megarl.types import TrainBatch
from tests.jobs import ROOT
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

PROMPTS, SAMPLES, UPDATES, BATCHES = 3, 4, 2, 2
Row = tuple[Prompt, int, Sample]


def _config(folder: str, *more: str) -> RunConfig:
    overrides = (
        f"run_dir={folder}",
        f"model.path={folder}/model",
        f"data.train_batch_size={PROMPTS}",
        f"rollout.n={SAMPLES}",
        "rollout.max_response_length=20",
        "trainer.layout.tp=1",
        "trainer.lr=1e-3",
        "trainer.lr_decay_style=cosine",
        "trainer.min_lr_ratio=0.1",
        "trainer.lr_warmup_steps=3",
        "trainer.max_tokens_per_micro_batch=36",  # several micro-batches a share
        "max_staleness=9",
        "fault.max_logprob_error=1e9",  # mu is made up
        "fault.mean_logprob_error=1e9",
        "resume=auto",
        *more,
    )
    return load_config(ROOT / "configs" / "quickstart.yaml", overrides)


def _rows(number: int) -> list[Row]:
    """Return samples that no engine made, of very different lengths."""
    dice = random.Random(number)
    rows: list[Row] = []
    for index in range(PROMPTS * SAMPLES):
        tokens = tuple(dice.randint(3, 18) for _ in range(dice.choice([1, 3, 7, 20])))
        sample = Sample(
            request_id=0,
            tokens=tokens,
            logprobs=tuple(-dice.uniform(2.0, 3.5) for _ in tokens),
            versions=(0,) * len(tokens),
            finished=True,
        )
        prompt_id = number * PROMPTS + index // SAMPLES
        prompt = (1, 3 + prompt_id, 13, 4)
        rows.append(
            (
                Prompt(prompt_id=prompt_id, tokens=prompt, text="", answer="", extra=""),
                index % SAMPLES,
                sample,
            )
        )
    return rows


def _reward(row: Row) -> float:
    return (7 * row[0].prompt_id + 3 * row[1]) % 5 / 4


def _advantage(row: Row) -> float:
    group = [_reward((row[0], sample, row[2])) for sample in range(SAMPLES)]
    return _reward(row) - sum(group) / SAMPLES


def _scored(rows: list[Row], rewards: list[float]) -> Scored:
    rewards_B = torch.tensor(rewards, dtype=torch.float64)
    return Scored(rollouts=to_rollouts(rows), rewards=rewards_B)


def _parts(config: RunConfig, number: int) -> list[TrainBatch]:
    rows = _rows(number)
    return split_batch(_scored(rows, [_reward(row) for row in rows]), config)


def _shares(config: RunConfig, number: int) -> list[list[Row]]:
    """Return the rows of each update, of all data-parallel ranks together."""
    rows = {(row[0].prompt_id, row[1]): row for row in _rows(number)}
    shares: list[list[Row]] = [[] for _ in range(UPDATES)]
    for part in _parts(config, number):
        first = int(part.num_micro_batches[0])
        keys = zip(part.prompt_ids.tolist(), part.sample_ids.tolist(), strict=True)
        for key, member in zip(keys, part.micro_batches.tolist(), strict=True):
            shares[int(member >= first)].append(rows.pop(key))
    assert not rows
    return shares


def _make_trainer(config: RunConfig, rank: int) -> Any:
    from megarl import checkpoint
    from megarl.executors.policy import ExportLink
    from megarl.executors.trainer import Surroundings, TrainerExecutor
    from megarl.observe.trace import Tracer
    from megarl.world import timed_wait

    link = ExportLink(group=None, wait=timed_wait(60.0))
    around = Surroundings(link=link, arrive=lambda tick: None, commits=True)
    start = checkpoint.find_start(config)
    trainer = TrainerExecutor(config, start, rank, around, Tracer("trainer", rank))
    trainer.init()
    return trainer


def _train(trainer: Any, batch: TrainBatch) -> dict[str, float]:
    trainer.set_step(trainer.version)
    trainer.put_input("batch", [batch])
    trainer.step()
    (metrics,) = trainer.get_output("metrics/trainer")
    return metrics.to_dict()


def _weights(trainer: Any) -> dict[str, np.ndarray]:
    """Return a copy; tensors would share memory with a process that ends."""
    return {name: tensor.detach().numpy().copy() for name, tensor in trainer.get_model().items()}


def _updates(rank: int, size: int, folder: str) -> tuple[list[dict[str, float]], dict]:
    """Train both batches on data-parallel ranks, the second one in a resumed run."""
    from megatron_bridge.runtime import setup

    config = _config(
        folder,
        "name=updates",
        f"trainer.layout.dp={size}",
        f"trainer.updates_per_batch={UPDATES}",
        f"max_steps={BATCHES + 1}",
        "checkpoint.save_freq=1",
    )
    found: list[dict[str, float]] = []
    for number in range(BATCHES):
        trainer = _make_trainer(config, rank)
        assert trainer.version == number
        found.append(_train(trainer, _parts(config, number)[rank]))
        assert trainer.version == number + 1  # batches, not updates
        weights = _weights(trainer)
        setup.barrier()  # the checkpoint is there for all
        trainer.close()
    return found, weights


def _by_hand(rank: int, size: int, folder: str) -> tuple[list[dict[str, float]], dict]:
    """Train each share as a batch of its own."""
    cut = _config(folder, f"trainer.updates_per_batch={UPDATES}")
    config = _config(
        folder, "name=hand", f"max_steps={(BATCHES + 1) * UPDATES}", "checkpoint.save_freq=0"
    )
    given = replace(config.algorithm, adv_estimator=AdvantageEstimator.NONE)
    config = replace(config, algorithm=given)
    trainer = _make_trainer(config, rank)
    found: list[dict[str, float]] = []
    for number in range(BATCHES):
        for rows in _shares(cut, number):
            (batch,) = split_batch(_scored(rows, [_advantage(row) for row in rows]), config)
            metrics = _train(trainer, batch)
            found.append(metrics | {"tokens": float(sum(len(row[2].tokens) for row in rows))})
    weights = _weights(trainer)
    trainer.close()
    return found, weights


def test_two_updates_of_a_batch_are_two_steps_on_its_halves(tmp_path: Path) -> None:
    write_starting_model(tmp_path / "model", 0)
    ((steps, expected),) = run_ranks(_by_hand, 1, str(tmp_path), timeout=120)
    ranks = run_ranks(_updates, 2, str(tmp_path), timeout=180)
    for found, weights in ranks:
        for number, metrics in enumerate(found):
            halves = steps[number * UPDATES : (number + 1) * UPDATES]
            num_tokens = sum(half["tokens"] for half in halves)
            assert min(half["tokens"] for half in halves) > 0.4 * num_tokens
            for name in ("actor/loss", "actor/entropy", "rollout_corr/importance_ratio_mean"):
                mean = sum(half[name] * half["tokens"] for half in halves) / num_tokens
                assert metrics[name] == pytest.approx(mean, rel=1e-6, abs=1e-6), name
            for name in ("actor/grad_norm", "rollout_corr/importance_ratio_max"):
                largest = max(half[name] for half in halves)
                assert metrics[name] == pytest.approx(largest, rel=1e-5), name
            assert metrics["actor/lr"] == pytest.approx(halves[-1]["actor/lr"], rel=1e-9)
            assert abs(halves[0]["actor/loss"]) > 1e-3
        assert weights.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(weights[name], values, rtol=0, atol=2e-5, err_msg=name)
    assert len({step["actor/lr"] for step in steps}) == UPDATES * BATCHES  # the schedule moves
