"""From rollouts of several replicas to balanced parts of a batch, against plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from megarl.config import RunConfig, TrainerConfig
from megarl.executors.reward import RewardExecutor, Scored, merge, rollout_metrics, split_batch
from megarl.observe.trace import Tracer
from megarl.rewards.pool import RewardResult
from megarl.types import MetricValues, Rollouts, TrainBatch
from megatron_bridge.parallel import TrainerLayout

PROMPT = 3  # tokens of every prompt


def _make_rollouts(rows: list[tuple[int, int, int]], version: int = 4) -> Rollouts:
    """Build rollouts of (prompt id, sample id, response length); tokens name their sequence."""
    tokens, versions, logprobs = [], [], []
    for prompt, sample, length in rows:
        tokens += [1000 * prompt + 100 * sample + position for position in range(PROMPT + length)]
        versions += [-1] * PROMPT + [version] * length
        logprobs += [0.0] * PROMPT + [-0.25 * (position + 1) for position in range(length)]
    return Rollouts(
        prompt_ids=torch.tensor([row[0] for row in rows], dtype=torch.int64),
        sample_ids=torch.tensor([row[1] for row in rows], dtype=torch.int64),
        prompt_lengths=torch.full((len(rows),), PROMPT),
        lengths=torch.tensor([PROMPT + row[2] for row in rows], dtype=torch.int64),
        finished=torch.tensor([row[2] % 2 for row in rows], dtype=torch.int64),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        versions=torch.tensor(versions, dtype=torch.int64),
    )


def _make_scored(rollouts: Rollouts, rewards: list[float]) -> Scored:
    result = RewardResult(scores=rewards, metrics={}, timeouts=1, errors=2, crashes=0)
    values = torch.tensor(rewards, dtype=torch.float64)
    return Scored(rollouts=rollouts, responses=[], rewards=values, result=result)


def _sequences(batch: TrainBatch) -> dict[int, dict[str, list[float]]]:
    """Return each sequence's columns by its first token, which names it."""
    lengths = batch.lengths.tolist()
    columns = {
        name: getattr(batch, name).split(lengths)
        for name in ("tokens", "loss_mask", "logprobs", "advantages", "versions")
    }
    return {
        int(columns["tokens"][row][0]): {k: v[row].tolist() for k, v in columns.items()}
        for row in range(len(lengths))
    }


def test_the_order_of_a_batch_does_not_depend_on_who_sampled_what() -> None:
    rows = [
        (prompt, sample, 1 + (prompt * sample) % 4) for prompt in range(5) for sample in range(3)
    ]
    shuffled = random.Random(0).sample(rows, len(rows))
    whole = merge([_make_rollouts(rows)])
    parts = merge([_make_rollouts(shuffled[:4]), _make_rollouts([]), _make_rollouts(shuffled[4:])])
    for name in Rollouts.__slots__:
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name


def test_nothing_merged_is_nothing() -> None:
    assert len(merge([_make_rollouts([]), _make_rollouts([])]).lengths) == 0


@pytest.mark.parametrize(
    "layout", [TrainerLayout(), TrainerLayout(dp=3), TrainerLayout(dp=2, pp=2, vpp=2)]
)
def test_every_sequence_reaches_one_rank_whole_with_its_advantage(layout: TrainerLayout) -> None:
    generator = random.Random(1)
    rows = [
        (prompt, sample, generator.randint(1, 40)) for prompt in range(7) for sample in range(4)
    ]
    rewards = [float(generator.randint(0, 1)) for _ in rows]
    config = RunConfig(trainer=TrainerConfig(layout=layout, max_tokens_per_micro_batch=64))
    parts = split_batch(_make_scored(_make_rollouts(rows), rewards), config)
    assert len(parts) == layout.dp
    seen: dict[int, dict[str, list[float]]] = {}
    for part in parts:
        found = _sequences(part)
        assert not seen.keys() & found.keys()
        seen |= found
        sizes = [0] * int(part.num_micro_batches)
        for length, member in zip(part.lengths.tolist(), part.micro_batches.tolist(), strict=True):
            sizes[member] += length
        assert max(sizes) <= 64
    assert len({int(part.num_micro_batches) for part in parts}) == 1
    assert int(parts[0].num_micro_batches) % (layout.pp if layout.vpp > 1 else 1) == 0
    for (prompt, sample, length), reward in zip(rows, rewards, strict=True):
        columns = seen[1000 * prompt + 100 * sample]
        group = [r for (p, _, _), r in zip(rows, rewards, strict=True) if p == prompt]
        advantage = reward - sum(group) / len(group)
        assert columns["advantages"] == pytest.approx([advantage] * (PROMPT + length))
        assert columns["loss_mask"] == [0.0] * PROMPT + [1.0] * length
        assert columns["logprobs"][PROMPT:] == [-0.25 * (i + 1) for i in range(length)]
    # Balanced by tokens: no rank has more than the mean and the longest sequence.
    loads = [int(part.lengths.sum()) for part in parts]
    assert max(loads) <= sum(loads) / len(loads) + max(PROMPT + row[2] for row in rows)


def test_metrics_of_a_batch_are_those_of_plain_arithmetic() -> None:
    rows = [(0, 0, 2), (0, 1, 4), (1, 0, 3), (1, 1, 3)]
    scored = _make_scored(_make_rollouts(rows, version=4), [1.0, 1.0, 0.0, 1.0])
    metrics = rollout_metrics(scored, version=5)
    assert metrics["rollout/reward"] == 0.75
    assert metrics["rollout/reward_std"] == pytest.approx((3 / 16) ** 0.5)
    assert metrics["rollout/response_length_mean"] == 3.0
    assert metrics["rollout/response_length_max"] == 4.0
    assert metrics["rollout/response_length_clip_ratio"] == 0.5  # even lengths were cut
    assert metrics["rollout/zero_advantage_groups"] == 0.5
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 1.0)
    assert (metrics["reward/timeouts"], metrics["reward/errors"]) == (1.0, 2.0)


def test_batches_are_cut_in_a_deterministic_way() -> None:
    rows = [(prompt, sample, 5 + sample) for prompt in range(4) for sample in range(4)]
    scored = _make_scored(_make_rollouts(rows), [float(i % 2) for i in range(16)])
    config = RunConfig(trainer=TrainerConfig(layout=TrainerLayout(dp=2)))
    once, again = split_batch(scored, config), split_batch(scored, config)
    for first, second in zip(once, again, strict=True):
        assert torch.equal(first.tokens, second.tokens)
        assert torch.equal(first.micro_batches, second.micro_batches)


def test_numbers_of_three_replicas_are_reported_as_their_mean() -> None:
    emitted: dict[int, dict[str, float]] = {}
    executor = RewardExecutor(
        RunConfig(), 0, emitted.__setitem__, lambda: False, Tracer("reward", 0)
    )
    idle = [{"step": 1.0, "generator/idle_ratio": value} for value in (0.1, 0.2, 0.6)]
    executor.put_input("metrics/generator", [MetricValues.from_dict(each) for each in idle])
    trainer = {"step": 1.0, "actor/loss": 2.0, "rollout/reward": 0.5}
    known = {"timing_s/step": 4.0, "perf/total_tokens": 8.0}
    executor.put_input("metrics/trainer", [MetricValues.from_dict(trainer | known)])
    executor.step()
    assert emitted[1]["generator/idle_ratio"] == pytest.approx(0.3)
    assert emitted[1]["perf/tokens_per_second"] == 2.0
