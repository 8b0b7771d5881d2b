"""Meta's original Llama checkpoints: ``params.json`` and ``consolidated.NN.pth``, to be read.

Called by converters. The files are those of model-parallel ranks; they are read as they lie, where
they lie, and nothing in them is executed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megatron_bridge.box import Box
from megatron_bridge.errors import ConversionError
from megatron_bridge.io.repeats import is_same
from megatron_bridge.io.store import Chunk, Place, Stored, StoredTensor
from megatron_bridge.io.torch_archive import Located, read_archive
from megatron_bridge.layouts.meta import EMBEDDING, PAIRED, PLACES, meta_side
from megatron_bridge.layouts.typed import typed
from megatron_bridge.models.meta_llama import find_release, read_params, spec_from_params
from megatron_bridge.operations import ITEMSIZE
from megatron_bridge.side import Side
from megatron_bridge.spec import LocalParam, ModelSpec, Part

_FILE = re.compile(r"consolidated\.(\d\d)\.pth")

_Files = dict[str, dict[str, Located]]  # by file: what it holds


def _files(folder: Path) -> _Files:
    if not folder.is_dir():
        raise ConversionError(f"checkpoint folder {folder} does not exist")
    names = sorted(path.name for path in folder.iterdir() if _FILE.fullmatch(path.name))
    if not names:
        raise ConversionError(f"{folder} has no consolidated.00.pth")
    for number, name in enumerate(names):
        if name != f"consolidated.{number:02d}.pth":
            raise ConversionError(f"{folder} lacks consolidated.{number:02d}.pth, but has {name}")
    found: _Files = {}
    for name in names:
        content = read_archive(folder / name)
        if not isinstance(content, dict):
            raise ConversionError(f"{folder / name} holds no tensors by name")
        found[name] = {key: item for key, item in content.items() if isinstance(item, Located)}
    return found


def _vocab_size(folder: Path, hidden_size: int, files: _Files) -> int:
    """Return the rows of the embedding, which the first releases' ``params.json`` does not say."""
    first = next(iter(files.values()))
    if EMBEDDING not in first or len(first[EMBEDDING].shape) != 2:
        raise ConversionError(f"{folder}: its first file has no matrix {EMBEDDING}")
    rows, columns = first[EMBEDDING].shape
    return rows if columns * len(files) == hidden_size else rows * len(files)


def open_meta(folder: Path, *, release: str) -> Stored:
    """Describe an original Llama checkpoint; reads no weights, but to compare what is there twice.

    Args:
        release: a key of `RELEASES`.

    Raises:
        ConversionError: a file or tensor is missing, truncated, of another shape, or unknown.
    """
    known, files = find_release(release), _files(folder)
    params = read_params(folder)
    spec = spec_from_params(params, known, _vocab_size(folder, params["dim"], files))
    reader = _Reader(folder, spec, files)
    chunks: dict[Place, tuple[Chunk, ...]] = {}
    side = meta_side(spec)
    for param in side.manifest(0).params:
        chunks[0, param.name] = reader.chunks(param)
    if spec.tied_embeddings:
        reader.drop_tied_head()
    reader.drop_the_rest()
    return Stored(
        folder=folder,
        format="meta",
        spec=spec,
        side=_with_dtypes(side, chunks),
        chunks=chunks,
        tensors=tuple(
            StoredTensor(name=name, shape=tensor.shape, dtype=tensor.dtype, rank=rank)
            for rank, held in enumerate(files.values())
            for name, tensor in held.items()
        ),
        dropped=dict(sorted(reader.dropped.items())),
    )


def _with_dtypes(side: Side, chunks: Mapping[Place, tuple[Chunk, ...]]) -> Side:
    return typed(side, lambda rank, param: chunks[rank, param.name][0].dtype)


