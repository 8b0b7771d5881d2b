"""Megatron-Core's distributed checkpoints (torch_dist) as targets of a conversion.

Called by converters. A target loads through ``dist_checkpointing.load`` at any parallel layout; its
files are those that `torch_dist` reads.
"""

from __future__ import annotations

import io
import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from megatron_bridge.box import Box
from megatron_bridge.errors import ConversionError
from megatron_bridge.io.dist_metadata import METADATA_NAME, Entry, Piece, metadata_bytes
from megatron_bridge.io.store import Chunk, Form, Target, TargetFile
from megatron_bridge.io.torch_archive import blank_archive
from megatron_bridge.io.torch_dist import COMMON_NAME, CONFIG_NAME
from megatron_bridge.layouts.torch_dist import (
    TorchDistLayout,
    extra_states,
    key_of,
    local_names,
    shape_of,
    stacks_of,
    torch_dist_side,
)
from megatron_bridge.layouts.typed import typed
from megatron_bridge.operations import ITEMSIZE
from megatron_bridge.spec import LocalParam, ModelSpec

_ALIGNMENT = 64  # bytes; torch's own for the data in its archives
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How large the parts of a new checkpoint become, unless a single row is larger."""

    file_bytes: int = 5 << 30
    piece_bytes: int = 256 << 20  # what a loading rank holds beside its model


@dataclass(slots=True)
class _Plan:
    """The files of a new checkpoint while they are laid out."""

    extent: Extent
    files: list[TargetFile] = field(default_factory=list)
    pieces: dict[str, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    _at: int = 0
    _fixed: list[tuple[int, bytes]] = field(default_factory=list)
    _chunks: dict[str, list[Chunk]] = field(default_factory=lambda: defaultdict(list))

    @property
    def _name(self) -> str:
        return f"__0_{len(self.files)}.distcp"

    def add(self, param: LocalParam, dtype: str) -> None:
        """Lay out a parameter, in pieces of whole rows."""
        key, index = key_of(param.name)
        row_bytes = prod(param.shape[1:]) * ITEMSIZE[dtype]
        step = max(1, self.extent.piece_bytes // row_bytes)
        for low in range(0, param.shape[0], step):
            high = min(low + step, param.shape[0])
            box = Box((low, *(0 for _ in param.shape[1:])), (high, *param.shape[1:]))
            sizes = (*(1 for _ in index), *box.shape)
            blank = blank_archive(sizes, dtype)
            if self._at and self._at + blank.size > self.extent.file_bytes:
                self.end_file()
            start = self._place(blank.fixed, blank.size)
            chunk = Chunk(box=box, dtype=dtype, file=Path(self._name), offset=start + blank.data)
            self._chunks[param.name].append(chunk)
            self.pieces[key].append(
                Piece(
                    offsets=(*index, *box.start),
                    sizes=sizes,
                    file=self._name,
                    start=start,
                    length=blank.size,
                )
            )

    def add_object(self, content: bytes) -> Piece:
        """Lay out an object."""
        start = self._place(((0, content),), len(content))
        return Piece(offsets=(), sizes=(), file=self._name, start=start, length=len(content))

    def _place(self, fixed: tuple[tuple[int, bytes], ...], size: int) -> int:
        start = -(-self._at // _ALIGNMENT) * _ALIGNMENT
        self._fixed += [(start + offset, content) for offset, content in fixed]
        self._at = start + size
        return start

    def end_file(self) -> None:
        chunks = {name: tuple(found) for name, found in self._chunks.items()}
        self.files.append(
            TargetFile(name=self._name, size=self._at, fixed=tuple(self._fixed), chunks=chunks)
        )
        self._at, self._fixed, self._chunks = 0, [], defaultdict(list)


def torch_dist_target(
    spec: ModelSpec,
    form: Form,
    layout: TorchDistLayout,
    beside: Mapping[str, bytes],
    arguments: Mapping[str, object] | None = None,
    extent: Extent | None = None,
) -> Target:
    """Describe a new distributed checkpoint.

    Args:
        beside: files beside the weights, such as ``config.json``, by name.
        arguments: Megatron-LM's, kept as its own checkpoints keep them.

    Raises:
        ConversionError: tensors that become one have different dtypes, or are FP8.
    """
    side = typed(torch_dist_side(spec, layout), lambda _, param: _dtype(param, form))
    plan, stacks = _Plan(extent or Extent()), stacks_of(side)
    for key, stack in stacks.items():
        dtypes = {param.dtype or side.dtype for param in stack.values()}
        if len(dtypes) > 1:
            raise ConversionError(f"{key} cannot hold layers of {', '.join(sorted(dtypes))}")
        for param in stack.values():
            plan.add(param, *dtypes)
    # Megatron's loaders want an object of every linear layer and norm; without FP8 all say nothing.
    nothing = plan.add_object(_saved([None]))
    plan.end_file()
    entries = {
        key: Entry(
            dtype=next(iter(stack.values())).dtype or side.dtype,
            shape=shape_of(stack),
            pieces=tuple(plan.pieces[key]),
        )
        for key, stack in stacks.items()
    }
    if not layout.local_spec:  # both specs find the same bytes, each under its own name
        names = local_names(spec, entries)
        entries |= {new: entries[key] for key, new in names.items()}
    objects = extra_states(stacks)
    closing = {
        **beside,
        COMMON_NAME: _saved(_common(layout, arguments)),
        METADATA_NAME: metadata_bytes(entries, objects, nothing),
        CONFIG_NAME: json.dumps(_BACKENDS).encode(),
    }
    return Target(
        format="torch_dist", spec=spec, side=side, files=tuple(plan.files), closing=closing
    )


def _dtype(param: LocalParam, form: Form) -> str:
    tensors = {shard.tensor for shard in param.shards}
    if tensors & form.quantized:
        raise ConversionError(f"{param.name} cannot be FP8: Megatron-Core's checkpoints are not")
    dtypes = {form.dtypes[name] for name in tensors}
    if len(dtypes) > 1:
        raise ConversionError(f"{param.name} cannot hold tensors of {', '.join(sorted(dtypes))}")
    return dtypes.pop()


def _common(layout: TorchDistLayout, arguments: Mapping[str, object] | None) -> dict[str, object]:
    common: dict[str, object] = {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {
            "singleton_local_shards": False,
            "non_homogeneous_layers": not layout.stacked_layers,
        },
    }
    return common if arguments is None else {**common, "args": Namespace(**arguments)}


def _saved(value: object) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()
