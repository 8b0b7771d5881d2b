"""From finished groups to balanced parts of a batch, against plain Python."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from megarl.config import Overlong, RolloutConfig, RunConfig, TrainerConfig
from megarl.data.prompts import Prompt
from megarl.rollout.batch import (
    Scored,
    empty_batch,
    length_penalty,
    rollout_metrics,
    scored_batch,
    split_batch,
    to_rollouts,
)
from megarl.rollout.buffer import Group
from megarl.rollout.engine import Sample
from megarl.types import Rollouts, TrainBatch
from megatron_bridge.parallel import TrainerLayout

PROMPT = 3  # tokens of every prompt of `_make_rollouts`


def _make_prompt(prompt_id: int, *tokens: int) -> Prompt:
    return Prompt(prompt_id=prompt_id, tokens=tokens, text="", answer="", extra="")


def _make_sample(*tokens: int, version: int = 7, finished: bool = True) -> Sample:
    return Sample(
        request_id=0,
        tokens=tokens,
        logprobs=tuple(-0.5 * token for token in tokens),
        versions=(version,) * len(tokens),
        finished=finished,
    )


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
    return Scored(rollouts=rollouts, rewards=torch.tensor(rewards, dtype=torch.float64))


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


def test_samples_become_one_message_in_the_order_of_their_rows() -> None:
    first, second = _make_prompt(40, 1, 5), _make_prompt(41, 1)
    rollouts = to_rollouts(
        [
            (first, 0, _make_sample(6, 2)),
            (first, 1, _make_sample(8)),
            (second, 0, _make_sample(2)),
            (second, 1, _make_sample(9, finished=False)),
        ]
    )
    assert rollouts.prompt_ids.tolist() == [40, 40, 41, 41]
    assert rollouts.sample_ids.tolist() == [0, 1, 0, 1]
    assert rollouts.tokens.tolist() == [1, 5, 6, 2, 1, 5, 8, 1, 2, 1, 9]
    assert rollouts.lengths.tolist() == [4, 3, 2, 2]
    assert rollouts.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert rollouts.logprobs.tolist() == [0, 0, -3, -1, 0, 0, -4, 0, -1, 0, -4.5]
    assert rollouts.versions.tolist() == [-1, -1, 7, 7, -1, -1, 7, -1, 7, -1, 7]
    assert rollouts.finished.tolist() == [1, 1, 1, 0]


def test_no_samples_are_an_empty_message() -> None:
    assert to_rollouts(()).tokens.tolist() == []
    assert len(empty_batch().lengths) == 0


def test_a_batch_is_sorted_by_prompt_and_sample_whatever_finished_first() -> None:
    prompts = {prompt: _make_prompt(prompt, 1, prompt) for prompt in (3, 5)}
    groups = [
        Group(
            prompt_id=prompt,
            admitted=0,
            skippable=False,
            samples={s: _make_sample(10 * prompt + s) for s in order},
            rewards={s: prompt + s / 10 for s in reversed(order)},
        )
        for prompt, order in ((3, [2, 0, 1]), (5, [1, 2, 0]))
    ]
    scored = scored_batch(groups, prompts)
    assert scored.rollouts.prompt_ids.tolist() == [3, 3, 3, 5, 5, 5]
    assert scored.rollouts.sample_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert scored.rollouts.tokens[2::3].tolist() == [30, 31, 32, 50, 51, 52]
    assert scored.rewards.tolist() == [3.0, 3.1, 3.2, 5.0, 5.1, 5.2]


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


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("num_updates", [2, 3])
def test_updates_share_a_batch_evenly_and_meet_on_all_ranks(num_updates: int, dp: int) -> None:
    generator = random.Random(2)
    rows = [
        (prompt, sample, generator.randint(1, 40)) for prompt in range(6) for sample in range(4)
    ]
    scored = _make_scored(_make_rollouts(rows), [float(generator.randint(0, 1)) for _ in rows])
    trainer = TrainerConfig(layout=TrainerLayout(dp=dp), max_tokens_per_micro_batch=64)
    whole = split_batch(scored, RunConfig(trainer=trainer))
    parts = split_batch(scored, RunConfig(trainer=replace(trainer, updates_per_batch=num_updates)))
    assert len(parts) == dp
    # The same sequences with the same columns, each once; advantages are those of whole groups.
    merged = [_sequences(part) for part in parts]
    assert sum(map(len, merged)) == len(rows)
    expected = {k: v for part in whole for k, v in _sequences(part).items()}
    assert {k: v for each in merged for k, v in each.items()} == expected
    (counts,) = {tuple(part.num_micro_batches.tolist()) for part in parts}
    assert len(counts) == num_updates
    longest = max(PROMPT + row[2] for row in rows)
    loads = []
    for part in parts:
        sizes = [0] * sum(counts)
        for length, member in zip(part.lengths.tolist(), part.micro_batches.tolist(), strict=True):
            sizes[member] += length
        assert max(sizes) <= 64
        ends = [sum(counts[: update + 1]) for update in range(num_updates)]
        loads += [sum(sizes[end - n : end]) for n, end in zip(counts, ends, strict=True)]
    assert max(loads) <= sum(loads) / len(loads) + longest
    assert min(loads) >= sum(loads) / len(loads) - longest


def test_what_an_update_trains_on_does_not_depend_on_the_layout() -> None:
    rows = [(prompt, sample, 1 + 7 * prompt * sample) for prompt in range(4) for sample in range(4)]
    scored = _make_scored(_make_rollouts(rows), [float(i % 2) for i in range(16)])
    found: list[list[set[tuple[int, int]]]] = []
    for dp in (1, 2, 4):
        trainer = TrainerConfig(layout=TrainerLayout(dp=dp), updates_per_batch=3)
        updates: list[set[tuple[int, int]]] = [set() for _ in range(3)]
        for part in split_batch(scored, RunConfig(trainer=trainer)):
            ends = part.num_micro_batches.cumsum(0)
            place = torch.bucketize(part.micro_batches, ends, right=True).tolist()
            keys = zip(part.prompt_ids.tolist(), part.sample_ids.tolist(), strict=True)
            for update, key in zip(place, keys, strict=True):
                updates[update].add(key)
        found.append(updates)
    assert found[0] == found[1] == found[2]
    assert sum(map(len, found[0])) == len(rows)


def test_one_update_is_cut_as_without_the_setting_and_the_smallest_batch_reaches_all() -> None:
    rows = [(prompt, sample, 5 + sample) for prompt in range(2) for sample in range(2)]
    scored = _make_scored(_make_rollouts(rows), [0.0, 1.0, 0.0, 1.0])
    config = RunConfig(trainer=TrainerConfig(layout=TrainerLayout(dp=2), updates_per_batch=2))
    for part in split_batch(scored, config):
        assert (part.num_micro_batches.tolist(), sorted(part.micro_batches.tolist())) == (
            [1, 1],
            [0, 1],
        )
    (part,) = split_batch(scored, RunConfig())
    assert (part.num_micro_batches.tolist(), part.tokens.tolist()) == (
        [1],
        scored.rollouts.tokens.tolist(),
    )


def test_batches_are_cut_in_a_deterministic_way() -> None:
    rows = [(prompt, sample, 5 + sample) for prompt in range(4) for sample in range(4)]
    scored = _make_scored(_make_rollouts(rows), [float(i % 2) for i in range(16)])
    config = RunConfig(trainer=TrainerConfig(layout=TrainerLayout(dp=2)))
    once, again = split_batch(scored, config), split_batch(scored, config)
    for first, second in zip(once, again, strict=True):
        assert torch.equal(first.tokens, second.tokens)
        assert torch.equal(first.micro_batches, second.micro_batches)


@pytest.mark.parametrize("overlong", list(Overlong))
def test_cut_responses_are_masked_only_where_that_is_asked_for(overlong: Overlong) -> None:
    rows = [(0, 0, 3), (0, 1, 4), (1, 0, 2), (1, 1, 5)]  # even lengths were cut
    rollout = RolloutConfig(overlong=overlong, overlong_buffer=1)
    scored = _make_scored(_make_rollouts(rows), [1.0, 0.0, 0.5, 0.0])
    (part,) = split_batch(scored, RunConfig(rollout=rollout))
    for prompt, sample, length in rows:
        columns = _sequences(part)[1000 * prompt + 100 * sample]
        learns = overlong is not Overlong.MASK or length % 2 == 1
        assert columns["loss_mask"] == [0.0] * PROMPT + [float(learns)] * length
    # A cut response still counts in the baseline of its group.
    assert _sequences(part)[0]["advantages"] == [0.5] * (PROMPT + 3)


def _equation_13(length: int, longest: int, cache: int) -> float:
    """Soft overlong punishment as arXiv 2503.14476 prints it, case by case."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "cache"), [(20, 5), (20, 20), (7, 1), (20480, 4096)])
