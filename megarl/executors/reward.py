"""The reward executor: scores rollouts, makes them into balanced batches, and keeps the books.

Consumes ``rollouts`` and ``eval_rollouts`` of every generator replica and the metrics of all
executors; produces ``batch`` (one part for each data-parallel rank) and ``control``. It holds whole
groups, so advantages are computed here, before sequences are spread over ranks. In its step, while
the others work, it emits the metrics of the finished step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from megarl.algorithms.advantages import group_advantages
from megarl.config import RunConfig
from megarl.data.packing import Part, split
from megarl.data.prompts import Prompt, PromptDataset
from megarl.data.tokenizer import decode, load_model_tokenizer
from megarl.errors import ChannelError
from megarl.executors.base import Executor
from megarl.observe.trace import Tracer
from megarl.rewards.pool import RewardItem, RewardPool, RewardResult
from megarl.topology import REWARD
from megarl.types import Control, Message, MetricValues, Rollouts, TrainBatch
from megatron_bridge.models.families import load_spec
from megatron_bridge.models.flops import training_flops

logger = logging.getLogger(__name__)

SAMPLES_FILE = "samples.jsonl"  # of the run folder: greedy answers to one held-out prompt

MetricSink = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """All rollouts of a batch in one order, with their rewards."""

    rollouts: Rollouts
    responses: list[str]
    rewards: Tensor  # [B] float64
    result: RewardResult


def merge(parts: Sequence[Rollouts]) -> Rollouts:
    """Join the replicas' rollouts, sorted by prompt and sample: independent of who sampled what."""
    lengths = torch.cat([part.lengths for part in parts])
    prompts = torch.cat([part.prompt_ids for part in parts])
    samples = torch.cat([part.sample_ids for part in parts])
    order = sorted(range(len(lengths)), key=lambda row: (int(prompts[row]), int(samples[row])))

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])[order]

    def columns(name: str) -> Tensor:
        flat = torch.cat([getattr(part, name) for part in parts]).split(lengths.tolist())
        return torch.cat([flat[row] for row in order])

    if not order:
        return parts[0]

    return Rollouts(
        prompt_ids=rows("prompt_ids"),
        sample_ids=rows("sample_ids"),
        prompt_lengths=rows("prompt_lengths"),
        lengths=rows("lengths"),
        finished=rows("finished"),
        tokens=columns("tokens"),
        logprobs=columns("logprobs"),
        versions=columns("versions"),
    )


