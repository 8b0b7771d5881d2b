"""What travels with weights: configuration, tokenizer, chat template.

Called by converters, which write these files last. A ``config.json`` that lies beside the source is
kept as it is but for what the conversion changed; where there is none, the sizes make one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_bridge.errors import ConversionError
from megatron_bridge.models.families import spec_from_hf
from megatron_bridge.models.hf_config import differing_field, hf_config
from megatron_bridge.models.meta_llama import find_release, release_config
from megatron_bridge.operations import BLOCK
from megatron_bridge.spec import ModelSpec

CONFIG = "config.json"
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_OF_WEIGHTS = (".index.json", "metadata.json", "conversion_manifest.json", "iteration.txt")
_QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def travels(path: Path) -> bool:
    """Return whether a file beside weights goes where they go."""
    return path.suffix in _SUFFIXES and not path.name.endswith(_OF_WEIGHTS)


def companions(
    folder: Path, spec: ModelSpec, *, dtype: str, quantized: bool = False
) -> dict[str, bytes]:
    """Return the files beside the weights of a Hugging Face folder, by name.

    Args:
        folder: where they lie; it need not have any.
        spec: of the model that is written, without the layers that are left out.
        dtype: of the weights, or of those that are not quantized.
        quantized: weights are FP8 in blocks, scales beside them.

    Raises:
        ConversionError: the folder's ``config.json`` describes another model.
    """
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if travels(path)}
    if CONFIG not in found:
        config = hf_config(spec, dtype)
        if quantized:
            config["quantization_config"] = _QUANTIZED
        return {**found, CONFIG: _json(config)}
    config = json.loads(found[CONFIG])
    changed = _changed(config, spec, dtype, quantized)
    _check(folder, changed, spec)
    return found if changed == config else {**found, CONFIG: _json(changed)}


def meta_companions(
    folder: Path, spec: ModelSpec, *, release: str, dtype: str, instruct: bool = False
) -> dict[str, bytes]:
    """Return the same for an original Llama; its tokenizer stays in the format it has.

    Args:
        release: a key of `meta_llama.RELEASES`.
        instruct: the model answers in turns.
    """
    made = release_config(spec, find_release(release), dtype=dtype, instruct=instruct)
    names = (CONFIG, "generation_config.json")
    files = {name: _json(content) for name, content in zip(names, made, strict=True)}
    for path in (folder / "tokenizer.model", folder.parent / "tokenizer.model"):
        if path.is_file():  # the first releases share one among their sizes
            return {**files, path.name: path.read_bytes()}
    return files


def _json(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2) + "\n").encode()


def _changed(
    config: Mapping[str, Any], spec: ModelSpec, dtype: str, quantized: bool
) -> dict[str, Any]:
    """Return the configuration of the weights that are written."""
    changed = dict(config)
    changed["dtype" if "dtype" in config else "torch_dtype"] = dtype
    if config.get("num_nextn_predict_layers"):
        changed["num_nextn_predict_layers"] = spec.num_mtp_layers
    if quantized and "quantization_config" not in config:
        changed["quantization_config"] = _QUANTIZED
    if not quantized:
        changed.pop("quantization_config", None)
    return changed


def _check(folder: Path, config: Mapping[str, Any], spec: ModelSpec) -> None:
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    beside = spec_from_hf(plain)
    name = differing_field(beside, spec)
    if name:
        raise ConversionError(
            f"{folder / CONFIG} does not describe the weights beside it: {name} is "
            f"{getattr(beside, name)!r}, expected {getattr(spec, name)!r}"
        )
