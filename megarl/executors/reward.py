"""The reward executor: hands out prompts, scores samples, makes balanced batches, keeps the books.

Consumes the replicas' reports (`megarl.channels.requests`) and the metrics of all executors; produces
``batch`` (one part for each data-parallel rank), ``control`` and the run's checkpoint beside the
trainer's tensors. It alone knows prompts, seeds and staleness. In a tick, `prepare` serves the
replicas until the batch to train is complete, `step` until the trainer has arrived at the boundary;
replicas whose ranks the trainer needs are done within `prepare`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

import torch

from megarl import checkpoint, recording
from megarl.checkpoint import RunState, StartPoint
from megarl.config import RunConfig
from megarl.data.tokenizer import load_model_tokenizer
from megarl.errors import ChannelError, ChannelTimeout
from megarl.executors.base import Executor
from megarl.observe.metrics import METRICS_FILE, MetricsTail
from megarl.observe.trace import SpanKind, Tracer
from megarl.rollout.batch import empty_batch, rollout_metrics, scored_batch, split_batch
from megarl.rollout.buffer import BufferPolicy, RolloutBuffer
from megarl.rollout.dispatch import Dispatcher
from megarl.rollout.engine import Sample
from megarl.rollout.messages import State, pack_work, unpack_samples
from megarl.rollout.order import OrderLog
from megarl.rollout.recorded import write_batch
from megarl.rollout.saved import SavedRollouts, read_rollouts, write_rollouts
from megarl.rollout.scoring import Scorer
from megarl.rollout.tasks import Evaluation, TaskBook
from megarl.topology import REWARD
from megarl.types import Control, Message, MetricValues, Orders, Report, TrainBatch
from megarl.weights import sync_due
from megatron_bridge.models.families import load_spec
from megatron_bridge.models.flops import training_flops

logger = logging.getLogger(__name__)

SAMPLES_FILE = "samples.jsonl"  # of the run folder: greedy answers to one held-out prompt
_LAST_METRICS = "metrics/generator"  # with them a step's record is complete
_LOOK_SECONDS = 0.01  # how often a serving rank looks whether the trainer has arrived

MetricSink = Callable[[int, dict[str, float]], None]


class Server(Protocol):
    """Answers replicas' reports from threads of its own; see `RequestServer`."""

    def open(self) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the reward executor is given of the world."""

    sink: MetricSink  # takes (step, metrics)
    say: Callable[[str], None]  # what this rank is doing, for whoever watches the job
    stop_requested: Callable[[], bool]  # whether to save and end
    has_arrived: Callable[[int], bool]  # whether the trainer is at the end of this tick
    serve: Callable[[Callable[[int, Report], tuple[Orders, bool]]], Server]
    num_replicas: int
    closes_before_batch: bool  # whether the trainer steps only where no replica is being served


def buffer_policy(config: RunConfig) -> BufferPolicy:
    """Return the buffer's view of a configuration."""
    return BufferPolicy(
        batch_groups=config.data.train_batch_size,
        group_size=config.rollout.n,
        max_staleness=config.staleness_bound,
        stale_policy=config.rollout.stale_policy,
        skip_uniform=config.rollout.dynamic_sampling,
        max_oversample=config.rollout.max_oversample,
        last_version=config.max_steps,
    )


