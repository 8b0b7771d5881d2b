"""Which format a checkpoint has, and of which dtypes its tensors are. Called by converters."""

from __future__ import annotations

from pathlib import Path

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.hf import INDEX_NAME, SINGLE_NAME
from megatron_bridge.io.hf_store import hf_spec, open_hf
from megatron_bridge.io.mp_rank import is_mp_rank, open_mp_rank
from megatron_bridge.io.store import Stored
from megatron_bridge.io.torch_dist import CONFIG_NAME, checkpoint_folder, open_torch_dist
from megatron_bridge.spec import ModelSpec


def format_of(folder: Path) -> str:
    """Return "hf", "torch_dist" or "mp_rank".

    Raises:
        ConversionError: the folder does not exist or has none of these formats.
    """
    if not folder.is_dir():
        raise ConversionError(f"checkpoint folder {folder} does not exist")
    inner = checkpoint_folder(folder)
    if (inner / CONFIG_NAME).is_file():
        return "torch_dist"
    if is_mp_rank(inner):
        return "mp_rank"
    if (folder / INDEX_NAME).is_file() or (folder / SINGLE_NAME).is_file():
        return "hf"
    raise ConversionError(
        f"{folder} is no checkpoint: expected {INDEX_NAME} or {SINGLE_NAME} (Hugging Face), "
        f"{CONFIG_NAME} (torch_dist) or folders mp_rank_00 (Megatron)"
    )


def open_checkpoint(folder: Path, spec: ModelSpec | None = None, *, mtp: bool = True) -> Stored:
    """Describe a checkpoint of any format; reads no tensor.

    Args:
        spec: of the model; None where the folder has a ``config.json``. Hugging Face's always has.
        mtp: False leaves layers that predict further tokens out.

    Raises:
        ConversionError: no such checkpoint, or not one of this model.
    """
    match format_of(folder):
        case "hf":
            return open_hf(folder, mtp=mtp)
        case "torch_dist":
            return open_torch_dist(folder, spec or hf_spec(folder), mtp=mtp)
        case _:
            return open_mp_rank(folder, spec or hf_spec(folder), mtp=mtp)


def stored_dtypes(stored: Stored) -> dict[str, str]:
    """Return the dtype of each canonical tensor; of one that lies in several parameters, the first's."""
    dtypes: dict[str, str] = {}
    for block in stored.side.blocks:
        for variant in range(len(block.variants)):
            for param in block.expand(variant):
                for shard in param.shards:
                    dtypes.setdefault(shard.tensor, param.dtype or stored.side.dtype)
    return dtypes
