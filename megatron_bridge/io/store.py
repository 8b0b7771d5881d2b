"""Checkpoints as regions at byte offsets of files: what every format reads into and writes from.

Readers (`hf`, `torch_dist`, `mp_rank`) describe what lies on disk as a `Stored`; the functions
that make a `Target` describe a checkpoint to be written. Conversion copies the regions that
`megatron_bridge.plan.plan` names from the one to the other and knows no format.

A *parameter* of a side is what a file format addresses as one matrix or vector. Where a format
stacks those of all layers or experts in one tensor, each has an index in its name instead of a
number: "decoder.layers[3].mlp.experts.experts[17].linear_fc2.weight" lies at [3, 17] of
"decoder.layers.mlp.experts.experts.linear_fc2.weight". Parameters thus have at most two axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_bridge.box import Box
from megatron_bridge.operations import ITEMSIZE
from megatron_bridge.side import Side
from megatron_bridge.spec import ModelSpec

Place = tuple[int, str]  # rank of a side, name of one of its parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A region of a parameter as it lies in a file: row-major, contiguous."""

    box: Box  # of the parameter
    dtype: str  # torch's name: "bfloat16", "float8_e4m3fn", ...
    file: Path  # relative to the checkpoint's folder
    offset: int  # byte of the file at which it begins

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor as its format names and shapes it, for people to read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Elements that a checkpoint holds twice: what is not read must be what is."""

    name: str  # for people to read
    read: Chunk
    other: Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint as it lies on disk.

    ``side`` has one rank (0) but where the format stores shards, one rank a file. Chunks of a
    parameter do not overlap and cover it. An element that no shard covers is padding. Where a
    weight is FP8, its parameter says so and names that of its scales, as in a generator's side.
    """

    folder: Path
    format: str  # "hf", "torch_dist", "mp_rank", "meta"
    spec: ModelSpec
    side: Side
    chunks: Mapping[Place, tuple[Chunk, ...]]
    tensors: tuple[StoredTensor, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)  # left out on purpose -> reason
    repeats: tuple[Repeat, ...] = ()
    layout: str = "none: whole tensors"  # how ranks divide the model, for people to read


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a new checkpoint holds each canonical tensor, by its name."""

    dtypes: Mapping[str, str]  # of every canonical tensor; of a quantized one: unused
    quantized: frozenset[str] = frozenset()  # FP8 in blocks of 128 x 128, scales beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """One file of a new checkpoint: its fixed bytes, and the regions between them.

    What neither covers is zero: padding.
    """

    name: str  # may be in a folder: "iter_0000000/__0_0.distcp"
    size: int
    fixed: tuple[tuple[int, bytes], ...]  # (offset, bytes): headers and trailers
    chunks: Mapping[str, tuple[Chunk, ...]]  # by parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A checkpoint to be written, by rank 0 of its side alone.

    Every parameter's chunks lie in one file or several. ``closing`` is written last, in its order:
    index or metadata, configuration, tokenizer.
    """

    format: str  # "hf", "torch_dist"
    spec: ModelSpec
    side: Side
    files: tuple[TargetFile, ...]
    closing: Mapping[str, bytes]  # by name
