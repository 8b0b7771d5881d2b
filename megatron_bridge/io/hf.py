"""Hugging Face folders: reading a rank's own byte ranges, and writing sharded safetensors.

`load_hf` fills live parameters of any layout (called by the runtime on every rank), `stream_params`
says what they must hold (called by `megarl.contract`); `HfWriter` streams whole tensors into a new
folder (called by `megarl.ddma.export` and converters on one rank).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.companions import travels
from megatron_bridge.models.families import canonical_tensors, load_spec
from megatron_bridge.spec import LocalParam, RankManifest, Shard

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class _Checkpoint:
    """The safetensors of one folder, opened file by file as tensors are asked for."""

    def __init__(self, folder: Path, files: ExitStack):
        self._folder = folder
        self._files = files
        self._open: dict[str, Any] = {}
        self._shapes = {item.name: item.shape for item in canonical_tensors(load_spec(folder))}
        self._file_of = read_index(folder)

    def _handle(self, name: str) -> Any:
        if name not in self._open:
            path = self._folder / name
            if not path.is_file():
                raise ConversionError(f"{self._folder} lacks {name}, which its index names")
            try:
                handle = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ConversionError(f"{path} is not a safetensors file: {error}") from error
            self._open[name] = self._files.enter_context(handle)
        return self._open[name]

    def read(self, shard: Shard) -> Tensor:
        """Return the region of one shard; reads only its bytes."""
        name = shard.tensor
        if name not in self._shapes:
            raise ConversionError(f"{self._folder}: its config.json implies no tensor {name}")
        file = SINGLE_NAME if self._file_of is None else self._file_of.get(name)
        if file is None:
            raise ConversionError(f"{self._folder / INDEX_NAME} has no tensor {name}")
        handle = self._handle(file)
        try:
            view = handle.get_slice(name)
        except SafetensorError as error:
            raise ConversionError(f"{self._folder / file} has no tensor {name}") from error
        got = tuple(view.get_shape())
        if got != self._shapes[name] or any(
            high > size for high, size in zip(shard.box.stop, got, strict=True)
        ):
            raise ConversionError(
                f"{name} has shape {got} in {self._folder / file}, "
                f"expected {self._shapes[name]} with region {shard.box}"
            )
        return view[shard.box.slices]


def read_index(folder: Path) -> dict[str, str] | None:
    """Return tensor -> file of a sharded checkpoint; None where it is one file."""
    index = folder / INDEX_NAME
    if not index.is_file():
        if not (folder / SINGLE_NAME).is_file():
            raise ConversionError(f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}")
        return None
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConversionError(f"{index} is not a safetensors index: {error!r}") from error
    if not isinstance(weight_map, dict):
        raise ConversionError(f"{index}: weight_map is a {type(weight_map).__name__}")
    return weight_map


def check_params(manifest: RankManifest, params: Mapping[str, Tensor]) -> None:
    """Compare live parameters with a manifest.

    Raises:
        ConversionError: a parameter that one side lacks, or whose shape differs.
    """
    for param in manifest.params:
        live = params.get(param.name)
        if live is None:
            raise ConversionError(f"rank {manifest.rank} has no parameter {param.name}")
        if tuple(live.shape) != param.shape:
            raise ConversionError(
                f"{param.name} of rank {manifest.rank} has shape {tuple(live.shape)}, "
                f"expected {param.shape}"
            )
    unknown = sorted(set(params) - {param.name for param in manifest.params})
    if unknown:
        raise ConversionError(
            f"rank {manifest.rank} has parameters that its manifest does not know: "
            f"{', '.join(unknown)}"
        )


@torch.no_grad()
def load_hf(folder: Path, manifest: RankManifest, params: Mapping[str, Tensor]) -> None:
    """Fill ``params`` in place from the checkpoint in ``folder``; padding becomes zero.

    Raises:
        ConversionError: a tensor or file is missing, a shape differs (name, got, expected, file),
            or ``params`` are not those of the manifest.
    """
    check_params(manifest, params)
    with ExitStack() as files:
        checkpoint = _Checkpoint(folder, files)
        for param in manifest.params:
            live = params[param.name]
            if _has_padding(param):
                live.zero_()
            for shard in param.shards:
                live[shard.local.slices].copy_(checkpoint.read(shard))


def stream_params(
    folder: Path, manifest: RankManifest, dtype_of: Callable[[LocalParam], torch.dtype]
) -> Iterator[tuple[LocalParam, Tensor]]:
    """Yield each parameter with the values the checkpoint gives it; padding is zero.

    One parameter is in memory at a time.

    Raises:
        ConversionError: as `load_hf`.
    """
    with ExitStack() as files:
        checkpoint = _Checkpoint(folder, files)
        for param in manifest.params:
            values = torch.zeros(param.shape, dtype=dtype_of(param))
            for shard in param.shards:
                values[shard.local.slices].copy_(checkpoint.read(shard))
            yield param, values


def _has_padding(param: LocalParam) -> bool:
    return sum(shard.box.numel for shard in param.shards) < torch.Size(param.shape).numel()


class HfWriter:
    """Write whole tensors, one at a time, into a new Hugging Face folder.

    The folder appears under its name only when all is written. Holds at most ``max_shard_bytes``
    and one tensor in memory::

        with HfWriter(source_folder, target_folder) as writer:
            writer.add("model.embed_tokens.weight", tensor)
    """

    def __init__(self, source: Path, target: Path, max_shard_bytes: int = 4 << 30):
        """Copy what is not weights from ``source``; raise ConversionError where ``target`` exists."""
        if target.exists():
            raise ConversionError(f"{target} exists already")
        if not (source / "config.json").is_file():
            raise ConversionError(f"model folder {source} has no config.json")
        self._target = target
        self._folder = target.with_name(f"{target.name}.partial")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for path in sorted(source.iterdir()):
            if travels(path):
                shutil.copy2(path, self._folder / path.name)
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def __enter__(self) -> HfWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of one tensor; writes a file when it would exceed the shard size."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def _shard_path(self, index: int) -> Path:
        return self._folder / f"shard-{index:05d}.safetensors"

    def _flush(self) -> None:
        path = self._shard_path(len(self._shards))
        save_file(self._pending, path, metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0

    def close(self) -> None:
        """Write what is left and the index, and give the folder its name."""
        if self._pending:
            self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for index, tensors in enumerate(self._shards):
            name = f"model-{index + 1:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE_NAME
            self._shard_path(index).rename(self._folder / name)
            weight_map.update(dict.fromkeys(tensors, name))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / INDEX_NAME).write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n"
            )
        self._folder.rename(self._target)
