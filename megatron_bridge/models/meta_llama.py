"""The releases of Llama as Meta published them: ``params.json``, and what it leaves unsaid.

Called by `megatron_bridge.io.meta` and by what writes their Hugging Face folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bridge.errors import ConversionError
from megatron_bridge.models.arguments import LLAMA3_ROPE
from megatron_bridge.models.hf_config import hf_config
from megatron_bridge.spec import ModelSpec

_NEEDED = ("dim", "n_layers", "n_heads", "norm_eps")
_KNOWN = {*_NEEDED, "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier"}
_KNOWN |= {"rope_theta", "use_scaled_rope"}
_KNOWN |= {"max_batch_size", "max_seq_len"}  # of a program that runs the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a Llama is and its ``params.json`` does not say."""

    max_positions: int
    rope_factor: float | None = None  # None: rotary frequencies as they are
    tied: bool = False
    bos: int = 128000
    eos: int = 128001
    turn_ends: tuple[int, ...] = (128001, 128009)  # what ends an instruct model's answer, if else


_SENTENCEPIECE: dict[str, Any] = {"bos": 1, "eos": 2, "turn_ends": ()}
_SCALED: dict[str, Any] = {"max_positions": 131072, "turn_ends": (128001, 128008, 128009)}
RELEASES = {
    "1": Release(max_positions=2048, **_SENTENCEPIECE),
    "2": Release(max_positions=4096, **_SENTENCEPIECE),
    "code": Release(max_positions=16384, **_SENTENCEPIECE),
    "3": Release(max_positions=8192),
    "3.1": Release(rope_factor=8.0, **_SCALED),
    "3.2": Release(rope_factor=32.0, tied=True, **_SCALED),
    "3.3": Release(rope_factor=8.0, **_SCALED),
}


def find_release(name: str) -> Release:
    """Return a release by its name, a key of `RELEASES`.

    Raises:
        ConversionError: there is none of this name.
    """
    if name not in RELEASES:
        raise ConversionError(f"Llama {name!r} is unknown, expected one of {', '.join(RELEASES)}")
    return RELEASES[name]


def read_params(folder: Path) -> dict[str, Any]:
    """Return the parsed ``params.json``.

    Raises:
        ConversionError: missing, malformed, or a field that is not known.
    """
    file = folder / "params.json"
    try:
        params = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConversionError(f"{file} is not readable JSON: {error}") from error
    params = params.get("model", params) if isinstance(params, dict) else params
    if not isinstance(params, dict):
        raise ConversionError(f"{file} holds a {type(params).__name__}, expected an object")
    unknown = sorted(params.keys() - _KNOWN)
    if unknown:
        raise ConversionError(f"{file}: {unknown[0]} = {params[unknown[0]]!r} is not supported")
    for key in _NEEDED:
        if not isinstance(params.get(key), int | float) or params[key] <= 0:
            raise ConversionError(
                f"{file}: {key} is {params.get(key)!r}, expected a positive number"
            )
    return params


def _ffn_size(params: Mapping[str, Any]) -> int:
    """Return the size of the feed-forward layer, as the model's own code computes it."""
    multiple = params.get("multiple_of", 256)
    size = int((params.get("ffn_dim_multiplier") or 1) * int(8 * params["dim"] / 3))
    return -(-size // multiple) * multiple


def spec_from_params(params: Mapping[str, Any], release: Release, vocab_size: int) -> ModelSpec:
    """Return the sizes of a Llama.

    Args:
        vocab_size: of the stored embedding; the first releases' ``params.json`` says -1.

    Raises:
        ConversionError: the parameters contradict the release or the embedding.
    """
    scaled, rows = bool(params.get("use_scaled_rope")), params.get("vocab_size", -1)
    if scaled != (release.rope_factor is not None):
        raise ConversionError(
            f"params.json: use_scaled_rope = {scaled}, expected {not scaled} of this release"
        )
    if rows not in (-1, vocab_size):
        raise ConversionError(f"params.json: vocab_size = {rows}, but {vocab_size} are stored")
    scaling = LLAMA3_ROPE | {"factor": release.rope_factor} if release.rope_factor else {}
    heads = params["n_heads"]
    return ModelSpec(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=params["dim"],
        ffn_size=_ffn_size(params),
        num_layers=params["n_layers"],
        num_heads=heads,
        num_kv_heads=params.get("n_kv_heads") or heads,
        head_dim=params["dim"] // heads,
        norm_eps=params["norm_eps"],
        rope_theta=float(params.get("rope_theta", 10000.0)),
        max_positions=release.max_positions,
        tied_embeddings=release.tied,
        rope_scaling=tuple(sorted(scaling.items())),
    )


def release_config(
    spec: ModelSpec, release: Release, *, dtype: str, instruct: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``config.json`` and ``generation_config.json`` of a release's Hugging Face folder.

    Args:
        instruct: the model answers in turns, which other tokens than the text's end.
    """
    eos = list(release.turn_ends) if instruct and release.turn_ends else release.eos
    tokens = {"bos_token_id": release.bos, "eos_token_id": eos}
    return {**hf_config(spec, dtype), **tokens}, tokens
