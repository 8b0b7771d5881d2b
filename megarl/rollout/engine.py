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
    max_tokens: int
    temperature: float  # 0 is greedy: for evaluation only, its log-probabilities are those of 1
    seed: int  # same seed, prompt and weights: same tokens, whatever else is in the batch
    eos_token_id: int

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled response, the EOS token included where it ended by itself."""

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # log-probability of each token at the sampling temperature
    finished: bool  # True: ended with EOS; False: cut at max_tokens
    version: int  # policy version that sampled it

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"request {self.request_id}: {len(self.logprobs)} logprobs "
                f"for {len(self.tokens)} tokens, expected one each"
            )


class Engine(ABC):
    """A model that samples; every rank of a replica makes the same calls in the same order.

    Weights are written between samples, never beside them::

        engine.poison()                    # step() and add() refuse from here on
        ...write into engine.parameters()  # in place
        engine.commit(version=7)           # caches dropped; samples carry version 7
        engine.add(requests)
        while engine.has_unfinished():
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
        """Declare the written weights complete: drop what was computed with the old ones.

        Raises:
            WeightSyncError: requests are unfinished, or a cache could not be dropped.
        """

    @abstractmethod
    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests.

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

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Return whether a queued or running request has not been returned yet."""

    @abstractmethod
    def abort_all(self) -> None:
        """Drop every unfinished request."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine; torch's default process group stays. A second call does nothing."""
