"""Which model a Megatron checkpoint holds, from what lies in its folder.

Called by converters where their user does not say it. A ``config.json`` that travels with the
weights says most; without one Megatron-LM's arguments do, which its checkpoints keep.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.companions import CONFIG
from megatron_bridge.io.torch_archive import Inert, read_archive
from megatron_bridge.io.torch_dist import COMMON_NAME, checkpoint_folder
from megatron_bridge.models.families import load_spec
from megatron_bridge.models.from_arguments import spec_from_arguments
from megatron_bridge.spec import ModelSpec

_SHARD = "mp_rank_*/model*_rng.pt"


def config_folder(folder: Path) -> Path | None:
    """Return where the ``config.json`` of a Megatron checkpoint lies: in it, or in its parent."""
    inner = checkpoint_folder(folder)
    return next((at for at in (inner, folder) if (at / CONFIG).is_file()), None)


def stored_arguments(folder: Path) -> Mapping[str, Any] | None:
    """Return Megatron-LM's arguments as a checkpoint keeps them; None where it has none.

    Raises:
        ConversionError: the file that would hold them is truncated or no archive.
    """
    inner = checkpoint_folder(folder)
    files = [inner / COMMON_NAME, *sorted(inner.glob(_SHARD))]
    file = next((file for file in files if file.is_file()), None)
    found = None if file is None else read_archive(file)
    arguments = found.get("args") if isinstance(found, dict) else None
    if isinstance(arguments, Inert) and type(arguments).__name__ == Namespace.__name__:
        return arguments.state if isinstance(arguments.state, dict) else None
    return None


def megatron_spec(folder: Path) -> ModelSpec:
    """Return the sizes of the model that a Megatron checkpoint holds.

    Raises:
        ConversionError: nothing in the folder says them, or what says them is not supported.
    """
    at = config_folder(folder)
    if at is not None:
        return load_spec(at)
    arguments = stored_arguments(folder)
    if arguments is None:
        raise ConversionError(
            f"{folder} has neither {CONFIG} nor Megatron-LM's arguments: which model it holds must "
            "be said by the folder of its Hugging Face configuration"
        )
    try:
        return spec_from_arguments(arguments)
    except ConversionError as error:
        raise ConversionError(f"{folder}: {error}") from error
