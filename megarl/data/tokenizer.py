"""Tokenizers: loading and checking any, building the one of the built-in task.

Called by the executors (loading, checking) and by `megarl.data.starting_model` (building).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megarl.errors import DataError
from megatron_bridge.models.families import load_spec

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"  # ids 0, 1, 2
CHARACTERS = "0123456789+-=;#?"  # ids 3..18


def build_character_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the built-in task: one character, one token; BOS before, no EOS."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *CHARACTERS])}
    # A word-level model refuses an unknown character; a BPE model would drop it in silence.
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local Hugging Face folder.

    Raises:
        DataError: no such folder, or no tokenizer in it.
    """
    if not Path(path).is_dir():
        raise DataError(f"tokenizer: {path} is not a folder; expected a Hugging Face model folder")
    try:
        if _is_generic(Path(path)):
            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer: {path} holds none that can be loaded: {error}") from error


def _is_generic(folder: Path) -> bool:
    """Whether ``tokenizer.json`` says all of it: `AutoTokenizer`, which takes 3 s to import, would
    return the same.
    """
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return False
    said = json.loads(file.read_text(encoding="utf-8"))
    return said.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in said


def load_model_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder and check that the two belong together.

    Raises:
        DataError: as `load_tokenizer` and `check_tokenizer`.
    """
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, load_spec(folder).vocab_size)
    return tokenizer


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that ends a response; `check_tokenizer` has seen that there is one."""
    assert isinstance(tokenizer.eos_token_id, int)
    return tokenizer.eos_token_id


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Return the text of ``tokens`` without special tokens."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Check that a model of `vocab_size` can read and end every sequence of `tokenizer`.

    Raises:
        DataError: an id beyond the vocabulary, or no EOS token.
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise DataError(
            f"tokenizer {tokenizer.name_or_path}: token {token!r} has id {largest}, but the model's "
            f"vocabulary ends at {vocab_size - 1}; tokenizer and model do not belong together"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path} has no EOS token; expected one, since responses "
            "end with it"
        )
