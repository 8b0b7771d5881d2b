"""From finished groups to a batch: rollouts with rewards, advantages, balanced parts, metrics.

Called by the reward executor; pure functions of a batch. It holds whole groups, so advantages are
computed here, before sequences are spread over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.advantages import group_advantages
from megarl.config import Overlong, RunConfig
from megarl.data.packing import Part, split
from megarl.data.prompts import Prompt
from megarl.rollout.buffer import Group
from megarl.rollout.engine import Sample
from megarl.types import Rollouts, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """All rollouts of a batch in one order, with their rewards."""

    rollouts: Rollouts
    rewards: Tensor  # [B] float64


def to_rollouts(rows: Sequence[tuple[Prompt, int, Sample]]) -> Rollouts:
    """Return (prompt, sample id, sample) rows as one message, in their order."""
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for prompt, _, sample in rows:
        tokens += [*prompt.tokens, *sample.tokens]
        logprobs += [0.0] * len(prompt.tokens) + list(sample.logprobs)
        versions += [-1] * len(prompt.tokens) + list(sample.versions)
    columns = {
        "prompt_ids": [prompt.prompt_id for prompt, _, _ in rows],
        "sample_ids": [sample_id for _, sample_id, _ in rows],
        "prompt_lengths": [len(prompt.tokens) for prompt, _, _ in rows],
        "lengths": [len(prompt.tokens) + len(sample.tokens) for prompt, _, sample in rows],
        "finished": [int(sample.finished) for _, _, sample in rows],
        "tokens": tokens,
        "versions": versions,
    }
    return Rollouts(
        **{name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()},
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
    )


def scored_batch(groups: Sequence[Group[Sample]], prompts: Mapping[int, Prompt]) -> Scored:
    """Return groups as a batch, sorted by prompt and sample."""
    rows = [
        (prompts[group.prompt_id], sample_id, group.samples[sample_id])
        for group in groups
        for sample_id in sorted(group.samples)
    ]
    rewards = [group.rewards[sample_id] for group in groups for sample_id in sorted(group.samples)]
    return Scored(rollouts=to_rollouts(rows), rewards=torch.tensor(rewards, dtype=torch.float64))


def length_penalty(length: int, config: RunConfig) -> float:
    """Return what a response of ``length`` tokens loses: soft overlong punishment of DAPO.

    0 up to ``max_response_length - overlong_buffer`` tokens, then linear down to -1 at the limit
    (arXiv 2503.14476, equation 13).
    """
    rollout = config.rollout
    if rollout.overlong is not Overlong.PENALTY:
        return 0.0
    free = rollout.max_response_length - rollout.overlong_buffer
    return -max(0, length - free) / rollout.overlong_buffer


def empty_batch() -> TrainBatch:
    none = torch.zeros(0, dtype=torch.int64)
    return TrainBatch(
        prompt_ids=none,
        sample_ids=none,
        lengths=none,
        tokens=none,
        loss_mask=none.float(),
        logprobs=none.float(),
        advantages=none.float(),
        versions=none,
        micro_batches=none,
        num_micro_batches=torch.zeros(1, dtype=torch.int64),
    )


def split_batch(scored: Scored, config: RunConfig) -> list[TrainBatch]:
    """Return one part for each data-parallel rank, of as many updates as a batch is to have.

    Ranks and updates are balanced by tokens; in an update all ranks have as many micro-batches.
    Samples of a prompt may go to several ranks and updates: their advantages are known.
    """
    rollouts, algorithm = scored.rollouts, config.algorithm
    advantages_B = group_advantages(
        scored.rewards, rollouts.prompt_ids, algorithm.adv_estimator, algorithm.norm_adv_by_std
    )
    lengths = rollouts.lengths.tolist()
    trainer, layout = config.trainer, config.trainer.layout
    budget, updates = trainer.max_tokens_per_micro_batch, trainer.updates_per_batch
    prompts = rollouts.prompt_ids.tolist()
    parts = split(lengths, layout.dp, budget, layout.micro_batch_multiple, updates, prompts)
    mask_cut = config.rollout.overlong is Overlong.MASK
    return [_train_batch(rollouts, advantages_B, part, mask_cut) for part in parts]


def _train_batch(
    rollouts: Rollouts, advantages_B: Tensor, part: Part, mask_cut: bool
) -> TrainBatch:
    rows = part.rows

    def take(column: Tensor) -> Tensor:
        sequences = column.split(rollouts.lengths.tolist())
        return torch.cat([sequences[row] for row in rows])

    member = torch.zeros(len(rows), dtype=torch.int64)
    for number, members in enumerate(part.packs):
        member[members] = number
    versions = take(rollouts.versions)
    lengths = rollouts.lengths[rows]
    learns = (versions >= 0).float()
    if mask_cut:
        learns *= rollouts.finished[rows].float().repeat_interleave(lengths)
    return TrainBatch(
        prompt_ids=rollouts.prompt_ids[rows],
        sample_ids=rollouts.sample_ids[rows],
        lengths=lengths,
        tokens=take(rollouts.tokens),
        loss_mask=learns,
        logprobs=take(rollouts.logprobs),
        advantages=advantages_B[rows].float().repeat_interleave(lengths),
        versions=versions,
        micro_batches=member,
        num_micro_batches=torch.tensor(part.num_packs),
    )


def rollout_metrics(scored: Scored, version: int) -> dict[str, float]:
    """Return what is known of a batch before training; ``version`` is the one to train."""
    rollouts, rewards = scored.rollouts, scored.rewards
    responses = (rollouts.lengths - rollouts.prompt_lengths).double()
    ages = (version - rollouts.versions[rollouts.versions >= 0]).double()
    sampled = rollouts.versions.split(rollouts.lengths.tolist())
    spans = torch.tensor([len(each[each >= 0].unique()) for each in sampled]).double()
    _, group = torch.unique(rollouts.prompt_ids, return_inverse=True)
    num_groups = int(group.max()) + 1
    low = torch.full((num_groups,), torch.inf, dtype=torch.float64)
    low.scatter_reduce_(0, group, rewards, "amin")
    high = torch.full((num_groups,), -torch.inf, dtype=torch.float64)
    high.scatter_reduce_(0, group, rewards, "amax")
    return {
        "rollout/reward": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std(unbiased=False)),
        "rollout/zero_advantage_groups": float((low == high).double().mean()),
        "rollout/response_length_mean": float(responses.mean()),
        "rollout/response_length_max": float(responses.max()),
        "rollout/response_length_clip_ratio": float((rollouts.finished == 0).double().mean()),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/versions_per_sample": float(spans.mean()),
        "staleness/versions_per_sample_max": float(spans.max()),
        "perf/total_tokens": float(rollouts.lengths.sum()),
    }
