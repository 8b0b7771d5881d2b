"""The trainer executor: one rank of a Megatron-Core world that learns from scored rollouts.

Consumes ``batch`` (its data-parallel part) and ``control``; produces ``weights`` (its live shards)
and ``metrics``. Trains on each non-empty batch, in one or several optimizer steps; its version counts
batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from megarl.algorithms.kl import kl_per_token
from megarl.algorithms.losses import metrics_from_sums, policy_loss
from megarl.checkpoint import StartPoint
from megarl.config import RunConfig
from megarl.contract import error_bounds, merge_errors, require_agreement, token_errors
from megarl.errors import ChannelError
from megarl.executors.base import Executor
from megarl.executors.policy import ExportLink, Policy, peak_memory_gib
from megarl.observe.trace import Tracer
from megarl.topology import TRAINER
from megarl.types import Control, Message, MetricValues, TrainBatch
from megatron_bridge.runtime import setup
from megatron_bridge.runtime.batch import MicroBatch
from megatron_bridge.runtime.model import MegatronModel
from megatron_bridge.runtime.train import LossOutputs, StepResult, TokenOutputs

logger = logging.getLogger(__name__)


def micro_batches(batch: TrainBatch) -> list[MicroBatch]:
    """Split a data-parallel rank's part as its ``micro_batches`` column says.

    A micro-batch that got no sequence (other ranks have more) holds one token without loss.
    """
    columns = {
        "loss_mask": batch.loss_mask,
        "logprobs": batch.logprobs,
        "advantages": batch.advantages,
    }
    device = setup.device()
    tokens = batch.tokens.split(batch.lengths.tolist())
    split = {name: column.split(batch.lengths.tolist()) for name, column in columns.items()}
    result = []
    for index in range(int(batch.num_micro_batches.sum())):
        rows = torch.nonzero(batch.micro_batches == index).flatten().tolist()
        if not rows:
            one = torch.zeros(1, device=device)
            dummy = MicroBatch(
                lengths=torch.ones(1, dtype=torch.int64, device=device),
                tokens=one.long(),
                columns=dict.fromkeys(columns, one),
            )
            result.append(dummy)
            continue
        result.append(
            MicroBatch(
                lengths=batch.lengths[rows].to(device),
                tokens=torch.cat([tokens[row] for row in rows]).to(device),
                columns={
                    name: torch.cat([parts[row] for row in rows]).to(device)
                    for name, parts in split.items()
                },
            )
        )
    return result


def updates(batch: TrainBatch, parts: Sequence[MicroBatch]) -> list[Sequence[MicroBatch]]:
    """Return the micro-batches ``parts`` of a batch by update."""
    counts = batch.num_micro_batches.tolist()
    return [parts[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def combine(results: Sequence[StepResult]) -> StepResult:
    """Return the results of a batch's updates as one: sums and means over all their tokens, the
    largest of maxima and gradient norms, the last learning rate.
    """
    if len(results) == 1:
        return results[0]
    num_tokens = sum(result.num_tokens for result in results)
    loss_sum = sum(result.loss * result.num_tokens for result in results)
    return StepResult(
        loss=loss_sum / max(num_tokens, 1),
        grad_norm=max(result.grad_norm for result in results),
        lr=results[-1].lr,
        num_tokens=num_tokens,
        sums={name: sum(result.sums[name] for result in results) for name in results[0].sums},
        maxima={name: max(r.maxima[name] for r in results) for name in results[0].maxima},
    )


def sampled_by(batch: TrainBatch, version: int) -> TrainBatch:
    """Return the batch with no loss but that of sequences which ``version`` alone sampled."""
    others = ((batch.versions >= 0) & (batch.versions != version)).split(batch.lengths.tolist())
    alone = torch.tensor([not bool(tokens.any()) for tokens in others], dtype=torch.float32)
    return replace(batch, loss_mask=batch.loss_mask * alone.repeat_interleave(batch.lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a trainer rank is given of the world."""

    link: ExportLink
    arrive: Callable[[int], None]  # say that this rank stands at the head of a tick
    commits: bool = False  # whether its part of a checkpoint is all of it


