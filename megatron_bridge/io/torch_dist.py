"""Megatron-Core's distributed checkpoints (torch_dist) as stored checkpoints.

Called by `formats`. Every piece of a tensor is what ``torch.save`` made of it, one behind the other
in a few files; ``.metadata`` says which is where. `layouts.torch_dist` says what the tensors are.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

from megatron_bridge.box import Box
from megatron_bridge.errors import ConversionError
from megatron_bridge.io.dist_metadata import Entry, Piece, read_metadata
from megatron_bridge.io.store import Chunk, Place, Stored, StoredTensor
from megatron_bridge.io.torch_archive import read_archive
from megatron_bridge.layouts.torch_dist import (
    TorchDistLayout,
    key_of,
    shape_of,
    stacks_of,
    torch_dist_side,
)
from megatron_bridge.layouts.typed import typed
from megatron_bridge.operations import ITEMSIZE
from megatron_bridge.side import Side
from megatron_bridge.spec import ModelSpec

CONFIG_NAME = "metadata.json"  # its presence makes the folder a checkpoint for Megatron-Core
COMMON_NAME = "common.pt"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
TRAINER_NAME = "trainer"  # where a training run's own checkpoints keep theirs
_EMBEDDING = "embedding.word_embeddings.weight"
_NUMBER = re.compile(r"\d+")
_DROPPED = {  # by what a name holds
    "optimizer.": "state of the optimizer",
    "_extra_state": "state of low-precision kernels",
    "rng_state": "state of random number generators",
    "rerun_state_machine": "state of the training run",
}

_Tensors = dict[str, Entry]


def checkpoint_folder(folder: Path) -> Path:
    """Return the checkpoint that a folder is, that it holds, or that its tracker names as the latest.

    Raises:
        ConversionError: the tracker names none.
    """
    tracker = folder / TRACKER_NAME
    if (folder / TRAINER_NAME / CONFIG_NAME).is_file():
        return folder / TRAINER_NAME
    if (folder / CONFIG_NAME).is_file() or not tracker.is_file():
        return folder
    latest = tracker.read_text().strip()
    inner = folder / (f"iter_{int(latest):07d}" if latest.isdigit() else latest)
    if not inner.is_dir():
        raise ConversionError(f"{tracker} says {latest!r}, but {inner} does not exist")
    return inner


def open_torch_dist(folder: Path, spec: ModelSpec, *, mtp: bool = True) -> Stored:
    """Describe a distributed checkpoint of a model; reads no tensor.

    Args:
        mtp: False leaves layers that predict further tokens out.

    Raises:
        ConversionError: another format, a file or tensor that is missing, truncated, of another
            shape or unknown.
    """
    folder = checkpoint_folder(folder)
    _check_format(folder)
    tensors, objects = read_metadata(folder)
    prefix = _prefix(folder, tensors)
    spec = spec if mtp else spec.without_mtp()
    side = _side(folder, spec, tensors, prefix)
    wanted = _check_shapes(folder, side, tensors, prefix)
    repeated = _repeated(tensors, wanted)
    others = [name for name in tensors if name not in wanted and name not in repeated]
    others += dict.fromkeys(_NUMBER.sub("*", name) for name in objects)
    dropped = repeated | _dropped(folder, others, prefix, mtp)
    if (folder / COMMON_NAME).is_file():
        dropped[COMMON_NAME] = "settings and schedule of the training run"
    return Stored(
        folder=folder,
        format="torch_dist",
        spec=spec,
        side=typed(side, lambda _, param: tensors[prefix + key_of(param.name)[0]].dtype),
        chunks=_chunks(folder, side, tensors, prefix),
        tensors=tuple(
            StoredTensor(name=name, shape=entry.shape, dtype=entry.dtype)
            for name, entry in tensors.items()
            if name not in repeated
        ),
        dropped=dropped,
        layout="none: loads at any",
    )


def _check_format(folder: Path) -> None:
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConversionError(f"{folder} has no {CONFIG_NAME}: it is no distributed checkpoint")
    try:
        backend = json.loads(path.read_text()).get("sharded_backend")
    except (json.JSONDecodeError, AttributeError) as error:
        raise ConversionError(f"{path} is not an object in JSON: {error}") from error
    if backend != "torch_dist":
        raise ConversionError(f"{path}: sharded_backend {backend!r}, expected 'torch_dist'")


def _prefix(folder: Path, tensors: _Tensors) -> str:
    """Return what stands before the names of the model's tensors, such as "module."."""
    found = [name for name in tensors if name.endswith(_EMBEDDING) and "optimizer" not in name]
    if not found:
        raise ConversionError(f"{folder} has no {_EMBEDDING}: expected a GPT model")
    return min(found, key=len).removesuffix(_EMBEDDING)


