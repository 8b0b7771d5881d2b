"""Hugging Face folders as stored checkpoints, and as targets of a conversion.

Called by `formats` and by converters. A folder has a ``config.json`` and either one safetensors
file or several with an index. FP8 weights are quantised in blocks of 128 x 128 and have their
scales beside them, as in DeepSeek's checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_bridge.box import Box
from megatron_bridge.errors import ConversionError
from megatron_bridge.io.hf import INDEX_NAME, SINGLE_NAME, read_index
from megatron_bridge.io.safetensors_header import header_bytes, read_header
from megatron_bridge.io.store import (
    Chunk,
    Form,
    Repeat,
    Stored,
    StoredTensor,
    Target,
    TargetFile,
)
from megatron_bridge.io.torch_archive import Located
from megatron_bridge.layouts.hf import hf_side
from megatron_bridge.layouts.quantized import FP8
from megatron_bridge.layouts.typed import SCALES_SUFFIX, scales_shape, typed
from megatron_bridge.models.families import (
    canonical_tensors,
    mtp_aliases,
    read_config,
    spec_from_hf,
)
from megatron_bridge.operations import BLOCK, ITEMSIZE
from megatron_bridge.spec import LocalParam, ModelSpec

_Tensors = dict[str, tuple[Path, Located]]


# --- Reading ----------------------------------------------------------------------------------


def hf_spec(folder: Path) -> ModelSpec:
    """Return the spec of a folder whose weights may be FP8 in blocks.

    Raises:
        ConversionError: no ``config.json``, or one that is not supported.
    """
    config = dict(read_config(folder))
    quantization = config.pop("quantization_config", None)
    try:
        if quantization is not None:
            _check_quantization(quantization)
        return spec_from_hf(config)
    except ConversionError as error:
        raise ConversionError(f"{folder}: {error}") from error


def _check_quantization(found: object) -> None:
    wanted = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    for key, value in wanted.items():
        got = found.get(key) if isinstance(found, dict) else None
        if got != value:
            raise ConversionError(
                f"config.json: quantization_config.{key} {got!r}, expected {value!r}"
            )


def _located(folder: Path) -> _Tensors:
    """Return every tensor of the folder's files."""
    file_of = read_index(folder)
    if file_of is None:
        return {n: (Path(SINGLE_NAME), t) for n, t in read_header(folder / SINGLE_NAME).items()}
    found: _Tensors = {}
    for file in sorted(set(file_of.values())):
        for name, tensor in read_header(folder / file).items():
            if file_of.get(name) != file:
                raise ConversionError(
                    f"{folder / INDEX_NAME} says that {name} lies in {file_of.get(name)}, "
                    f"but {file} holds it"
                )
            found[name] = (Path(file), tensor)
    absent = [name for name in file_of if name not in found]
    if absent:
        raise ConversionError(
            f"{folder / INDEX_NAME} names {absent[0]} in {file_of[absent[0]]}, which does not hold "
            f"it ({len(absent)} such tensors)"
        )
    return found


def _aliases(spec: ModelSpec) -> dict[str, str]:
    """Return names under which a folder may hold a tensor once more."""
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if spec.tied_embeddings else {}
    return {**tied, **mtp_aliases(spec)}


def _reason_to_drop(name: str, spec: ModelSpec, with_mtp: ModelSpec) -> str:
    """Return why a tensor that is none of the model's may be left out; empty where it may not."""
    aliases = _aliases(with_mtp)
    if name.endswith("rotary_emb.inv_freq"):
        return "rotary inverse frequencies follow from config.json"
    if name in aliases:
        return f"repeats {aliases[name]}"
    layers = range(spec.num_layers, with_mtp.num_layers + with_mtp.num_mtp_layers)
    if name.startswith(tuple(f"model.layers.{layer}." for layer in layers)):
        return "of a multi-token-prediction layer, left out on request"
    return ""


def _check_shape(
    where: str, tensor: Located, shape: tuple[int, ...], dtypes: Sequence[str]
) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes:
        raise ConversionError(
            f"{where} is {tensor.dtype} {tensor.shape}, expected {' or '.join(dtypes)} {shape}"
        )


def _check_tensors(folder: Path, spec: ModelSpec, found: _Tensors) -> set[str]:
    """Check the model's tensors against their files; return their names with those of scales."""
    wanted: set[str] = set()
    for tensor in canonical_tensors(spec):
        if tensor.name not in found:
            raise ConversionError(f"{folder} lacks {tensor.name} {tensor.shape}")
        file, located = found[tensor.name]
        _check_shape(f"{tensor.name} of {folder / file}", located, tensor.shape, tuple(ITEMSIZE))
        wanted.add(tensor.name)
        if located.dtype == FP8:
            scales = tensor.name + SCALES_SUFFIX
            if scales not in found or len(tensor.shape) != 2:
                raise ConversionError(f"{folder}: {tensor.name} is {FP8}, but has no {scales}")
            at = f"{scales} of {folder / found[scales][0]}"
            shape = scales_shape(tensor.shape)
            _check_shape(at, found[scales][1], shape, ("float32",))
            wanted.add(scales)
    return wanted