class TrainerExecutor(Executor):
    """One trainer rank; its executor-world rank is given."""

    name = TRAINER

    def __init__(
        self, config: RunConfig, start: StartPoint, rank: int, around: Surroundings, tracer: Tracer
    ):
        self._config, self._start, self._rank = config, start, rank
        self._around, self._tracer = around, tracer
        self._tick = start.step
        self._metrics: dict[str, float] = {}
        self._batch: TrainBatch | None = None
        self._reference: MegatronModel | None = None
        self._settle: Callable[[], None] | None = None
        self._agreed = False  # with the generators, on the first batch
        self._tick_began = time.monotonic()

    def init(self) -> None:
        self.policy = Policy(self._config, self._start, self._rank)
        if self._config.algorithm.kl_loss_coef > 0:
            self._reference = self.policy.reference()

    @property
    def version(self) -> int:
        return self.policy.version

    def before_update(self, settle: Callable[[], None]) -> None:
        """Call ``settle`` before the weights change."""
        self._settle = settle

    def set_step(self, step: int) -> None:
        self._tick, self._batch = step, None

    def get_output(self, channel: str) -> Sequence[Message]:
        metrics, self._metrics = self._metrics, {}
        return (MetricValues.from_dict(metrics),)

    def put_input(self, channel: str, messages: Sequence[Message]) -> None:
        (message,) = messages
        if isinstance(message, Control):
            self.stopping = bool(message.stop)
        elif isinstance(message, TrainBatch):
            self._batch = message
        else:
            raise ChannelError(f"the trainer takes no {type(message).__name__} ({channel!r})")

    def get_model(self) -> Mapping[str, Tensor]:
        return self.policy.model.parameters()

    def step(self) -> None:
        """Train on the tick's batch, where there is one, and save; then end the tick for all."""
        if self._batch is not None and len(self._batch.lengths):
            self._train(self._batch)
        else:
            self._tracer.drain()
        if self.policy.save_due(stopping=self.stopping):
            self._save()
        self._around.arrive(self._tick + 1)

    def _train(self, batch: TrainBatch) -> None:
        self._require_fresh(batch)
        parts = micro_batches(batch)
        if not self._agreed:
            self.check_agreement()
        temperature = self._config.rollout.temperature
        with self._tracer.span("update_actor"):
            if self._reference is not None:
                parts = self._with_reference(parts, self._reference, temperature)
            results = [
                self.policy.trainer.train_step(
                    share,
                    self._loss,
                    temperature=temperature,
                    entropy=True,
                    before_update=self._settle,
                )
                for share in updates(batch, parts)
            ]
        result = combine(results)
        self.policy.version += 1
        self._metrics |= self._step_metrics(result)
        logger.info(
            "step %d: loss %.5f, grad norm %.4f", self.version, result.loss, result.grad_norm
        )

    def check_agreement(self) -> None:
        """Compare with the generators' log-probabilities of the first batch; report metrics.

        One forward pass; every trainer rank enters, and all of them raise alike. A resumed run's
        first batch has samples of older versions, which are left out.

        Raises:
            ContractError: the difference is above the bounds; names the worst token.
            ChannelError: no batch.
        """
        if self._batch is None:
            raise ChannelError(f"no first batch sampled by version {self.version} to compare with")
        batch = sampled_by(self._batch, self.version)
        layout = self._config.trainer.layout
        with self._tracer.span("contract"):
            logprobs = self.policy.model.logprobs(
                micro_batches(batch), self._config.rollout.temperature
            )
            found = merge_errors(setup.gather(token_errors(batch, logprobs)), layout.tp * layout.cp)
        require_agreement(found, error_bounds(self._config))
        logger.info(
            "log-probabilities agree with the generators': %.2e at most, mean %.2e, %d tokens",
            found.largest,
            found.mean,
            found.num_tokens,
        )
        self._agreed = True
        self._metrics = {
            "step": float(self.version + 1),
            "contract/max_logprob_error": found.largest,
            "contract/mean_logprob_error": found.mean,
            "contract/tokens": float(found.num_tokens),
        }

    def _require_fresh(self, batch: TrainBatch) -> None:
        """Assert the staleness bound where tokens are consumed."""
        bound = self._config.staleness_bound
        sampled = batch.versions[batch.loss_mask > 0]
        if len(sampled) and not self.version - bound <= int(sampled.min()) <= self.version:
            raise ChannelError(
                f"batch with tokens of version {int(sampled.min())} at version {self.version}: "
                f"more than {bound} old"
            )

    def _with_reference(
        self, parts: Sequence[MicroBatch], reference: MegatronModel, temperature: float
    ) -> list[MicroBatch]:
        """Add the frozen model's log-probabilities as a column (on the last pipeline stage)."""
        logprobs = reference.logprobs(parts, temperature)
        if logprobs is None:
            return list(parts)
        return [
            MicroBatch(
                lengths=part.lengths,
                tokens=part.tokens,
                columns={**part.columns, "reference": column},
            )
            for part, column in zip(parts, logprobs, strict=True)
        ]

    def _loss(self, outputs: TokenOutputs, part: MicroBatch) -> LossOutputs:
        algorithm = self._config.algorithm
        columns, mask = part.columns, part.columns["loss_mask"]
        loss, sums, maxima = policy_loss(
            outputs.logprobs, columns["logprobs"], columns["advantages"], mask, algorithm
        )
        if outputs.entropy is not None:
            entropy = (outputs.entropy * mask).sum()
            sums["entropy"] = entropy.detach()
            if algorithm.entropy_coeff:
                loss = loss - algorithm.entropy_coeff * entropy
        if "reference" in columns:
            kl_T = kl_per_token(outputs.logprobs, columns["reference"], algorithm.kl_loss_type)
            kl = (kl_T * mask).sum()
            sums["kl_ref"] = kl.detach()
            loss = loss + algorithm.kl_loss_coef * kl
        return LossOutputs(loss_sum=loss, num_tokens=mask.sum(), sums=sums, maxima=maxima)

    def _step_metrics(self, result: StepResult) -> dict[str, float]:
        now = time.monotonic()
        seconds, self._tick_began = now - self._tick_began, now
        times = self._tracer.drain()
        idle = times.pop("idle_ratio")
        metrics = metrics_from_sums(result.sums, result.maxima, result.num_tokens)
        return {
            "step": float(self.version),
            **metrics,
            "actor/loss": result.loss,
            "actor/grad_norm": result.grad_norm,
            "actor/lr": result.lr,
            **times,
            "timing_s/step": seconds,
            "trainer/idle_ratio": idle,
            "perf/peak_memory_gib": peak_memory_gib(),
        }

    def _save(self) -> None:
        """Write the trainer's part of a checkpoint, which the reward executor, where there is one,
        makes complete, and, after the last step, the model as a Hugging Face folder.
        """
        with self._tracer.span("save_checkpoint"):
            self.policy.save(commit=self._around.commits)
        if self.version == self._config.max_steps and self._config.checkpoint.export_hf:
            with self._tracer.span("export_hf"):
                self.policy.export(self._around.link)

    def close(self) -> None:
        setup.destroy()
