"""Prompt rows: what is accepted, what is refused and how, and the order of the stream."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from megarl.config import DataConfig
from megarl.data.arithmetic import write_dataset
from megarl.data.prompts import PromptDataset
from megarl.data.rows import stream
from megarl.data.tokenizer import build_character_tokenizer
from megarl.errors import DataError

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}#{% endif %}"
)


def _write(folder: Path, *rows: object) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return file


def _chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_strings_and_chats_become_prompts(tmp_path: Path) -> None:
    file = _write(
        tmp_path,
        {"prompt": "1+1=?", "answer": 2, "data_source": "sums", "extra_info": {"level": 1}},
        {"prompt": [{"role": "user", "content": "2"}], "answer": 2.5},
        "",
        {"prompt": "3=?", "answer": "3"},
    )
    dataset = PromptDataset(file, _chat_tokenizer(), DataConfig())
    assert len(dataset) == 3
    first, second, third = dataset.batch(0, 3, seed=0, shuffle=False)
    assert (first.prompt_id, first.tokens, first.text) == (0, (1, 4, 13, 4, 15, 18), "1+1=?")
    assert first.answer == "2"
    assert json.loads(first.extra) == {"level": 1, "data_source": "sums"}
    # the template wrote <bos> itself: it must not come twice
    assert (second.text, second.tokens) == ("<bos>2;#", (1, 5, 16, 17))
    assert (second.answer, second.extra) == ("2.5", "{}")
    assert (third.prompt_id, third.answer) == (2, "3")


def test_keys_are_configurable(tmp_path: Path) -> None:
    file = _write(tmp_path, {"question": "1=?", "label": "1"})
    config = DataConfig(prompt_key="question", answer_key="label")
    dataset = PromptDataset(file, build_character_tokenizer(), config)
    assert dataset.batch(0, 1, 0, False)[0].text == "1=?"


GOOD = {"prompt": "1=?", "answer": "1"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{", "rows.jsonl:2: not JSON"),
        ("[1]", r"rows.jsonl:2: expected a JSON object, got \[1\]"),
        ({"answer": "1"}, r"rows.jsonl:2: no key 'prompt', only \['answer'\]"),
        ({"prompt": "1=?"}, r"rows.jsonl:2: no key 'answer', only \['prompt'\]"),
        (GOOD | {"prompt": ""}, "rows.jsonl:2: 'prompt' must be a non-empty string or list"),
        (GOOD | {"prompt": 3}, "'prompt' must be .*, got 3"),
        (GOOD | {"prompt": []}, r"'prompt' must be .*, got \[\]"),
        (GOOD | {"prompt": [{"role": "user"}]}, "'prompt' must be .* 'content': str"),
        (GOOD | {"answer": None}, "rows.jsonl:2: 'answer' must be a string or a number, got None"),
        (GOOD | {"answer": True}, "'answer' must be a string or a number, got True"),
        (GOOD | {"extra_info": 1}, "'extra_info' must be an object, got 1"),
        (GOOD | {"data_source": 1}, "'data_source' must be a string, got 1"),
        (GOOD | {"prompt": "1" * 16}, "rows.jsonl:2: the prompt has 17 tokens, more than .* = 16"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, row: object, expected: str) -> None:
    config = DataConfig(max_prompt_length=16)
    with pytest.raises(DataError, match=expected):
        PromptDataset(_write(tmp_path, GOOD, row), _chat_tokenizer(), config)


def test_a_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    file = _write(tmp_path, GOOD | {"prompt": [{"role": "user", "content": "1"}]})
    with pytest.raises(DataError, match=r"rows.jsonl:1: .* has no chat template"):
        PromptDataset(file, build_character_tokenizer(), DataConfig())


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    tokenizer = build_character_tokenizer()
    for name, content, expected in (
        ("none.jsonl", None, "none.jsonl does not exist"),
        ("empty.jsonl", "\n", "empty.jsonl has no rows"),
        ("rows.csv", "a,b", "rows.csv: expected .jsonl or .parquet"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=expected):
            PromptDataset(tmp_path / name, tokenizer, DataConfig())


def test_parquet_is_read_where_pyarrow_is(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    if importlib.util.find_spec("pyarrow") is None:
        file.write_bytes(b"PAR1")
        with pytest.raises(DataError, match="needs the package pyarrow"):
            PromptDataset(file, build_character_tokenizer(), DataConfig())
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD, GOOD]), file)
    assert len(PromptDataset(file, build_character_tokenizer(), DataConfig())) == 2


@settings(deadline=None, max_examples=50)
@given(
    num_rows=st.integers(1, 20),
    size=st.integers(1, 50),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_the_stream_visits_every_row_once_an_epoch(
    num_rows: int, size: int, seed: int, shuffle: bool
) -> None:
    num_batches = -(-3 * num_rows // size)
    places = [
        place for i in range(num_batches) for place in stream(num_rows, i, size, seed, shuffle)
    ]
    assert [position for position, _ in places] == list(range(num_batches * size))
    rows = [row for _, row in places]
    for start in (0, num_rows, 2 * num_rows):
        assert sorted(rows[start : start + num_rows]) == list(range(num_rows))
    # batches of another size cut the same stream
    assert stream(num_rows, 0, num_batches * size, seed, shuffle) == places


def test_shuffling_depends_on_seed_and_epoch() -> None:
    rows = [row for _, row in stream(100, 0, 200, 0, True)]
    assert rows[:100] != list(range(100))
    assert rows[:100] != rows[100:]
    assert rows != [row for _, row in stream(100, 0, 200, 1, True)]
    assert [row for _, row in stream(3, 0, 7, 0, False)] == [0, 1, 2, 0, 1, 2, 0]


def test_twenty_thousand_rows_open_quickly(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", seed=0, num_train=20_000, sft_worked=0, sft_mixed=0)
    tokenizer = build_character_tokenizer()
    started = time.process_time()
    dataset = PromptDataset(tmp_path / "d" / "train.jsonl", tokenizer, DataConfig())
    assert time.process_time() - started < 5.0  # 0.9 s measured; room for a busy machine
    assert len(dataset) == 20_000
