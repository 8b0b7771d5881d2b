"""The generator executor: one rank of one vLLM replica.

Consumes ``weights`` and ``control``; produces ``rollouts``, ``eval_rollouts`` and ``metrics``. In
tick t it samples batch t of the prompt stream: prompt i of a batch belongs to replica i mod R. All
ranks of a replica add the same requests in the same order.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint import StartPoint
from megarl.config import RunConfig
from megarl.contract import first_difference, poison, require_manifest
from megarl.data.prompts import Prompt, PromptDataset
from megarl.data.tokenizer import eos_id, load_model_tokenizer
from megarl.errors import ChannelError, WeightSyncError
from megarl.executors.base import Executor
from megarl.observe.trace import Tracer
from megarl.rollout.engine import Engine, Sample, SampleRequest
from megarl.topology import GENERATOR
from megarl.types import Control, Message, MetricValues, Rollouts
from megatron_bridge.spec import RankManifest

logger = logging.getLogger(__name__)

_EVAL_STREAM = 1 << 40  # keeps the sampling seeds of held-out prompts apart from training's


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Which replica this rank belongs to."""

    index: int
    count: int
    manifest: RankManifest  # what this rank of it must hold


def sampling_seed(seed: int, prompt_id: int, sample_id: int) -> int:
    """Return a 32-bit seed that depends on the run's seed, the prompt and the sample only."""
    return zlib.crc32(f"{seed}/{prompt_id}/{sample_id}".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How responses to prompts are sampled: number ``n`` of a prompt is its greedy one."""

    config: RunConfig
    n: int
    eos_token_id: int
    stream: int = 0  # shifts the seeds of one set of prompts away from another's

    def requests(
        self, prompts: Sequence[Prompt], pairs: Sequence[tuple[int, int]]
    ) -> list[SampleRequest]:
        """Return a request for each (prompt's index, sample), numbered index x (n + 1) + sample."""
        rollout = self.config.rollout
        return [
            SampleRequest(
                request_id=index * (self.n + 1) + sample,
                prompt=prompts[index].tokens,
                max_tokens=rollout.max_response_length,
                temperature=rollout.temperature if sample < self.n else 0.0,
                seed=sampling_seed(
                    self.config.seed, self.stream + prompts[index].prompt_id, sample
                ),
                eos_token_id=self.eos_token_id,
            )
            for index, sample in pairs
        ]


def sample_all(engine: Engine, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Decode until every request is finished.

    Raises:
        ChannelError: the engine returned another number of samples.
    """
    engine.add(requests)
    samples: list[Sample] = []
    while engine.has_unfinished():
        samples += engine.step()
    if len(samples) != len(requests):
        raise ChannelError(f"the engine lost samples: {len(samples)} of {len(requests)}")
    return samples


def to_rollouts(prompts: Sequence[Prompt], samples: Sequence[Sample], stride: int) -> Rollouts:
    """Return the samples as one message; request i is sample i mod stride of prompt i // stride."""
    ordered = sorted(samples, key=lambda sample: sample.request_id)
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    prompt_lengths, lengths = [], []
    for sample in ordered:
        prompt = prompts[sample.request_id // stride].tokens
        tokens += [*prompt, *sample.tokens]
        logprobs += [0.0] * len(prompt) + list(sample.logprobs)
        versions += [-1] * len(prompt) + [sample.version] * len(sample.tokens)
        prompt_lengths.append(len(prompt))
        lengths.append(len(prompt) + len(sample.tokens))
    ids = [
        (prompts[sample.request_id // stride].prompt_id, sample.request_id % stride)
        for sample in ordered
    ]
    return Rollouts(
        prompt_ids=torch.tensor([prompt_id for prompt_id, _ in ids], dtype=torch.int64),
        sample_ids=torch.tensor([sample_id for _, sample_id in ids], dtype=torch.int64),
        prompt_lengths=torch.tensor(prompt_lengths, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        finished=torch.tensor([int(sample.finished) for sample in ordered], dtype=torch.int64),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        versions=torch.tensor(versions, dtype=torch.int64),
    )


class GeneratorExecutor(Executor):
    """One generator rank; `make_engine` builds the engine once the executor world exists."""

    name = GENERATOR

    def __init__(
        self,
        config: RunConfig,
        start: StartPoint,
        replica: Replica,
        make_engine: Callable[[], Engine],
        tracer: Tracer,
    ):
        self._config, self._replica, self._tracer = config, replica, tracer
        self._make_engine = make_engine
        self._running: Engine | None = None
        self._start = start
        self._batch_index = start.step
        self.version = -1  # until the first weights have come
        self._received_bytes = 0
        self._evaluated = -1  # last version evaluated
        self._rollouts = to_rollouts((), (), 1)
        self._eval_rollouts = self._rollouts
        self._metrics: dict[str, float] = {}
        self._contract: dict[str, float] = {}  # metrics of the start, reported with the first step

    def init(self) -> None:
        config = self._config
        tokenizer = load_model_tokenizer(Path(config.model.path))
        self._eos = eos_id(tokenizer)
        self._train_prompts = PromptDataset(Path(config.data.train_path), tokenizer, config.data)
        self._eval_prompts = (
            PromptDataset(Path(config.data.eval_path), tokenizer, config.data)
            if config.data.eval_path
            else None
        )
        self._running = self._make_engine()  # last: data that cannot be used ends the run before
        live, dtype = self._running.parameters(), getattr(torch, config.generator_dtype)
        require_manifest(self._replica.manifest, live, dtype, self._running.transforms())
        poison(live)

    def set_step(self, step: int) -> None:
        self._batch_index = step

    def get_output(self, channel: str) -> Sequence[Message]:
        if channel == "rollouts":
            message, self._rollouts = self._rollouts, to_rollouts((), (), 1)
            return (message,)
        if channel == "eval_rollouts":
            message, self._eval_rollouts = self._eval_rollouts, to_rollouts((), (), 1)
            return (message,)
        metrics, self._metrics = self._metrics, {}
        return (MetricValues.from_dict(metrics),)

    def put_input(self, channel: str, messages: Sequence[Message]) -> None:
        (message,) = messages
        if not isinstance(message, Control):
            raise ChannelError(f"the generator takes no {type(message).__name__} ({channel!r})")
        self.stopping = bool(message.stop)

    def get_model(self) -> Mapping[str, Tensor]:
        return self._engine().parameters()

    def begin_update(self) -> None:
        """New weights arrive: nothing can be sampled until `commit_update`."""
        self._engine().poison()

    def commit_update(self, version: int, received_bytes: int) -> None:
        if self.version < 0:
            self._require_checkpoint()
        self._engine().commit(version)
        self.version = version
        self._received_bytes = received_bytes

    def _require_checkpoint(self) -> None:
        """Compare the first weights with the model folder, where they come from there.

        Raises:
            WeightSyncError: names the first element that differs; the engine stays poisoned.
        """
        live, manifest = self.get_model(), self._replica.manifest
        self._contract["contract/parameters"] = float(len(live))
        if self._start.trainer_folder is not None:
            return
        folder, dtype = Path(self._config.model.path), getattr(torch, self._config.model.dtype)
        with self._tracer.span("contract"):
            difference = first_difference(folder, manifest, live, dtype)
        if difference is not None:
            raise WeightSyncError(
                f"after the first transfer rank {manifest.rank} does not hold the "
                f"checkpoint: {difference}"
            )
        equal = sum(tensor.numel() * tensor.itemsize for tensor in live.values())
        self._contract["contract/equal_bytes"] = float(equal)
        logger.info("the first weights are those of %s: %d bytes, bit for bit", folder, equal)

    def step(self) -> None:
        """Evaluate where due, then sample this tick's batch; past the last batch do nothing."""
        config = self._config
        if self._eval_due():
            assert self._eval_prompts is not None
            self._evaluated = self.version
            prompts = self._mine(self._eval_prompts.all())
            with self._tracer.span("testing"):
                self._eval_rollouts = self._sample(
                    prompts,
                    config.eval.n,
                    _EVAL_STREAM + self.version * len(self._eval_prompts),
                    greedy=self._replica.index == 0,
                )
        if self._batch_index >= config.max_steps or self.stopping:
            self._tracer.drain()
            return
        data = config.data
        batch = self._train_prompts.batch(
            self._batch_index, data.train_batch_size, config.seed, data.shuffle
        )
        with self._tracer.span("gen"):
            self._rollouts = self._sample(self._mine(batch), config.rollout.n, 0, greedy=False)
        self._metrics = self._step_metrics() | self._contract
        self._contract = {}

    def _mine(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return list(prompts[self._replica.index :: self._replica.count])

    def _eval_due(self) -> bool:
        config = self._config
        if self._eval_prompts is None or self.version == self._evaluated:
            return False
        if self.version == self._start.step:
            return self._start.step == 0
        freq = config.eval.test_freq
        return self.version == config.max_steps or (freq > 0 and self.version % freq == 0)

    def _sample(self, prompts: Sequence[Prompt], n: int, stream: int, *, greedy: bool) -> Rollouts:
        """Sample n responses a prompt; with ``greedy``, one more, greedily, for the first prompt."""
        pairs = [(index, sample) for index in range(len(prompts)) for sample in range(n)]
        pairs += [(0, n)] if greedy and prompts else []
        sampling = Sampling(config=self._config, n=n, eos_token_id=self._eos, stream=stream)
        samples = sample_all(self._engine(), sampling.requests(prompts, pairs))
        return to_rollouts(prompts, samples, n + 1)

    def _step_metrics(self) -> dict[str, float]:
        times = self._tracer.drain()
        idle = times.pop("idle_ratio")
        tokens = float((self._rollouts.versions >= 0).sum())
        return {
            "step": float(self._batch_index + 1),
            "generator/idle_ratio": idle,
            "generator/tokens_per_second": tokens / max(times["timing_s/gen"], 1e-9),
            **{name.replace("timing_s/", "generator/timing_s/"): v for name, v in times.items()},
            "timing_s/gen": times["timing_s/gen"],
            "perf/weight_sync_bytes": float(self._received_bytes),
        }

    def _engine(self) -> Engine:
        assert self._running is not None, "init() builds the engine"
        return self._running

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