class RewardExecutor(Executor):
    """The one reward rank; `sink` takes (step, metrics), `stop_requested` asks whether to end."""

    name = REWARD

    def __init__(
        self,
        config: RunConfig,
        start_step: int,
        sink: MetricSink,
        stop_requested: Callable[[], bool],
        tracer: Tracer,
    ):
        self._config, self._sink, self._tracer = config, sink, tracer
        self._stop_requested = stop_requested
        self._next_batch = start_step  # index of the batch to be made next
        self._rollouts: Rollouts | None = None
        self._records: dict[int, dict[str, float]] = {}  # by optimizer step, until complete

    def init(self) -> None:
        config = self._config
        self._tokenizer = load_model_tokenizer(Path(config.model.path))
        self._spec = load_spec(Path(config.model.path))
        self._pool = RewardPool(
            config.reward.path, config.reward.num_processes, config.reward.timeout_seconds
        )
        self._train_prompts = PromptDataset(
            Path(config.data.train_path), self._tokenizer, config.data
        )
        self._eval_prompts = (
            PromptDataset(Path(config.data.eval_path), self._tokenizer, config.data)
            if config.data.eval_path
            else None
        )

    def set_step(self, step: int) -> None:
        self._rollouts = None
        self.stopping = self._stop_requested()

    def get_output(self, channel: str) -> Sequence[Message]:
        if channel.startswith("control"):
            return (Control(stop=torch.tensor([int(self.stopping)])),)
        return self._make_batch()

    def put_input(self, channel: str, messages: Sequence[Message]) -> None:
        if all(isinstance(message, MetricValues) for message in messages):
            self._note([m.to_dict() for m in messages if isinstance(m, MetricValues)])
            return
        parts = [message for message in messages if isinstance(message, Rollouts)]
        if len(parts) != len(messages):
            raise ChannelError(f"the reward executor takes no such message from {channel!r}")
        if channel == "rollouts":
            self._rollouts = merge(parts)
        elif len((held_out := merge(parts)).lengths):
            self._evaluate(held_out)

    def step(self) -> None:
        """Emit every record that has all its parts."""
        for step in sorted(self._records):
            record = self._records[step]
            if "actor/loss" in record and "rollout/reward" in record:
                self._sink(step, self._finish(self._records.pop(step)))

    def record(self, step: int) -> dict[str, float]:
        """Return what is known of a step that was not emitted, for a check that ends before."""
        return dict(self._records.get(step, {}))

    def _note(self, sent: list[dict[str, float]]) -> None:
        """Keep what an executor's groups sent for one step: replicas' numbers as their mean."""
        told = [metrics for metrics in sent if metrics]
        if told:
            record = self._records.setdefault(int(told[0]["step"]), {})
            names = set().union(*told) - {"step"}
            record.update({name: fmean(m[name] for m in told if name in m) for name in names})

    def _prompts_of(
        self, rollouts: Rollouts, dataset: PromptDataset, index: int
    ) -> dict[int, Prompt]:
        config = self._config
        prompts = dataset.batch(
            index, config.data.train_batch_size, config.seed, config.data.shuffle
        )
        known = {prompt.prompt_id: prompt for prompt in prompts}
        got = set(rollouts.prompt_ids.tolist())
        if got != set(known):
            raise ChannelError(
                f"rollouts of prompts {sorted(got ^ set(known))[:5]} are missing or not of batch {index}"
            )
        return known

    def _score(self, rollouts: Rollouts, prompts: dict[int, Prompt]) -> Scored:
        sequences = rollouts.tokens.split(rollouts.lengths.tolist())
        items: list[RewardItem] = []
        for row, tokens in enumerate(sequences):
            prompt = prompts[int(rollouts.prompt_ids[row])]
            response = tokens[int(rollouts.prompt_lengths[row]) :].tolist()
            text = decode(self._tokenizer, response)
            items.append(reward_item(prompt, text, bool(rollouts.finished[row])))
        with self._tracer.span("reward"):
            result = self._pool.score(items)
        rewards = torch.tensor(result.scores, dtype=torch.float64)
        responses = [item.response for item in items]
        return Scored(rollouts=rollouts, responses=responses, rewards=rewards, result=result)

    def _evaluate(self, rollouts: Rollouts) -> None:
        assert self._eval_prompts is not None
        prompts = {prompt.prompt_id: prompt for prompt in self._eval_prompts.all()}
        version = int(rollouts.versions.max())
        scored = self._score(rollouts, prompts)
        sampled = rollouts.sample_ids < self._config.eval.n
        for row in torch.nonzero(~sampled).flatten().tolist():
            self._keep_sample(version, prompts[int(rollouts.prompt_ids[row])], scored, row)
        responses = (rollouts.lengths - rollouts.prompt_lengths)[sampled].double()
        metrics = {
            "val/accuracy": float(scored.rewards[sampled].mean()),
            "val/response_length_mean": float(responses.mean()),
        }
        logger.info("version %d: held-out accuracy %.4f", version, metrics["val/accuracy"])
        self._sink(version, metrics)

    def _keep_sample(self, version: int, prompt: Prompt, scored: Scored, row: int) -> None:
        """Append the greedy response to the run's samples, for a person to read."""
        sample = {
            "version": version,
            "prompt": prompt.text,
            "greedy_response": scored.responses[row],
            "answer": prompt.answer,
            "reward": float(scored.rewards[row]),
        }
        with (self._config.folder / SAMPLES_FILE).open("a") as file:
            file.write(json.dumps(sample) + "\n")

    def _make_batch(self) -> list[TrainBatch]:
        rollouts = self._rollouts
        num_parts = self._config.trainer.layout.dp
        if rollouts is None or not len(rollouts.lengths):
            return [_empty_batch() for _ in range(num_parts)]
        index = self._next_batch
        scored = self._score(rollouts, self._prompts_of(rollouts, self._train_prompts, index))
        self._next_batch += 1
        record = self._records.setdefault(index + 1, {})
        record.update(rollout_metrics(scored, version=index))
        record["perf/model_flops"] = training_flops(self._spec, scored.rollouts.lengths.tolist())
        return split_batch(scored, self._config)

    def _finish(self, record: dict[str, float]) -> dict[str, float]:
        """Add what needs several executors' numbers."""
        seconds = record["timing_s/step"]
        ranks = self._config.trainer.layout.world_size + self._config.generator.layout.world_size
        record["perf/tokens_per_second"] = record["perf/total_tokens"] / seconds
        if peak := self._config.observe.peak_tflops * 1e12:
            busy = record["timing_s/update_actor"] * self._config.trainer.layout.world_size
            record["perf/mfu"] = record["perf/model_flops"] / (busy * peak)
        record["perf/tokens_per_second_per_gpu"] = record["perf/tokens_per_second"] / ranks
        return record

    def close(self) -> None:
        self._pool.close()


