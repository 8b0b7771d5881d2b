"""Models as they were released: the files of ``configs/models`` and sizes without weights; no torch.

Called by who plans, without the model at hand, what its weights take: of transfers, conversions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_bridge.errors import ConversionError
from megatron_bridge.models.families import (
    canonical_tensors,
    load_spec,
    mtp_aliases,
    spec_from_hf,
)
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Released:
    """One file of ``configs/models``."""

    name: str
    parameters: int  # of the published checkpoint
    config: dict[str, Any] = field(default_factory=dict)  # what of its config.json is read
    layout: TrainerLayout = field(default_factory=TrainerLayout)  # trains it on GPUs of 80 GB

    @property
    def spec(self) -> ModelSpec:
        return spec_from_hf(self.config)


def load_released(path: Path) -> Released:
    """Read a file of ``configs/models``.

    Raises:
        ConversionError: missing or malformed file, an unknown key.
    """
    if not path.is_file():
        raise ConversionError(f"model file {path} does not exist")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Released), OmegaConf.load(path))
        released = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConversionError(f"model file {path}: {str(error).splitlines()[0]}") from error
    assert isinstance(released, Released)
    return released


def load_sizes(path: Path) -> ModelSpec:
    """Return the sizes that a Hugging Face folder, a ``config.json`` or a released model's file says.

    Raises:
        ConversionError: a file that is missing, malformed or unsupported.
    """
    if path.is_dir():
        return load_spec(path)
    if path.suffix in (".yaml", ".yml"):
        config: object = load_released(path).config
    else:
        try:
            config = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ConversionError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConversionError(f"{path} holds a {type(config).__name__}, expected an object")
    try:
        return spec_from_hf(config)
    except ConversionError as error:
        raise ConversionError(f"{path}: {error}") from error


def parameter_count(spec: ModelSpec) -> int:
    """Return the elements of a checkpoint as it is published, with what it holds twice."""
    shapes = {tensor.name: tensor.shape for tensor in canonical_tensors(spec)}
    copies = [shapes[name] for name in mtp_aliases(spec).values()]
    return sum(map(prod, [*shapes.values(), *copies]))
