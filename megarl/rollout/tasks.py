"""What each request of the replicas is for: sample s of prompt p, to train on or to evaluate.

Held by the reward executor. Owns prompts, request ids and sampling seeds, and an evaluation's
results until it is complete.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from megarl.config import RunConfig
from megarl.data.prompts import Prompt, PromptDataset
from megarl.data.tokenizer import eos_id
from megarl.errors import ChannelError
from megarl.rollout.engine import Sample, SampleRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EVAL_STREAM = 1 << 40  # keeps the sampling seeds of held-out prompts apart from training's


def sampling_seed(seed: int, prompt_id: int, sample_id: int) -> int:
    """Return a 32-bit seed that depends on the run's seed, the prompt and the sample only."""
    return zlib.crc32(f"{seed}/{prompt_id}/{sample_id}".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One response that was asked for."""

    prompt: Prompt
    sample_id: int
    is_evaluation: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found, and the greedy answer to its first prompt, for a person to read."""

    metrics: dict[str, float]
    prompt: Prompt
    greedy: Sample
    greedy_score: float


class TaskBook:
    """Open tasks by request id; requests are numbered from 0 in the order they are made."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase):
        """Open the data.

        Raises:
            DataError: names file, line, key, what was got and what was expected.
        """
        self._config = config
        self.eos = eos_id(tokenizer)
        data = config.data
        self._train = PromptDataset(Path(data.train_path), tokenizer, data)
        self._eval = (
            PromptDataset(Path(data.eval_path), tokenizer, data) if data.eval_path else None
        )
        self._open: dict[int, Task] = {}
        self._prompts: dict[int, Prompt] = {}  # of the training groups in flight
        self._next_id = 0
        self._results: list[tuple[Task, Sample, float]] = []
        self._num_expected = 0  # results of the evaluation in flight

    # --- Training -------------------------------------------------------------------------------

    def train(
        self,
        prompt_id: int,
        sample_ids: Iterable[int],
        partial: Mapping[tuple[int, int], Sample],
    ) -> list[SampleRequest]:
        """Return requests for samples of a training prompt, going on from what ``partial`` has."""
        config = self._config
        if prompt_id not in self._prompts:
            (prompt,) = self._train.batch(prompt_id, 1, config.seed, config.data.shuffle)
            self._prompts[prompt_id] = prompt
        prompt = self._prompts[prompt_id]
        return [
            self._request(
                Task(prompt=prompt, sample_id=sample_id, is_evaluation=False),
                sampling_seed(config.seed, prompt_id, sample_id),
                config.rollout.temperature,
                partial.get((prompt_id, sample_id)),
            )
            for sample_id in sample_ids
        ]

    def _request(
        self, task: Task, seed: int, temperature: float, begun: Sample | None = None
    ) -> SampleRequest:
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._open[request_id] = task
        return SampleRequest(
            request_id=request_id,
            prompt=task.prompt.tokens,
            max_tokens=self._config.rollout.max_response_length,
            temperature=temperature,
            seed=seed,
            eos_token_id=self.eos,
            generated=begun.tokens if begun else (),
            logprobs=begun.logprobs if begun else (),
            versions=begun.versions if begun else (),
        )

    def prompts(self, prompt_ids: Iterable[int]) -> dict[int, Prompt]:
        """Return prompts of groups that are complete and forget them."""
        return {prompt_id: self._prompts.pop(prompt_id) for prompt_id in prompt_ids}

    def finish(self, sample: Sample) -> Task:
        """Return what a finished sample is and close its task."""
        return self._open.pop(sample.request_id)

    def forget(self, prompt_id: int) -> list[int]:
        """Close a training prompt's open tasks; return their request ids."""
        self._prompts.pop(prompt_id, None)
        mine = [
            request_id
            for request_id, task in self._open.items()
            if not task.is_evaluation and task.prompt.prompt_id == prompt_id
        ]
        for request_id in mine:
            del self._open[request_id]
        return mine

    def place_of(self, request_id: int) -> tuple[int, int]:
        """Return (prompt, sample) of an open training task."""
        task = self._open[request_id]
        if task.is_evaluation:
            raise ChannelError(f"request {request_id} of an evaluation is open at a checkpoint")
        return task.prompt.prompt_id, task.sample_id

    # --- Evaluation -----------------------------------------------------------------------------

    def evaluation_due(self, version: int, known: Collection[int]) -> bool:
        """Whether ``version`` is to be evaluated: the first, the last and each test_freq-th, where
        its result is not ``known``.
        """
        if self._eval is None or version in known:
            return False
        freq = self._config.eval.test_freq
        return version in (0, self._config.max_steps) or (freq > 0 and version % freq == 0)

    def evaluation(self, version: int) -> list[list[SampleRequest]]:
        """Return the requests of an evaluation, by prompt: n samples each, and one greedy one."""
        assert self._eval is not None
        config, n = self._config, self._config.eval.n
        stream = _EVAL_STREAM + version * len(self._eval)
        groups = [
            [
                self._request(
                    Task(prompt=prompt, sample_id=sample_id, is_evaluation=True),
                    sampling_seed(config.seed, stream + prompt.prompt_id, sample_id),
                    config.rollout.temperature if sample_id < n else 0.0,
                )
                for sample_id in range(n + (index == 0))
            ]
            for index, prompt in enumerate(self._eval.all())
        ]
        self._num_expected = sum(map(len, groups))
        return groups

    @property
    def evaluating(self) -> bool:
        """Whether results of an evaluation are missing."""
        return self._num_expected > 0

    def note(self, task: Task, sample: Sample, score: float) -> None:
        """Keep one result of the evaluation in flight."""
        self._results.append((task, sample, score))

    def take_evaluation(self) -> Evaluation | None:
        """Return a complete evaluation, once; else None."""
        if not self._num_expected or len(self._results) < self._num_expected:
            return None
        results, self._results, self._num_expected = self._results, [], 0
        n = self._config.eval.n
        sampled = [(sample, score) for task, sample, score in results if task.sample_id < n]
        ((task, greedy, score),) = (each for each in results if each[0].sample_id == n)
        metrics = {
            "val/accuracy": fmean(score for _, score in sampled),
            "val/response_length_mean": fmean(len(sample.tokens) for sample, _ in sampled),
        }
        return Evaluation(metrics=metrics, prompt=task.prompt, greedy=greedy, greedy_score=score)
