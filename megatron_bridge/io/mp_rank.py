"""Megatron's older checkpoints, one ``torch.save`` file for each model-parallel rank; for reading.

Called by `formats`. The folders are ``mp_rank_TT``, with a pipeline ``mp_rank_TT_PPP``, with expert
parallelism one number more. How the ranks divide the model follows from the names and shapes that
the files hold; the layout is then `layouts.megatron`'s, one rank of the side for each file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_bridge.box import Box
from megatron_bridge.errors import ConversionError
from megatron_bridge.io.store import Chunk, Place, Repeat, Stored, StoredTensor
from megatron_bridge.io.torch_archive import Located, read_archive
from megatron_bridge.io.torch_dist import checkpoint_folder
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.layouts.typed import typed
from megatron_bridge.models.checks import layers_of_stage
from megatron_bridge.operations import ITEMSIZE
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.side import Block, Side
from megatron_bridge.spec import ModelSpec

_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")  # without and with a distributed optimizer
_CHUNK = re.compile(r"model(\d*)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight$")
_EMBEDDING = "embedding.word_embeddings.weight"
_FINAL_NORM = "decoder.final_layernorm.weight"

_AXES = ("tp", "pp", "vpp", "ep", "etp")

Coordinate = tuple[int, int, int]  # tp, pp, ep


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankFile:
    """What one file holds."""

    file: Path
    chunks: tuple[dict[str, Any], ...]  # state of each model chunk
    others: tuple[str, ...]  # what is none of the model


def is_mp_rank(folder: Path) -> bool:
    """Tell whether a checkpoint's folder has this format."""
    return any(_FOLDER.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())


def open_mp_rank(folder: Path, spec: ModelSpec, *, mtp: bool = True) -> Stored:
    """Describe an older checkpoint; reads no tensor.

    Args:
        mtp: False leaves layers that predict further tokens out.

    Raises:
        ConversionError: a file or tensor is missing, truncated, of another shape, or unknown.
        PlanError: the model does not divide as the files do.
    """
    folder = checkpoint_folder(folder)
    spec = spec if mtp else spec.without_mtp()
    files = _read(folder)
    layout = _layout(folder, spec, files)
    by_rank = {_rank_of(layout, at): at for at in files}
    te = any(name.endswith(".layer_norm_weight") for f in files.values() for name in f.chunks[0])
    side = _restricted(folder, megatron_side(spec, layout, te=te), by_rank)
    located: dict[int, dict[str, Located]] = {}
    dropped: dict[str, str] = {}
    for rank, at in by_rank.items():
        names = {param.name for param in side.manifest(rank).params}
        located[rank] = {}
        for name, value in _named(spec, layout, files[at], at[1], te):
            if name in names:
                located[rank][name] = value
            else:
                dropped[f"{files[at].file}: {name}"] = _reason(folder, files[at].file, name, mtp)
        for name in files[at].others:
            dropped[f"{files[at].file}: {name}"] = "state of the training run"
    chunks = _chunks(folder, side, located, {rank: files[at].file for rank, at in by_rank.items()})
    return Stored(
        folder=folder,
        format="mp_rank",
        spec=spec,
        side=typed(side, lambda rank, param: located[rank][param.name].dtype),
        chunks=chunks,
        tensors=tuple(
            StoredTensor(name=name, shape=tensor.shape, dtype=tensor.dtype, rank=rank)
            for rank, at in by_rank.items()
            for state in files[at].chunks
            for name, tensor in state.items()
            if isinstance(tensor, Located)
        ),
        dropped=dropped,
        repeats=tuple(_repeats(side, chunks)),
        layout=", ".join(f"{axis} {getattr(layout, axis)}" for axis in _AXES),
    )


# --- Files ------------------------------------------------------------------------------------


