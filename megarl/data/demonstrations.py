"""Demonstrations (prompt and response) of a file as a stream of batches; used by `megarl sft`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config import DataConfig
from megarl.data.rows import Row, check_lengths, encode, prompt_text, read_rows, stream
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One sequence to learn from: prompt, response and EOS."""

    tokens: tuple[int, ...]
    loss_mask: tuple[int, ...]  # 1 on the response and EOS


class DemonstrationDataset:
    """The rows of a file, all checked when it is opened; tokens are made batch by batch.

    A row holds a prompt (a string or chat messages) and a response (a string) under the keys of the
    config. Prompt and response are tokenised apart, as they are when a model samples.
    """

    def __init__(
        self, path: str | Path, tokenizer: PreTrainedTokenizerBase, config: DataConfig
    ) -> None:
        """Read and check every row.

        Raises:
            DataError: names file, line, key, what was got and what was expected.
        """
        rows = read_rows(path)
        eos = tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise DataError(f"tokenizer {tokenizer.name_or_path} has no EOS token to end responses")
        self._eos = eos
        self._tokenizer = tokenizer
        self._prompts = [prompt_text(row, config.prompt_key, tokenizer) for row in rows]
        self._responses = [_response(row, config.response_key) for row in rows]
        check_lengths(rows, self._prompts, tokenizer, config.max_prompt_length)

    def __len__(self) -> int:
        return len(self._prompts)

    def batch(self, index: int, size: int, seed: int, shuffle: bool) -> list[Demonstration]:
        """Return the `index`-th batch of the stream; a pure function of its arguments."""
        rows = [row for _, row in stream(len(self), index, size, seed, shuffle)]
        prompts = encode(self._tokenizer, [self._prompts[row] for row in rows])
        texts = [self._responses[row] for row in rows]
        responses = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            Demonstration(
                tokens=(*prompt, *response, self._eos),
                loss_mask=(0,) * len(prompt) + (1,) * (len(response) + 1),
            )
            for prompt, response in zip(prompts, responses, strict=True)
        ]


def _response(row: Row, key: str) -> str:
    response = row.get(key)
    if not isinstance(response, str) or not response:
        raise row.error(key, "a non-empty string")
    return response