class RewardExecutor(Executor):
    """The one reward rank."""

    name = REWARD

    def __init__(
        self, config: RunConfig, start: StartPoint, surroundings: Surroundings, tracer: Tracer
    ):
        self._config, self._start, self._tracer = config, start, tracer
        self._around = surroundings
        self._version = self._last_saved = start.step  # that the trainer holds
        self._generator_version = start.step  # behind where weights do not travel at every tick
        self._buffer: RolloutBuffer[Sample] = RolloutBuffer(buffer_policy(config), start.step)
        self._dispatcher = Dispatcher(
            surroundings.num_replicas, config.generator.max_running_sequences
        )
        self._batch: list[TrainBatch] | None = None
        self._records: dict[int, dict[str, float]] = {}  # by step, until complete
        self._accuracies: dict[int, float] = {}  # by version, on held-out prompts
        self._resources: list[Scorer | OrderLog] = []

    def init(self) -> None:
        config = self._config
        tokenizer = load_model_tokenizer(Path(config.model.path))
        self._spec = load_spec(Path(config.model.path))
        self._scorer = Scorer(config, tokenizer)
        self._resources.append(self._scorer)
        self._tasks = TaskBook(config, tokenizer)
        self._order = OrderLog(config.folder, self._start.step)
        self._resources.append(self._order)
        recording.forget_after(config.folder, self._start.step)
        rows = MetricsTail(config.folder / METRICS_FILE).poll()
        self._accuracies = {
            row["step"]: row["val/accuracy"] for row in rows if row.get("val/accuracy") is not None
        }
        self._server = self._around.serve(self._answer)
        if self._start.rollout_file is not None:
            self._restore(self._start.rollout_file)

    def _restore(self, file: Path) -> None:
        saved = read_rollouts(file)
        self._buffer.restore(saved.state)
        for prompt_id, sample_id, sample, reward in saved.finished:
            self._buffer.put(prompt_id, sample_id, sample, reward)
        partial = {(p, s): sample for p, s, sample in saved.partial}
        groups: dict[int, list[int]] = {group.prompt_id: [] for group in self._buffer.groups()}
        for prompt_id, sample_id in self._buffer.missing():
            groups[prompt_id].append(sample_id)
        for prompt_id, sample_ids in groups.items():  # of complete ones the prompt is read again
            if requests := self._tasks.train(prompt_id, sample_ids, partial):
                self._dispatcher.submit(requests)
        logger.info(
            "resumed %d groups in flight, %d samples finished, %d begun",
            len(self._buffer),
            len(saved.finished),
            len(partial),
        )

    def set_step(self, step: int) -> None:
        self._version = step
        every, last = self._config.weights.sync_every, self._config.max_steps
        if sync_due(step, self._start.step, last, every):
            self._generator_version = step
        self._batch = None
        self.stopping = self._around.stop_requested()

    def get_output(self, channel: str) -> Sequence[Message]:
        if channel.startswith("control"):
            return (Control(stop=torch.tensor([int(self.stopping)])),)
        parts = self._config.trainer.layout.dp
        return self._batch or [empty_batch() for _ in range(parts)]

    def put_input(self, channel: str, messages: Sequence[Message]) -> None:
        sent = [message.to_dict() for message in messages if isinstance(message, MetricValues)]
        if len(sent) != len(messages):
            raise ChannelError(f"the reward executor takes no such message from {channel!r}")
        told = [metrics for metrics in sent if metrics]
        if told:  # replicas' numbers as their mean
            record = self._records.setdefault(int(told[0]["step"]), {})
            names = set().union(*told) - {"step"}
            record.update({name: fmean(m[name] for m in told if name in m) for name in names})
        if channel == _LAST_METRICS:
            self._emit()

    # --- A tick ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Serve until this version's batch is complete; past the last one there is none."""
        self._dispatcher.open()
        self._server.open()
        if self._tasks.evaluation_due(self._version, self._accuracies):
            for group in self._tasks.evaluation(self._version):
                self._dispatcher.submit(group, first=True)
        if self._version < self._config.max_steps and not self.stopping:
            with self._tracer.span("collect", SpanKind.WAIT):
                self._serve_until(
                    lambda: self._buffer.is_ready(self._version), "the batch", self._expire
                )
            self._batch = self._make_batch()
        if self._around.closes_before_batch:
            self._close()

    def step(self) -> None:
        """Serve until the trainer has arrived and evaluations are done."""
        if not self._around.closes_before_batch:
            self._close()
        with self._tracer.span("wait/trainer", SpanKind.WAIT):
            self._await_trainer()
        self._tracer.drain()

    def _await_trainer(self) -> None:
        """Wait until the trainer has arrived; nobody is served meanwhile."""
        seconds = self._config.fault.timeout_seconds
        began = time.monotonic()
        while not self._has_arrived():
            if time.monotonic() - began > seconds:
                raise ChannelTimeout(
                    f"the trainer has not ended step {self._version + 1} for {seconds:g} s"
                )
            time.sleep(_LOOK_SECONDS)

    def _has_arrived(self) -> bool:
        return self._around.has_arrived(self._version + 1)

    def _close(self) -> None:
        """Serve to the end: evaluations are done, and the trainer has arrived where it works too."""
        early = self._around.closes_before_batch
        with self._tracer.span("serve", SpanKind.WAIT):
            self._serve_until(
                lambda: not self._tasks.evaluating and (early or self._has_arrived()),
                "evaluations" if early else "evaluations and the trainer",
            )
            self._dispatcher.close(hand_over=self._save_due())
            self._server.close()

    def _answer(self, replica: int, report: Report) -> tuple[Orders, bool]:
        """Answer one replica, in a thread of its own."""
        work = self._dispatcher.answer(replica, unpack_samples(report))
        return pack_work(work, self._tasks.eos), work.state is State.BOUNDARY

    def _serve_until(
        self, is_done: Callable[[], bool], what: str, between: Callable[[], None] | None = None
    ) -> None:
        """Serve until ``is_done``; call ``between`` after each turn.

        Raises:
            ChannelTimeout: no sample has arrived for ``fault.timeout_seconds``; says what lacks.
        """
        seconds, since = self._config.fault.timeout_seconds, time.monotonic()
        while not is_done():
            arrived = self._turn()
            if between is not None:
                between()
            if arrived:
                since = time.monotonic()
            elif time.monotonic() - since > seconds:
                raise ChannelTimeout(
                    f"step {self._version + 1} waits for {what}, and no sample has arrived for "
                    f"{seconds:g} s: {self._buffer.describe(self._version)}"
                )

    def _turn(self) -> bool:
        """Hand out what may be started, then score what has arrived, or wait for it a little.

        Returns:
            Whether samples had arrived.
        """
        if not self.stopping:
            for prompt_id in self._buffer.admit(self._generator_version):
                samples = range(self._config.rollout.n)
                self._dispatcher.submit(self._tasks.train(prompt_id, samples, {}))
        samples = self._dispatcher.take()
        if samples:
            self._score(samples)
        else:
            self._around.say(f"serving {self._around.num_replicas} replicas")
            self._dispatcher.wait(_LOOK_SECONDS)
            self._server.check()
        return bool(samples)

    def _score(self, samples: Sequence[Sample]) -> None:
        tasks = [self._tasks.finish(sample) for sample in samples]
        with self._tracer.span("reward"):
            pairs = [(task.prompt, sample) for task, sample in zip(tasks, samples, strict=True)]
            scores = self._scorer.score(pairs)
        for task, sample, score in zip(tasks, samples, scores, strict=True):
            if task.is_evaluation:
                self._tasks.note(task, sample, score)
            else:
                reward = self._scorer.penalised(score, sample)
                prompt_id = task.prompt.prompt_id
                if not self._buffer.put(prompt_id, task.sample_id, sample, reward):
                    self._tasks.forget(prompt_id)
        evaluation = self._tasks.take_evaluation()
        if evaluation is not None:
            self._report_evaluation(evaluation)

    def _expire(self) -> None:
        for group in self._buffer.expire(self._version, self._generator_version):
            self._dispatcher.cancel(self._tasks.forget(group.prompt_id))
            if group.again:
                samples = range(self._config.rollout.n)
                self._dispatcher.submit(self._tasks.train(group.prompt_id, samples, {}))

    def _make_batch(self) -> list[TrainBatch]:
        version = self._version
        groups = self._buffer.take(version)
        self._order.write(version + 1, groups)
        scored = scored_batch(groups, self._tasks.prompts(g.prompt_id for g in groups))
        if self._config.observe.record:
            made_under = recording.settings(self._config, self._spec.vocab_size)
            with self._tracer.span("record"):
                write_batch(self._config.folder, version + 1, scored, made_under)
        record = self._records.setdefault(version + 1, {})
        record.update(rollout_metrics(scored, version=version))
        record.update(self._buffer.take_metrics())
        record.update(self._scorer.take_metrics())
        record["perf/model_flops"] = training_flops(self._spec, scored.rollouts.lengths.tolist())
        return split_batch(scored, self._config)

    # --- Books ----------------------------------------------------------------------------------

    def _emit(self) -> None:
        for step in sorted(self._records):
            record = self._records[step]
            if "actor/loss" in record and "rollout/reward" in record:
                self._around.sink(step, self._finish(self._records.pop(step)))

    def record(self, step: int) -> dict[str, float]:
        """Return what is known of a step that was not emitted, for a check that ends before."""
        return dict(self._records.get(step, {}))

    def _finish(self, record: dict[str, float]) -> dict[str, float]:
        """Add what needs several executors' numbers."""
        seconds = record["timing_s/step"]
        record["perf/tokens_per_second"] = record["perf/total_tokens"] / seconds
        if peak := self._config.observe.peak_tflops * 1e12:
            busy = record["timing_s/update_actor"] * self._config.trainer.layout.world_size
            record["perf/mfu"] = record["perf/model_flops"] / (busy * peak)
        record["perf/tokens_per_second_per_gpu"] = (
            record["perf/tokens_per_second"] / self._config.num_engine_ranks
        )
        return record

    def _report_evaluation(self, found: Evaluation) -> None:
        version = self._version
        logger.info("version %d: held-out accuracy %.4f", version, found.metrics["val/accuracy"])
        self._around.sink(version, found.metrics)
        self._accuracies[version] = found.metrics["val/accuracy"]
        sample = {
            "version": version,
            "prompt": found.prompt.text,
            "greedy_response": self._scorer.text(found.greedy),
            "answer": found.prompt.answer,
            "reward": found.greedy_score,
        }
        with (self._config.folder / SAMPLES_FILE).open("a") as file:
            file.write(json.dumps(sample) + "\n")

    # --- Checkpoints ----------------------------------------------------------------------------

    def _saved_version(self) -> int:
        return self._version + (self._batch is not None)

    def _save_due(self) -> bool:
        version = self._saved_version()
        return checkpoint.save_due(self._config, version, self._last_saved, stopping=self.stopping)

    def save_checkpoint(self) -> None:
        """Complete the checkpoint that the trainer has written its part of."""
        if not self._save_due():
            return
        version, config = self._saved_version(), self._config
        with self._tracer.span("save_checkpoint"):
            finished = [
                (group.prompt_id, sample_id, sample, group.rewards[sample_id])
                for group in self._buffer.groups()
                for sample_id, sample in group.samples.items()
            ]
            partial = [
                (*self._tasks.place_of(request.request_id), sample)
                for request, sample in self._dispatcher.unfinished()
                if sample is not None and sample.tokens
            ]
            saved = SavedRollouts(state=self._buffer.state(), finished=finished, partial=partial)
            write_rollouts(checkpoint.begun_folder(config.folder, version), saved)
            state = RunState(
                step=version,
                consumed_prompts=version * config.data.train_batch_size,
                seed=config.seed,
                n=config.rollout.n,
            )
            folder = checkpoint.commit(config.folder, state)
            self._prune()
        self._last_saved = version
        logger.info("saved %s", folder)

    def _prune(self) -> None:
        kept = self._config.checkpoint
        if kept.keep_last:
            ranked = sorted(self._accuracies, key=self._accuracies.__getitem__, reverse=True)
            checkpoint.prune(self._config.folder, kept.keep_last, ranked[: kept.keep_best])

    def close(self) -> None:
        for resource in self._resources:
            resource.close()