def _read(folder: Path) -> dict[Coordinate, _RankFile]:
    """Return all files by the place of their rank."""
    found: dict[tuple[int, ...], _RankFile] = {}
    for path in sorted(folder.iterdir()):
        match = _FOLDER.fullmatch(path.name)
        if match:
            numbers = tuple(int(number) for number in match.groups() if number is not None)
            found[numbers] = _read_file(folder, path)
    if not found:
        raise ConversionError(f"{folder} has no folder mp_rank_00")
    lengths = {len(numbers) for numbers in found}
    if len(lengths) > 1:
        raise ConversionError(f"{folder} mixes folders mp_rank_TT, mp_rank_TT_PPP and ..._EEE")
    length = lengths.pop()
    if length == 3:
        return {(tp, pp, ep): file for (tp, pp, ep), file in found.items()}
    if length == 1:
        return {(tp, 0, 0): file for (tp,), file in found.items()}
    first = found.get((0, 0))
    if first is not None and _FINAL_NORM in first.chunks[-1]:  # no second stage: ranks of experts
        return {(tp, 0, ep): file for (tp, ep), file in found.items()}
    return {(tp, pp, 0): file for (tp, pp), file in found.items()}


def _read_file(folder: Path, path: Path) -> _RankFile:
    name = next((name for name in _FILES if (path / name).is_file()), _FILES[0])
    content = read_archive(path / name)
    if not isinstance(content, dict):
        raise ConversionError(f"{path / name} holds a {type(content).__name__}, expected a dict")
    keys = [key for key in content if isinstance(key, str) and _CHUNK.fullmatch(key)]
    states = [content[key] for key in sorted(keys, key=lambda key: int(key[5:] or 0))]
    if not states or not all(isinstance(state, dict) for state in states):
        raise ConversionError(f"{path / name} holds no state of a model: {', '.join(content)}")
    if "language_model" in states[0]:
        raise ConversionError(
            f"{path / name} is of Megatron-LM's models before Megatron-Core, whose names are others"
        )
    return _RankFile(
        file=(path / name).relative_to(folder),
        chunks=tuple(states),
        others=tuple(str(key) for key in content if key not in keys),
    )


# --- Layout -----------------------------------------------------------------------------------


def _num_layers(state: dict[str, Any]) -> int:
    return len({match[1] for match in map(_LAYER.match, state) if match})


def _layout(folder: Path, spec: ModelSpec, files: dict[Coordinate, _RankFile]) -> TrainerLayout:
    """Return how the ranks divide the model."""
    tp, pp, ep = (max(at[axis] for at in files) + 1 for axis in range(3))
    vpp = len(next(iter(files.values())).chunks)
    stages = [_stage_file(folder, files, stage) for stage in range(pp)]
    sizes = [[_num_layers(state) for state in file.chunks] for file in stages]
    if {len(row) for row in sizes} != {vpp} or sum(map(sum, sizes)) != spec.num_layers:
        raise ConversionError(
            f"{folder} holds {sum(map(sum, sizes))} layers, the model has {spec.num_layers}"
        )
    embedding = stages[0].chunks[0].get(_EMBEDDING)
    if not isinstance(embedding, Located):
        raise ConversionError(f"{folder / stages[0].file} lacks {_EMBEDDING}")
    rows = ["t" * sizes[p][v] for v in range(vpp) for p in range(pp)]
    return TrainerLayout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        dp=ep,
        ep=ep,
        etp=_expert_tp(spec, files, tp),
        sequence_parallel=tp > 1,
        pipeline_layout=f"E{'|'.join(rows)}{'m' * spec.num_mtp_layers}L" if pp > 1 else "",
        vocab_divisor=embedding.shape[0],
    )


def _stage_file(folder: Path, files: dict[Coordinate, _RankFile], stage: int) -> _RankFile:
    for (_, pp, _), file in files.items():
        if pp == stage:
            return file
    raise ConversionError(f"{folder} has no file of pipeline stage {stage}")


def _expert_tp(spec: ModelSpec, files: dict[Coordinate, _RankFile], tp: int) -> int:
    """Return how many ranks divide an expert: all of a tensor-parallel group, or none."""
    for file in files.values():
        for state in file.chunks:
            for name, tensor in state.items():
                if ".experts." in name and "linear_fc2.weight" in name:
                    return tp if tensor.shape[1] * tp == spec.moe_ffn_size else 1
    return 1


def _rank_of(layout: TrainerLayout, at: Coordinate) -> int:
    """Return the first rank whose file it would be."""
    tp, pp, ep = at
    for rank in range(layout.world_size):
        place = layout.coordinate(rank)
        if (place.tp, place.pp, layout.expert_coordinate(rank).ep) == (tp, pp, ep):
            return rank
    raise ConversionError(f"no rank writes mp_rank_{tp:02d}_{pp:03d}_{ep:03d} where etp is 1")