def test_the_overlong_penalty_is_that_of_dapo(longest: int, cache: int) -> None:
    rollout = RolloutConfig(
        max_response_length=longest, overlong=Overlong.PENALTY, overlong_buffer=cache
    )
    config = RunConfig(rollout=rollout)
    for length in range(1, longest + 1):
        assert length_penalty(length, config) == _equation_13(length, longest, cache)
    assert length_penalty(longest, config) == -1.0


@pytest.mark.parametrize("overlong", [Overlong.KEEP, Overlong.MASK])
def test_without_the_penalty_length_costs_nothing(overlong: Overlong) -> None:
    rollout = RolloutConfig(max_response_length=9, overlong=overlong, overlong_buffer=4)
    assert length_penalty(9, RunConfig(rollout=rollout)) == 0.0


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
    assert metrics["staleness/versions_per_sample_max"] == 1.0
    assert metrics["perf/total_tokens"] == 24.0


def test_staleness_is_counted_by_token_and_versions_by_sample() -> None:
    mixed = Sample(
        request_id=0, tokens=(5, 6, 2), logprobs=(-1.0,) * 3, versions=(2, 3, 3), finished=True
    )
    rows = [
        (_make_prompt(0, 1), 0, mixed),
        (_make_prompt(0, 1), 1, _make_sample(5, 2, version=4)),
    ]
    metrics = rollout_metrics(_make_scored(to_rollouts(rows), [0.0, 1.0]), version=4)
    assert metrics["staleness/mean"] == pytest.approx((2 + 1 + 1 + 0 + 0) / 5)
    assert metrics["staleness/max"] == 2.0
    assert metrics["staleness/versions_per_sample"] == 1.5
    assert metrics["staleness/versions_per_sample_max"] == 2.0