class _Reader:
    """Finds each parameter's regions in the files, and accounts for all that these hold."""

    def __init__(self, folder: Path, spec: ModelSpec, files: _Files):
        self._folder, self._spec, self._files = folder, spec, files
        self._left = {(file, name) for file, held in files.items() for name in held}
        self.dropped: dict[str, str] = {}

    def _axis(self, name: str) -> int | None:
        if name != EMBEDDING:
            kind = re.sub(r"^layers\.\d+\.", "", name)
            return next(place.axis for place in PLACES.values() if place.name == kind)
        held = next(iter(self._files.values())).get(name)
        return 1 if held is not None and held.shape[0] == self._spec.vocab_size else 0

    def chunks(self, param: LocalParam) -> tuple[Chunk, ...]:
        """Return the regions of one parameter, one a file that holds a part of it."""
        axis, count = self._axis(param.name), len(self._files)
        paired = param.name.endswith(tuple(PLACES[part].name for part in PAIRED))
        found: list[Chunk] = []
        for index, (file, held) in enumerate(self._files.items()):
            box = _part(param.shape, axis, index, count, f"{param.name} of {self._folder}")
            shape = (box.shape[0] * 2, box.shape[1] // 2) if paired else box.shape
            tensor = held.get(param.name)
            if tensor is None:
                raise ConversionError(f"{self._folder / file} lacks {param.name} {shape}")
            dtype = found[0].dtype if found else tensor.dtype
            self._check(file, param.name, shape, dtype)
            self._left.discard((file, param.name))
            chunk = Chunk(box=box, dtype=dtype, file=Path(file), offset=tensor.offset)
            if axis is None and found:
                self._drop_copy(file, param.name, found[0], chunk)
            else:
                found.append(chunk)
        return tuple(found)

    def _check(self, file: str, name: str, shape: tuple[int, ...], dtype: str) -> None:
        tensor = self._files[file][name]
        if tensor.shape != shape or tensor.dtype != dtype or dtype not in ITEMSIZE:
            raise ConversionError(
                f"{name} of {self._folder / file} is {tensor.dtype} {tensor.shape}, expected "
                f"{dtype if dtype in ITEMSIZE else 'bfloat16'} {shape}"
            )
        if not tensor.contiguous:
            raise ConversionError(f"{name} of {self._folder / file} is not contiguous")

    def _drop_copy(self, file: str, name: str, first: Chunk, other: Chunk) -> None:
        if not is_same(self._folder, first, other):
            raise ConversionError(
                f"{name} differs in {first.file} and {other.file} of {self._folder}, which hold it whole"
            )
        self.dropped[f"{name} of {file}"] = f"repeats that of {first.file}"

    def drop_tied_head(self) -> None:
        """Leave out the head of a tied model, once it is the embedding."""
        name = PLACES[Part.HEAD].name
        for file, held in self._files.items():
            if name not in held:
                continue
            first, other = (
                Chunk(
                    box=Box.of_shape(tensor.shape),
                    dtype=tensor.dtype,
                    file=Path(file),
                    offset=tensor.offset,
                )
                for tensor in (held[EMBEDDING], held[name])
            )
            if not is_same(self._folder, first, other):
                raise ConversionError(
                    f"{name} of {self._folder / file} is not {EMBEDDING}, but the release ties them"
                )
            self._left.discard((file, name))
            self.dropped[f"{name} of {file}"] = f"tied to {EMBEDDING}"

    def drop_the_rest(self) -> None:
        """Leave out what follows from the configuration; refuse what is unknown."""
        for file, name in sorted(self._left):
            if name != "rope.freqs":
                raise ConversionError(
                    f"{self._folder / file} holds {name}, which params.json does not imply"
                )
            self.dropped[f"{name} of {file}"] = "rotary inverse frequencies follow from params.json"


def _part(shape: tuple[int, ...], axis: int | None, index: int, count: int, what: str) -> Box:
    whole = Box.of_shape(shape)
    if axis is None:
        return whole
    if shape[axis] % count:
        raise ConversionError(f"{what}: {count} files do not divide {shape} along axis {axis}")
    size = shape[axis] // count
    start, stop = list(whole.start), list(whole.stop)
    start[axis], stop[axis] = index * size, (index + 1) * size
    return Box(tuple(start), tuple(stop))