def _restricted(folder: Path, side: Side, by_rank: dict[int, Coordinate]) -> Side:
    """Return the side of the ranks that have files."""
    blocks: list[Block] = []
    for block in side.blocks:
        ranks = tuple(tuple(rank for rank in group if rank in by_rank) for group in block.ranks)
        if not all(ranks):
            absent = block.ranks[ranks.index(())]
            raise ConversionError(
                f"{folder} lacks the file of a rank that holds a part of "
                f"{block.canonical or 'the embedding'} ({block.local}, rank {absent[0]})"
            )
        blocks.append(replace(block, ranks=ranks))
    return Side(tuple(blocks), side.dtype)


# --- Tensors ----------------------------------------------------------------------------------


def _named(
    spec: ModelSpec, layout: TrainerLayout, file: _RankFile, pp: int, te: bool
) -> Iterator[tuple[str, Any]]:
    """Yield what a file holds under the names of the side, layers numbered over the whole model."""
    layers = iter(layers_of_stage(spec, layout, pp))
    for state in file.chunks:
        numbers = [next(layers) for _ in range(_num_layers(state))]
        for name, value in state.items():
            match = _LAYER.match(name)
            if match and int(match[1]) < len(numbers):
                name = f"decoder.layers.{numbers[int(match[1])]}.{match[2]}"
            if te:  # its experts may be one module or several
                name = _LOCAL_EXPERT.sub(r"mlp.experts.linear_fc\2.weight\1", name)
            yield name, value


def _reason(folder: Path, file: Path, name: str, mtp: bool) -> str:
    if name.endswith("_extra_state"):
        return "state of low-precision kernels"
    if name.endswith("rotary_pos_emb.inv_freq"):
        return "rotary inverse frequencies follow from the configuration"
    if name.startswith("mtp.") and not mtp:
        return "of a multi-token-prediction layer, left out on request"
    raise ConversionError(f"{folder / file} holds {name}, which the model does not imply")


def _chunks(
    folder: Path, side: Side, located: dict[int, dict[str, Located]], files: dict[int, Path]
) -> dict[Place, tuple[Chunk, ...]]:
    chunks: dict[Place, tuple[Chunk, ...]] = {}
    for rank in side.ranks:
        path = folder / files[rank]
        for param in side.manifest(rank).params:
            tensor = located[rank].get(param.name)
            if not isinstance(tensor, Located):
                raise ConversionError(f"{path} lacks {param.name} {param.shape}")
            if tensor.shape != param.shape or tensor.dtype not in ITEMSIZE or not tensor.contiguous:
                raise ConversionError(
                    f"{param.name} of {path} is {tensor}, expected {param.shape} of "
                    f"{', '.join(ITEMSIZE)}, row-major"
                )
            box = Box.of_shape(param.shape)
            chunk = Chunk(box=box, dtype=tensor.dtype, file=files[rank], offset=tensor.offset)
            chunks[rank, param.name] = (chunk,)
    return chunks


def _repeats(side: Side, chunks: dict[Place, tuple[Chunk, ...]]) -> Iterator[Repeat]:
    """Yield what several ranks hold alike, and the copies of a tied embedding."""
    for block in side.blocks:
        for index, (first, *others) in enumerate(block.ranks):
            for param in block.expand(index):
                (read,) = chunks[first, param.name]
                for rank in others:
                    (other,) = chunks[rank, param.name]
                    yield Repeat(name=param.name, read=read, other=other)
    original = next(block for block in side.blocks if block.variants[0][0].name == _EMBEDDING)
    for block in side.blocks:
        for index, (rank, *_) in enumerate(block.ranks if block.is_copy else ()):
            for param in block.expand(index):
                (read,) = chunks[original.ranks[index][0], _EMBEDDING]
                (other,) = chunks[rank, param.name]
                for shard in param.shards:  # whole rows; what is behind them is padding
                    rows = replace(read, box=shard.local), replace(other, box=shard.local)
                    yield Repeat(name=param.name, read=rows[0], other=rows[1])
