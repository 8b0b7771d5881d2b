"""Prompts of a file as an endless stream of batches; used by the generator and for evaluation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config import DataConfig
from megarl.data.rows import Row, check_lengths, encode, prompt_text, read_rows, stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the stream, ready to sample from and to score."""

    prompt_id: int  # position in the stream
    tokens: tuple[int, ...]
    text: str  # what was tokenised; of chat messages, the templated text
    answer: str
    extra: str  # a JSON object: the row's extra_info, and its data_source where it has one


class PromptDataset:
    """The rows of a file, all checked when it is opened; tokens are made batch by batch.

    A row holds a prompt (a string or chat messages) and an answer (a string or a number) under the
    keys of the config, and may hold `data_source` (a string) and `extra_info` (an object).
    """

    def __init__(
        self, path: str | Path, tokenizer: PreTrainedTokenizerBase, config: DataConfig
    ) -> None:
        """Read and check every row.

        Raises:
            DataError: names file, line, key, what was got and what was expected.
        """
        rows = read_rows(path)
        self._tokenizer = tokenizer
        self._prompts = [prompt_text(row, config.prompt_key, tokenizer) for row in rows]
        self._answers = [_answer(row, config.answer_key) for row in rows]
        self._extras = [_extra(row) for row in rows]
        check_lengths(rows, self._prompts, tokenizer, config.max_prompt_length)

    def __len__(self) -> int:
        return len(self._prompts)

    def all(self) -> list[Prompt]:
        """Return every row once, in the order of the file."""
        return self.batch(0, len(self), seed=0, shuffle=False)

    def batch(self, index: int, size: int, seed: int, shuffle: bool) -> list[Prompt]:
        """Return the `index`-th batch of the stream; a pure function of its arguments."""
        places = stream(len(self), index, size, seed, shuffle)
        tokens = encode(self._tokenizer, [self._prompts[row] for _, row in places])
        return [
            Prompt(
                prompt_id=position,
                tokens=tuple(ids),
                text=self._prompts[row].text,
                answer=self._answers[row],
                extra=self._extras[row],
            )
            for (position, row), ids in zip(places, tokens, strict=True)
        ]


def _answer(row: Row, key: str) -> str:
    answer = row.get(key)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise row.error(key, "a string or a number")
    return str(answer)


def _extra(row: Row) -> str:
    extra = row.values.get("extra_info")
    source = row.values.get("data_source")
    if not isinstance(extra, dict | None):
        raise row.error("extra_info", "an object")
    if not isinstance(source, str | None):
        raise row.error("data_source", "a string")
    return json.dumps((extra or {}) | ({"data_source": source} if source else {}))