def reward_item(prompt: Prompt, response: str, finished: bool) -> RewardItem:
    """Return what the pool scores of one response to a prompt."""
    return RewardItem(
        prompt=prompt.text,
        response=response,
        answer=prompt.answer,
        extra=prompt.extra,
        finished=finished,
    )


def _empty_batch() -> TrainBatch:
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
    """Return one part for each data-parallel rank: balanced by tokens, equal micro-batch counts."""
    rollouts, algorithm = scored.rollouts, config.algorithm
    advantages_B = group_advantages(
        scored.rewards, rollouts.prompt_ids, algorithm.adv_estimator, algorithm.norm_adv_by_std
    )
    lengths = rollouts.lengths.tolist()
    layout = config.trainer.layout
    budget = config.trainer.max_tokens_per_micro_batch
    parts = split(lengths, layout.dp, budget, layout.micro_batch_multiple)
    return [_train_batch(rollouts, advantages_B, part) for part in parts]


def _train_batch(rollouts: Rollouts, advantages_B: Tensor, part: Part) -> TrainBatch:
    rows = part.rows

    def take(column: Tensor) -> Tensor:
        sequences = column.split(rollouts.lengths.tolist())
        return torch.cat([sequences[row] for row in rows])

    member = torch.zeros(len(rows), dtype=torch.int64)
    for number, members in enumerate(part.packs):
        member[members] = number
    versions = take(rollouts.versions)
    lengths = rollouts.lengths[rows]
    return TrainBatch(
        prompt_ids=rollouts.prompt_ids[rows],
        sample_ids=rollouts.sample_ids[rows],
        lengths=lengths,
        tokens=take(rollouts.tokens),
        loss_mask=(versions >= 0).float(),
        logprobs=take(rollouts.logprobs),
        advantages=advantages_B[rows].float().repeat_interleave(lengths),
        versions=versions,
        micro_batches=member,
        num_micro_batches=torch.tensor([len(part.packs)]),
    )


def rollout_metrics(scored: Scored, version: int) -> dict[str, float]:
    """Return what is known of a batch before training; ``version`` is the one to train."""
    rollouts, rewards = scored.rollouts, scored.rewards
    responses = (rollouts.lengths - rollouts.prompt_lengths).double()
    ages = (version - rollouts.versions[rollouts.versions >= 0]).double()
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
        "staleness/dropped": 0.0,  # a tick trains on all that the last one sampled
        "reward/timeouts": float(scored.result.timeouts),
        "reward/errors": float(scored.result.errors),
        "perf/total_tokens": float(rollouts.lengths.sum()),
    }
