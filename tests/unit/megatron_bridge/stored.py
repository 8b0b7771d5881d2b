"""Stored checkpoints read whole, and targets filled, element by element: the engine's oracle.

Shares no code with the conversion: every parameter is made in memory and every chunk copied.
"""

from pathlib import Path

import torch

from megatron_bridge.io.store import Chunk, Form, Stored, Target
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.spec import ModelSpec
from tests.unit.megatron_bridge.checkpoints import Tensors


def form_of(spec: ModelSpec, dtype: str, **others: str) -> Form:
    """Every tensor of one dtype, but for those that keep their own and for ``others``."""
    dtypes = {tensor.name: tensor.dtype or dtype for tensor in canonical_tensors(spec)}
    return Form(dtypes=dtypes | others)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def write(target: Target, folder: Path, whole: Tensors, derived: Tensors | None = None) -> Path:
    """Fill the files of a target with these canonical tensors; ``derived`` are FP8 scales."""
    params: Tensors = {}
    for param in target.side.manifest(0).params:
        dtype = getattr(torch, param.dtype or target.side.dtype)
        value = torch.zeros(param.shape, dtype=dtype)
        if param.derived:
            value = (derived or {})[param.name]
        for shard in param.shards:
            value[shard.local.slices] = whole[shard.tensor][shard.box.slices].to(dtype)
        params[param.name] = value
    folder.mkdir(parents=True)
    for file in target.files:
        content = bytearray(file.size)
        free = [True] * file.size
        pieces = list(file.fixed)
        for name, chunks in file.chunks.items():
            for chunk in chunks:
                assert chunk.file == Path(file.name)
                piece = params[name][chunk.box.slices]
                assert chunk.dtype == str(piece.dtype).removeprefix("torch.")
                pieces.append((chunk.offset, _bytes(piece)))
        for offset, piece in pieces:
            assert all(free[offset : offset + len(piece)]), f"{file.name}: {offset} written twice"
            free[offset : offset + len(piece)] = [False] * len(piece)
            content[offset : offset + len(piece)] = piece
        assert len(content) == file.size
        (folder / file.name).write_bytes(content)
    for name, content in target.closing.items():
        (folder / name).write_bytes(content)
    return folder


def _value(folder: Path, chunk: Chunk) -> torch.Tensor:
    dtype = getattr(torch, chunk.dtype)
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.offset)
        content = bytearray(file.read(chunk.box.numel * dtype.itemsize))
    return torch.frombuffer(content, dtype=dtype).view(chunk.box.shape)


def read_params(stored: Stored) -> dict[tuple[int, str], torch.Tensor]:
    """Every parameter of every rank, whole."""
    params: dict[tuple[int, str], torch.Tensor] = {}
    for rank in stored.side.ranks:
        for param in stored.side.manifest(rank).params:
            dtype = getattr(torch, param.dtype or stored.side.dtype)
            value, seen = torch.zeros(param.shape, dtype=dtype), torch.zeros(param.shape)
            for chunk in stored.chunks[rank, param.name]:
                value[chunk.box.slices] = _value(stored.folder, chunk)
                seen[chunk.box.slices] += 1
            assert bool((seen == 1).all()), param.name
            params[rank, param.name] = value
    assert params.keys() == stored.chunks.keys()
    return params


def read(stored: Stored) -> Tensors:
    """Every canonical tensor; replicas must agree."""
    params, whole, seen = read_params(stored), {}, {}
    for tensor in canonical_tensors(stored.spec):
        seen[tensor.name] = torch.zeros(tensor.shape)
    for rank in stored.side.ranks:
        for param in stored.side.manifest(rank).params:
            value = params[rank, param.name]
            for shard in param.shards:
                found = seen[shard.tensor]
                empty = torch.zeros(found.shape, dtype=value.dtype)
                tensor = whole.setdefault(shard.tensor, empty)
                before = found[shard.box.slices] > 0
                piece = value[shard.local.slices]
                assert torch.equal(tensor[shard.box.slices][before], piece[before]), shard
                tensor[shard.box.slices] = piece
                found[shard.box.slices] += 1
    assert all(bool((count > 0).all()) for count in seen.values())
    return whole


def assert_same(found: Tensors, wanted: Tensors) -> None:
    """Bit for bit, names and dtypes too."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert _bytes(found[name]) == _bytes(tensor), name
