"""The character tokenizer through the front door: loaded from a saved folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.data.starting_model import write_starting_model
from megarl.data.tokenizer import build_character_tokenizer, check_tokenizer, load_tokenizer
from megarl.errors import DataError


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    build_character_tokenizer().save_pretrained(tmp_path)
    return load_tokenizer(tmp_path)


def test_ids_are_those_of_the_specification(tokenizer: PreTrainedTokenizerBase) -> None:
    specials = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert specials == (0, 1, 2)
    assert tokenizer("0123456789+-=;#?")["input_ids"] == [1, *range(3, 19)]
    assert tokenizer("14+5=?")["input_ids"] == [1, 4, 7, 13, 8, 15, 18]
    assert tokenizer("#2", add_special_tokens=False)["input_ids"] == [17, 5]


def test_decoding_skips_specials_and_adds_no_spaces(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [*tokenizer("14+5=19;19-7=12#12")["input_ids"], 2, 0, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "14+5=19;19-7=12#12"
    assert tokenizer.decode([1, 17, 5, 2]) == "<bos>#2<eos>"


def test_an_unknown_character_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="UNK"):
        tokenizer("1+x=?")


def test_tokenizer_and_model_must_belong_together(tokenizer: PreTrainedTokenizerBase) -> None:
    check_tokenizer(tokenizer, 19)
    with pytest.raises(DataError, match=r"'\?' has id 18, but the model's vocabulary ends at 17"):
        check_tokenizer(tokenizer, 18)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no EOS token"):
        check_tokenizer(tokenizer, 32)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds none that can be loaded"):
        load_tokenizer(tmp_path)


def test_the_model_folder_serves_its_tokenizer_too(tmp_path: Path) -> None:
    write_starting_model(tmp_path / "model", seed=0)
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer("14+5=?")["input_ids"] == [1, 4, 7, 13, 8, 15, 18]
    check_tokenizer(tokenizer, 32)


def _name_class(folder: Path, name: str) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name}))


@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_what_is_loaded_is_what_transformers_chooses(tmp_path: Path, name: str) -> None:
    write_starting_model(tmp_path / "model", seed=0)
    _name_class(tmp_path / "model", name)
    found, expected = (
        load(tmp_path / "model") for load in (load_tokenizer, AutoTokenizer.from_pretrained)
    )
    assert type(found) is type(expected)
    assert found.get_vocab() == expected.get_vocab()
    assert found("14+5=?").data == expected("14+5=?").data
    assert found.special_tokens_map == expected.special_tokens_map


@pytest.mark.parametrize(("name", "searched"), [("TokenizersBackend", 0), ("LlamaTokenizer", 1)])
def test_only_a_class_that_must_be_found_is_searched_for(
    tmp_path: Path, name: str, searched: int
) -> None:
    build_character_tokenizer().save_pretrained(tmp_path)
    _name_class(tmp_path, name)
    code = (
        "import sys; from megarl.data.tokenizer import load_tokenizer; "
        f"load_tokenizer({str(tmp_path)!r}); sys.exit('torch._dynamo' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert process.returncode == searched