def _side(folder: Path, spec: ModelSpec, tensors: _Tensors, prefix: str) -> Side:
    """Return the side in whose names the checkpoint is written."""
    rows = tensors[prefix + _EMBEDDING].shape[0]
    stacked = any(name.startswith(f"{prefix}decoder.layers.self_attention.") for name in tensors)
    sides: list[tuple[list[str], Side]] = []
    for local_spec in (False, True):
        layout = TorchDistLayout(stacked_layers=stacked, local_spec=local_spec, vocab_rows=rows)
        side = torch_dist_side(spec, layout)
        names = [prefix + key_of(param.name)[0] for param in side.manifest(0).params]
        sides.append(([name for name in names if name not in tensors], side))
    missing, side = min(sides, key=lambda item: len(item[0]))
    if missing:
        raise ConversionError(f"{folder} lacks {missing[0]}, which the model implies")
    return side


def _check_shapes(folder: Path, side: Side, tensors: _Tensors, prefix: str) -> set[str]:
    """Check the tensors of the model, whose names are returned."""
    names: set[str] = set()
    for key, stack in stacks_of(side).items():
        entry = tensors[prefix + key]
        if entry.shape != shape_of(stack) or entry.dtype not in ITEMSIZE:
            raise ConversionError(
                f"{prefix}{key} of {folder} is {entry.dtype} {entry.shape}, expected "
                f"{shape_of(stack)} of {', '.join(ITEMSIZE)}"
            )
        names.add(prefix + key)
    return names


def _repeated(tensors: _Tensors, wanted: set[str]) -> dict[str, str]:
    """Return the tensors whose bytes are those of a wanted one under another name."""
    found = {tensors[name].pieces: name for name in wanted}
    return {
        name: f"another name of {found[entry.pieces]}"
        for name, entry in tensors.items()
        if name not in wanted and entry.pieces in found
    }


def _dropped(folder: Path, names: list[str], prefix: str, mtp: bool) -> dict[str, str]:
    reasons = dict(_DROPPED)
    if not mtp:
        reasons[f"{prefix}mtp."] = "of a multi-token-prediction layer, left out on request"
    dropped: dict[str, str] = {}
    for name in sorted(names):
        reason = next((why for part, why in reasons.items() if part in name), "")
        if not reason:
            raise ConversionError(f"{folder} holds {name}, which the model does not imply")
        dropped[name] = reason
    return dropped


def _chunks(
    folder: Path, side: Side, tensors: _Tensors, prefix: str
) -> dict[Place, tuple[Chunk, ...]]:
    chunks: dict[Place, tuple[Chunk, ...]] = {}
    archives = _Archives(folder)
    for key, stack in stacks_of(side).items():
        entry = tensors[prefix + key]
        found: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
        for piece in entry.pieces:
            offset = archives.data_of(piece, entry.dtype)
            for index, chunk in _chunks_of(entry, piece, offset, len(next(iter(stack)))):
                found[index].append(chunk)
        for index, param in stack.items():
            covered = sum(chunk.box.numel for chunk in found[index])
            if covered != prod(param.shape):
                raise ConversionError(
                    f"{folder} holds {covered} elements of {prefix}{key}{list(index)}, expected "
                    f"{prod(param.shape)}"
                )
            chunks[0, param.name] = tuple(found[index])
    return chunks


class _Archives:
    """Finds where the data of pieces begin.

    A model has tens of thousands, most of which begin with the same bytes up to their data: these
    say what the piece is, so that one of each kind is parsed.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._known: dict[tuple[str, Piece], bytes] = {}

    def data_of(self, piece: Piece, dtype: str) -> int:
        """Return the byte of its file at which a piece's elements begin."""
        path = self._folder / piece.file
        kind = (dtype, replace(piece, offsets=(), file="", start=0))
        if kind in self._known and path.is_file():
            start = self._known[kind]
            with path.open("rb") as file:
                file.seek(piece.start)
                if file.read(len(start)) == start and path.stat().st_size >= piece.stop:
                    return piece.start + len(start)
        tensor = read_archive(path, piece.start, piece.length)
        if (tensor.dtype, tensor.shape, tensor.contiguous) != (dtype, piece.sizes, True):
            raise ConversionError(
                f"{path} holds {tensor} at byte {piece.start}, expected {dtype} {piece.sizes}"
            )
        with path.open("rb") as file:
            file.seek(piece.start)
            start = file.read(tensor.offset - piece.start)
        if b"data.pkl" in start:
            self._known[kind] = start
        return tensor.offset


def _chunks_of(
    entry: Entry, piece: Piece, offset: int, stacked: int
) -> Iterator[tuple[tuple[int, ...], Chunk]]:
    """Yield the parts of a piece that are of one parameter each, with its index."""
    start = piece.offsets[stacked:]
    stop = tuple(a + b for a, b in zip(start, piece.sizes[stacked:], strict=True))
    box = Box(start, stop)
    ranges = [
        range(first, first + size)
        for first, size in zip(piece.offsets[:stacked], piece.sizes[:stacked], strict=True)
    ]
    for index in product(*ranges):
        chunk = Chunk(box=box, dtype=entry.dtype, file=Path(piece.file), offset=offset)
        yield index, chunk
        offset += chunk.nbytes
