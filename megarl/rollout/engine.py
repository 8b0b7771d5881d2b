"""What a generation engine is: requests in, samples out, one decoding step at a time.

The generator executor drives an `Engine` and the weight channel writes into its parameters; the
implementation on vLLM is `megarl.rollout.vllm_engine`. This file imports no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MIN_TEMPERATURE = 0.01  # vLLM silently raises a smaller one to this


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One response to sample; ``request_id`` is unique among the unfinished ones of an engine."""

    request_id: int
    prompt: tuple[int, ...]
    max_tokens: int  # of the whole response
    temperature: float  # 0 is greedy: for evaluation only, its log-probabilities are those of 1
    seed: int  # same seed, prompt and weights: same tokens, whatever else is in the batch
    eos_token_id: int
    # What the response has already, sampled earlier: the engine goes on behind it.
    generated: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        where = f"request {self.request_id}"
        if not self.prompt:
            raise ValueError(f"{where}: the prompt is empty, expected at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"{where}: max_tokens is {self.max_tokens}, expected at least 1")
        if self.temperature != 0 and not self.temperature >= MIN_TEMPERATURE:
            raise ValueError(
                f"{where}: temperature is {self.temperature}, "
                f"expected 0 (greedy) or at least {MIN_TEMPERATURE}"
            )
        _check_columns(where, self.generated, self.logprobs, self.versions)
        if len(self.generated) >= self.max_tokens or self.eos_token_id in self.generated:
            raise ValueError(
                f"{where}: {len(self.generated)} tokens are generated, expected an unfinished "
                f"response: fewer than max_tokens {self.max_tokens}, without EOS"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response, the EOS token included where it ended by itself; a row a token."""

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # at the sampling temperature
    versions: tuple[int, ...]  # policy version that sampled it
    finished: bool  # True: ended with EOS; False: cut at max_tokens, or not at its end yet

    def __post_init__(self) -> None:
        _check_columns(f"request {self.request_id}", self.tokens, self.logprobs, self.versions)


def _check_columns(
    where: str, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
) -> None:
    if not len(tokens) == len(logprobs) == len(versions):
        raise ValueError(
            f"{where}: {len(logprobs)} logprobs and {len(versions)} versions "
            f"for {len(tokens)} tokens, expected one each"
        )


class Engine(ABC):
    """A model that samples; every rank of a replica makes the same calls in the same order.

    Weights are written between steps, never beside them; unfinished requests go on under the
    new ones, with their KV cache kept or computed anew (`megarl.config.PartialKv`)::

        engine.poison()                    # step() and add() refuse from here on
        ...write into engine.parameters()  # in place
        engine.commit(version=7)           # tokens sampled from here on carry version 7
        engine.add(requests)
        while engine.num_unfinished:
            samples += engine.step()
    """

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """Return the live parameters by the engine's own names, to be written in place."""

    @abstractmethod
    def transforms(self) -> dict[str, str]:
        """Return layer -> what was made of its weights after loading, where they are not used as
        they lie: writing into its parameters is then not enough.
        """

    @abstractmethod
    def poison(self) -> None:
        """Declare that weights are being written: nothing is sampled until `commit`."""

    @abstractmethod
    def commit(self, version: int) -> None:
        """Declare the written weights complete: no request meets another's KV of the old ones.

        Raises:
            WeightSyncError: a cache could not be dropped.
        """

    @abstractmethod
    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests, new ones and ones to go on with.

        Raises:
            WeightSyncError: poisoned.
            ValueError: an id in use, a token outside the vocabulary, more tokens than fit.
        """

    @abstractmethod
    def step(self) -> list[Sample]:
        """Decode one token of each running request; return the samples that this finished.

        Raises:
            WeightSyncError: poisoned, or the weights gave a log-probability that is no number.
        """

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """How many queued and running requests have not been returned yet."""

    @property
    @abstractmethod
    def recomputed_tokens(self) -> int:
        """Tokens whose KV commits have dropped since the engine was built."""

    @abstractmethod
    def unfinished(self) -> list[Sample]:
        """Return what each unfinished request has so far, by request id; disturb nothing.

        Raises:
            WeightSyncError: the weights gave a log-probability that is no number.
        """

    @abstractmethod
    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop these unfinished requests.

        Raises:
            ValueError: an id that no unfinished request has; none is dropped.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Give the KV cache's memory back until the next `commit`; nothing is sampled meanwhile.

        Unfinished requests stay; their prefixes are computed anew.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the engine; torch's default process group stays. A second call does nothing."""


def sample_all(engine: Engine, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Decode until every request is finished; return the samples by request id."""
    engine.add(requests)
    samples: list[Sample] = []
    while engine.num_unfinished:
        samples += engine.step()
    return sorted(samples, key=lambda sample: sample.request_id)
