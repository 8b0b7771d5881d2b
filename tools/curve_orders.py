"""The reward rank of a measurement of curves: what the generators are to sample, and when a phase ends.

Held by `tools.curve_rank`, whose other ranks are served as in a run. Makes of the run's first prompts the
batches on which its trainer is then measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import torch

from megarl.channels.requests import RequestServer
from megarl.data.prompts import Prompt
from megarl.data.tokenizer import load_model_tokenizer
from megarl.rollout.batch import scored_batch, split_batch
from megarl.rollout.buffer import Group
from megarl.rollout.dispatch import Dispatcher
from megarl.rollout.engine import Sample, SampleRequest
from megarl.rollout.messages import State, pack_work, unpack_samples
from megarl.rollout.scoring import Scorer
from megarl.rollout.tasks import TaskBook
from megarl.topology import GENERATOR
from megarl.types import Orders, Report
from megarl.wiring import Rank

BATCHES_FILE = "batches.pt"
_LOOK_SECONDS = 0.01
_NO_TOKEN = 1 << 30  # ends no response


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured, the same on every rank."""

    folder: Path
    seconds: float  # of each phase, at least one round of its cases
    batches: int  # whose prompts are sampled first
    tokens: int  # of a decoding case


class Orderer:
    """The reward rank: hands out requests, scores the first responses, makes batches of them."""

    def __init__(self, rank: Rank, plan: Plan):
        config = rank.config
        tokenizer = load_model_tokenizer(Path(config.model.path))
        self._config, self._plan = config, plan
        self._tasks, self._scorer = TaskBook(config, tokenizer), Scorer(config, tokenizer)
        self._replicas = len(rank.world.topology.place(GENERATOR).groups)
        self._dispatcher = Dispatcher(self._replicas, config.generator.max_running_sequences)
        self._server = RequestServer(rank.world, self._answer)
        self._eos = self._tasks.eos
        self._next_id = 0
        self._samples: list[Sample] = []  # of the first prompts, when they were last sampled
        self._prompts: dict[int, Prompt] = {}

    def _answer(self, replica: int, report: Report) -> tuple[Orders, bool]:
        work = self._dispatcher.answer(replica, unpack_samples(report))
        return pack_work(work, self._eos), work.state is State.BOUNDARY

    def _serve(
        self,
        rounds: Iterator[list[list[SampleRequest]]],
        on_arrival: Callable[[list[Sample]], None],
    ) -> list[Sample]:
        """Have one round after another sampled to its end."""
        self._dispatcher.open()
        self._server.open()
        samples: list[Sample] = []
        for groups in rounds:
            for group in groups:
                self._dispatcher.submit(group)
            while self._dispatcher.outstanding:
                self._dispatcher.wait(_LOOK_SECONDS)
                self._server.check()
                arrived = self._dispatcher.take()
                if arrived:
                    on_arrival(arrived)
                samples += arrived
        self._dispatcher.close(hand_over=False)
        self._server.close()
        return samples + self._dispatcher.take()

    def sample(self, is_enough: Callable[[], bool]) -> int:
        """Have the run's first prompts sampled and scored as in a run, again until it is enough;
        return how often.
        """
        size, n = self._plan.batches * self._config.data.train_batch_size, self._config.rollout.n
        rounds: list[int] = []  # the first request of each

        def requests() -> Iterator[list[list[SampleRequest]]]:
            while not rounds or not is_enough():
                groups = [self._tasks.train(prompt, range(n), {}) for prompt in range(size)]
                self._prompts = self._tasks.prompts(range(size))
                rounds.append(groups[0][0].request_id)
                yield groups

        def score(some: list[Sample]) -> None:
            prompts = [self._prompts[(s.request_id - rounds[-1]) // n] for s in some]
            self._scorer.score(list(zip(prompts, some, strict=True)))

        found = self._serve(requests(), score)
        self._samples = sorted(found, key=lambda s: s.request_id)[-size * n :]
        return len(rounds)

    def describe(self) -> dict:
        """Write batches to train on, of what was sampled; return what was found."""
        config, size = self._config, self._config.data.train_batch_size
        samples, prompts, n = self._samples, self._prompts, self._config.rollout.n
        pairs = [(prompts[i // n], sample) for i, sample in enumerate(samples)]
        self._scorer.score(pairs[:1])  # its process has started
        began = time.monotonic()
        scores = self._scorer.score(pairs)
        reward_seconds = (time.monotonic() - began) / len(pairs)
        groups = [
            Group(
                prompt_id=prompt,
                admitted=0,
                skippable=False,
                samples=dict(enumerate(samples[prompt * n : (prompt + 1) * n])),
                rewards=dict(enumerate(scores[prompt * n : (prompt + 1) * n])),
            )
            for prompt in range(size)
        ]
        by_length = sorted(
            groups, key=lambda group: sum(len(s.tokens) for s in group.samples.values())
        )
        least = max(1, config.trainer.layout.dp // n)
        sizes = [count for count in (size // 8, size // 4, size // 2) if count >= least]
        chosen = [groups[:count] for count in sizes] + [by_length[: size // 2]]
        chosen += [by_length[size // 2 :], groups]
        batches = []
        for some in filter(None, chosen):
            scored = scored_batch(
                some, {group.prompt_id: prompts[group.prompt_id] for group in some}
            )
            batches.append((scored.rollouts.lengths.tolist(), split_batch(scored, config)))
        torch.save(batches, self._plan.folder / BATCHES_FILE)
        mean = sum(len(prompt.tokens) for prompt in prompts.values()) / len(prompts)
        return {
            "lengths": [len(sample.tokens) for sample in samples],
            "prompt_length": mean,
            "reward_sample_seconds": reward_seconds,
        }

    def decode(self, seconds: float) -> None:
        """Have more and more sequences of equal length decoded at a time, at each replica."""
        self._eos = _NO_TOKEN
        self._serve(self._rounds(seconds), lambda samples: None)
        self._eos = self._tasks.eos

    def _rounds(self, seconds: float) -> Iterator[list[list[SampleRequest]]]:
        slots = self._config.generator.max_running_sequences
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size < slots]
        began = time.monotonic()
        for index, size in enumerate(cycle([*sizes, slots])):
            if index > len(sizes) and time.monotonic() - began > seconds:
                return
            yield [self._equal(size) for _ in range(self._replicas)]

    def _equal(self, size: int) -> list[SampleRequest]:
        """Return requests of the run's prompts, of which each has its number of samples."""
        config, requests = self._config, []
        tokens = min(self._plan.tokens, config.rollout.max_response_length)
        while len(requests) < size:
            prompt = 1_000_000 + self._next_id // config.rollout.n
            self._next_id += config.rollout.n
            requests += self._tasks.train(prompt, range(config.rollout.n), {})
            self._tasks.forget(prompt)
        return [replace(r, max_tokens=tokens, eos_token_id=_NO_TOKEN) for r in requests[:size]]

    def close(self) -> None:
        self._scorer.close()
