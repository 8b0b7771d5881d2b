"""Rows of jsonl and parquet files, their texts, and the endless stream of their order.

Shared by `prompts` and `demonstrations`. Every error names file and line (parquet: row).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import DataError

if TYPE_CHECKING:
    # Only for annotations: importing transformers takes seconds, and `megarl.check` reads rows.
    from transformers import PreTrainedTokenizerBase

ENCODED_AT_ONCE = 4096  # texts whose tokens are in memory together while lengths are checked


@dataclass(frozen=True, slots=True)
class Row:
    """One row with its place, which opens every message about it."""

    place: str  # file:line
    values: dict[str, object]

    def get(self, key: str) -> object:
        if key not in self.values:
            raise DataError(f"{self.place}: no key {key!r}, only {sorted(self.values)}")
        return self.values[key]

    def error(self, key: str, expected: str) -> DataError:
        got = self.values.get(key)
        return DataError(f"{self.place}: {key!r} must be {expected}, got {shorten(got)}")


def shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_rows(path: str | Path) -> list[Row]:
    """Read a .jsonl or .parquet file.

    Raises:
        DataError: missing or empty file, other suffix, a line that is no JSON object, no pyarrow.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"data file {file} does not exist")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise DataError(f"data file {file}: expected {' or '.join(readers)}, got {file.suffix!r}")
    rows = readers[file.suffix](file)
    if not rows:
        raise DataError(f"data file {file} has no rows")
    return rows


def _read_jsonl(file: Path) -> list[Row]:
    rows = []
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                values = json.loads(line.decode())
            except ValueError as error:
                raise DataError(f"{place}: not JSON: {error}") from error
            if not isinstance(values, dict):
                raise DataError(f"{place}: expected a JSON object, got {shorten(values)}")
            rows.append(Row(place, values))
    return rows


def _read_parquet(file: Path) -> list[Row]:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"data file {file}: parquet needs the package pyarrow; or use jsonl")
    table = importlib.import_module("pyarrow.parquet").read_table(file)
    return [Row(f"{file}:{n}", values) for n, values in enumerate(table.to_pylist(), start=1)]


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as one text; `templated` says that the text already holds the special tokens."""

    text: str
    templated: bool


def prompt_text(row: Row, key: str, tokenizer: PreTrainedTokenizerBase) -> PromptText:
    """Return the prompt of a row: a string, or chat messages put through the chat template.

    Raises:
        DataError: empty, or neither a string nor a list of {"role": str, "content": str}.
    """
    prompt = row.get(key)
    if isinstance(prompt, str) and prompt:
        return PromptText(prompt, templated=False)
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise row.error(key, "a non-empty string or list of {'role': str, 'content': str}")
    if not tokenizer.chat_template:
        raise DataError(
            f"{row.place}: {key!r} is a list of chat messages, but tokenizer "
            f"{tokenizer.name_or_path} has no chat template"
        )
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return PromptText(text, templated=True)


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[PromptText]) -> list[list[int]]:
    """Return the tokens of each prompt, with special tokens where no template has put them."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for templated in (False, True):
        indices = [i for i, prompt in enumerate(prompts) if prompt.templated is templated]
        if indices:
            texts = [prompts[i].text for i in indices]
            encoded = tokenizer(
                texts, add_special_tokens=not templated, return_attention_mask=False
            )
            for index, ids in zip(indices, encoded["input_ids"], strict=True):
                tokens[index] = ids
    return tokens


def check_lengths(
    rows: Sequence[Row],
    prompts: Sequence[PromptText],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
) -> None:
    """Encode every prompt once, keeping none, and refuse one that is too long.

    Raises:
        DataError: names the row, its number of tokens and the limit.
    """
    for start in range(0, len(prompts), ENCODED_AT_ONCE):
        part = prompts[start : start + ENCODED_AT_ONCE]
        for row, ids in zip(rows[start:], encode(tokenizer, part), strict=False):
            if len(ids) > max_prompt_length:
                raise DataError(
                    f"{row.place}: the prompt has {len(ids)} tokens, more than "
                    f"data.max_prompt_length = {max_prompt_length}"
                )


def stream(num_rows: int, index: int, size: int, seed: int, shuffle: bool) -> list[tuple[int, int]]:
    """Return (position in the stream, row) of the `index`-th batch of `size`.

    The stream repeats all rows for ever, each epoch in an order of its own that depends on
    `(seed, epoch)` alone; a batch may span epochs. A pure function: resuming needs only the index.
    """
    batch = []
    for position in range(index * size, (index + 1) * size):
        epoch, offset = divmod(position, num_rows)
        row = _permutation(num_rows, seed, epoch)[offset] if shuffle else offset
        batch.append((position, row))
    return batch


@functools.lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
