"""The ``.metadata`` of a torch_dist checkpoint: which file holds which part of which tensor.

`torch_dist` reads and writes it. Reading runs no code of the pickle; writing makes the records of
torch.distributed.checkpoint, by whose names Megatron-Core's loader finds them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.torch_archive import Inert, InertUnpickler

METADATA_NAME = ".metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a tensor, or an object, as ``torch.save`` wrote it into part of a file."""

    offsets: tuple[int, ...]  # of the tensor's axes
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def read_metadata(folder: Path) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return the tensors of a checkpoint, and the names of its objects.

    Raises:
        ConversionError: the file is missing, or is no such metadata.
    """
    path = folder / METADATA_NAME
    if not path.is_file():
        raise ConversionError(f"{folder} has no {METADATA_NAME}: it is no complete checkpoint")
    try:
        state: Any = InertUnpickler(io.BytesIO(path.read_bytes())).load().state
        kinds, places = state["state_dict_metadata"], state["storage_data"]
        where = {(i.state["fqn"], i.state.get("offset")): p.state for i, p in places.items()}
        tensors, objects = {}, []
        for name, kind in kinds.items():
            if type(kind).__name__ == TensorStorageMetadata.__name__:
                tensors[name] = _entry(name, kind.state, where)
            else:
                objects.append(name)
    except (pickle.UnpicklingError, EOFError, KeyError, AttributeError, TypeError) as error:
        raise ConversionError(f"{path} is not the metadata of a checkpoint: {error!r}") from error
    return tensors, tuple(objects)


def _entry(name: str, state: dict[str, Any], where: dict[Any, dict[str, Any]]) -> Entry:
    pieces: list[Piece] = []
    for chunk in state["chunks"]:
        offsets, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        place = where[name, offsets]
        pieces.append(
            Piece(
                offsets=offsets,
                sizes=sizes,
                file=place["relative_path"],
                start=place["offset"],
                length=place["length"],
            )
        )
    properties: Inert = state["properties"]
    dtype: Any = properties.state
    return Entry(dtype=dtype[0], shape=tuple(state["size"]), pieces=tuple(pieces))


def metadata_bytes(tensors: dict[str, Entry], objects: Iterable[str], place: Piece) -> bytes:
    """Return the file of a checkpoint all whose objects are one and the same, at ``place``."""
    kinds: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, entry in tensors.items():
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(p.offsets), sizes=torch.Size(p.sizes))
            for p in entry.pieces
        ]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        kinds[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for index, piece in enumerate(entry.pieces):
            info = _StorageInfo(piece.file, piece.start, piece.length)
            places[MetadataIndex(name, piece.offsets, index)] = info
    for name in objects:
        kinds[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo(place.file, place.start, place.length)
    return pickle.dumps(Metadata(state_dict_metadata=kinds, storage_data=places), protocol=2)
