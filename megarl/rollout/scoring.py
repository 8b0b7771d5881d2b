"""Scores of samples: from tokens to text to the reward function's processes.

Held by the reward executor, used by ``megarl eval``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.config import RunConfig
from megarl.data.prompts import Prompt
from megarl.data.tokenizer import decode
from megarl.rewards.pool import RewardItem, RewardPool
from megarl.rollout.batch import length_penalty
from megarl.rollout.engine import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_GIVE_UP_AFTER = 64  # failures one after another
_COUNTED: tuple[str, ...] = ("reward/timeouts", "reward/errors", "reward/crashes")


class Scorer:
    """The reward pool and what it counted since it was last asked."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase):
        self._config, self._tokenizer = config, tokenizer
        self._pool = RewardPool(
            config.reward.path,
            config.reward.num_processes,
            config.reward.timeout_seconds,
            give_up_after=min(_GIVE_UP_AFTER, config.data.train_batch_size * config.rollout.n),
        )
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def score(self, pairs: Sequence[tuple[Prompt, Sample]]) -> list[float]:
        """Return a reward for each pair."""
        result = self._pool.score(
            [
                RewardItem(
                    prompt=prompt.text,
                    response=self.text(sample),
                    answer=prompt.answer,
                    extra=prompt.extra,
                    finished=sample.finished,
                )
                for prompt, sample in pairs
            ]
        )
        for name, value in result.metrics.items():
            self._sums[name] += value if name in _COUNTED else value * len(pairs)
            self._counts[name] += len(pairs)
        return result.scores

    def penalised(self, score: float, sample: Sample) -> float:
        """Return the reward to learn from."""
        return score + length_penalty(len(sample.tokens), self._config)

    def text(self, sample: Sample) -> str:
        return decode(self._tokenizer, sample.tokens)

    def take_metrics(self) -> dict[str, float]:
        """Return ``reward/..`` since the last call: counts of failures, means of the rest."""
        found: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        for name, value in self._sums.items():
            found[name] = value if name in _COUNTED else value / self._counts[name]
        self._sums.clear()
        self._counts.clear()
        return found

    def close(self) -> None:
        self._pool.close()
