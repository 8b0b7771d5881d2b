"""Demonstrations: the tokens to learn from and the mask of those that enter the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config import DataConfig
from megarl.data.demonstrations import DemonstrationDataset
from megarl.data.tokenizer import build_character_tokenizer
from megarl.errors import DataError


def _make_dataset(folder: Path, *rows: dict, max_prompt_length: int = 16) -> DemonstrationDataset:
    file = folder / "sft.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(max_prompt_length=max_prompt_length)
    return DemonstrationDataset(file, build_character_tokenizer(), config)


def test_the_loss_covers_response_and_eos(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=?", "response": "#2"}, {"prompt": "3=?", "response": "3#3"}]
    first, second, again = _make_dataset(tmp_path, *rows).batch(0, 3, seed=0, shuffle=False)
    assert first.tokens == (1, 4, 13, 4, 15, 18, 17, 5, 2)
    assert first.loss_mask == (0, 0, 0, 0, 0, 0, 1, 1, 1)
    assert second.tokens == (1, 6, 15, 18, 6, 17, 6, 2)
    assert second.loss_mask == (0, 0, 0, 0, 1, 1, 1, 1)
    assert again == first


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1=?"}, "sft.jsonl:2: no key 'response'"),
        ({"prompt": "1=?", "response": ""}, "sft.jsonl:2: 'response' must be a non-empty string"),
        ({"prompt": "1=?", "response": 1}, "'response' must be a non-empty string, got 1"),
        ({"prompt": "1" * 20, "response": "1"}, "the prompt has 21 tokens"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, row: dict, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        _make_dataset(tmp_path, {"prompt": "1=?", "response": "#1"}, row)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sft.jsonl").write_text('{"prompt": "1=?", "response": "#1"}\n')
    tokenizer = build_character_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no EOS"):
        DemonstrationDataset(tmp_path / "sft.jsonl", tokenizer, DataConfig())