def open_hf(folder: Path, *, mtp: bool = True) -> Stored:
    """Describe the checkpoint in a Hugging Face folder; reads its headers only.

    Args:
        mtp: False leaves layers that predict further tokens out.

    Raises:
        ConversionError: a file or tensor is missing, truncated, of another shape, or unknown.
    """
    with_mtp = hf_spec(folder)
    spec = with_mtp if mtp else with_mtp.without_mtp()
    found = _located(folder)
    wanted = _check_tensors(folder, spec, found)
    dropped: dict[str, str] = {}
    for name in sorted(found.keys() - wanted):
        reason = _reason_to_drop(name, spec, with_mtp)
        if not reason:
            raise ConversionError(
                f"{folder / found[name][0]} holds {name}, which config.json does not imply"
            )
        dropped[name] = reason
    return Stored(
        folder=folder,
        format="hf",
        spec=spec,
        side=typed(hf_side(spec, 0), lambda _, param: found[param.name][1].dtype),
        chunks={(0, name): (_chunk(*found[name]),) for name in found if name in wanted},
        tensors=tuple(
            StoredTensor(name=name, shape=tensor.shape, dtype=tensor.dtype)
            for name, (_, tensor) in found.items()
        ),
        dropped=dropped,
        repeats=tuple(
            Repeat(name=name, read=_chunk(*found[kept]), other=_chunk(*found[name]))
            for name, kept in _aliases(with_mtp).items()
            if name in found
        ),
    )


def _chunk(file: Path, tensor: Located) -> Chunk:
    box = Box.of_shape(tensor.shape)
    return Chunk(box=box, dtype=tensor.dtype, file=file, offset=tensor.offset)


# --- Writing ----------------------------------------------------------------------------------


def hf_target(
    spec: ModelSpec,
    form: Form,
    small: Mapping[str, bytes],
    max_file_bytes: int = 5 << 30,
) -> Target:
    """Describe a new folder, divided into files as Hugging Face does.

    Args:
        small: files beside the weights, such as ``config.json``, by name.
        max_file_bytes: of a file's tensors, unless a single one is larger.
    """

    def dtype_of(_: int, param: LocalParam) -> str:
        return FP8 if param.name in form.quantized else form.dtypes[param.name]

    side = typed(hf_side(spec, 0), dtype_of)
    params = side.manifest(0).params
    sizes = {p.name: Box.of_shape(p.shape).numel * ITEMSIZE[p.dtype or side.dtype] for p in params}
    groups = list(_groups(params, sizes, max_file_bytes))
    files: list[TargetFile] = []
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        files.append(_file(name if len(groups) > 1 else SINGLE_NAME, group, side.dtype))
    closing: dict[str, bytes] = {}
    if len(files) > 1:
        weight_map = {param: file.name for file in files for param in file.chunks}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        closing[INDEX_NAME] = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    return Target(
        format="hf", spec=spec, side=side, files=tuple(files), closing={**closing, **small}
    )


def _groups(
    params: Sequence[LocalParam], sizes: Mapping[str, int], max_bytes: int
) -> Iterator[list[LocalParam]]:
    group: list[LocalParam] = []
    total = 0
    for param in params:
        if group and total + sizes[param.name] > max_bytes:
            yield group
            group, total = [], 0
        group.append(param)
        total += sizes[param.name]
    yield group


def _file(name: str, params: Sequence[LocalParam], default: str) -> TargetFile:
    """Lay tensors one behind the other, wide elements first: each begins at a multiple of its own."""
    dtypes = {param.name: param.dtype or default for param in params}
    ordered = sorted(params, key=lambda param: -ITEMSIZE[dtypes[param.name]])
    boxes = {param.name: Box.of_shape(param.shape) for param in ordered}
    header = header_bytes(
        {
            p.name: (dtypes[p.name], p.shape, boxes[p.name].numel * ITEMSIZE[dtypes[p.name]])
            for p in ordered
        }
    )
    chunks: dict[str, tuple[Chunk, ...]] = {}
    at = len(header)
    for param in ordered:
        chunk = Chunk(box=boxes[param.name], dtype=dtypes[param.name], file=Path(name), offset=at)
        chunks[param.name] = (chunk,)
        at += chunk.nbytes
    return TargetFile(name=name, size=at, fixed=((0, header),), chunks=chunks)
