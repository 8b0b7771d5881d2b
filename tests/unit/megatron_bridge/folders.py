"""Hugging Face folders of made-up models, and conversions of them in processes of their own."""

import json
import resource
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_bridge.conversions import Options, hf_to_megatron
from megatron_bridge.convert import Conversion, Converter
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.models.hf_config import hf_config
from megatron_bridge.spec import ModelSpec
from tests.unit.megatron_bridge.checkpoints import Tensors, hf_tensors


def random_tensors(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    torch.manual_seed(0)
    own = {tensor.name: tensor.dtype for tensor in canonical_tensors(spec)}
    return {
        name: torch.randn(tensor.shape).to(torch.float32 if own[name] else dtype)
        for name, tensor in hf_tensors(spec).items()
    }


def write_hf(folder: Path, spec: ModelSpec, tensors: Tensors, files: int = 2) -> Path:
    """Write a folder with the safetensors library, in several files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(spec)))
    (folder / "tokenizer.json").write_text("{}")
    names, weight_map = list(tensors), {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name].clone() for name in names[number::files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load_hf(folder: Path) -> Tensors:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def start_conversion(conversion: Conversion) -> BaseProcess:
    """Begin a conversion in a process that has imported everything already."""
    process = _CONTEXT.Process(target=_convert, args=(conversion,))
    process.start()
    return process


def peak_growth(source: Path, target: Path, dtype: str) -> int:
    """Convert in a new process; return by how many bytes its peak memory grew while it ran."""
    growth = _CONTEXT.SimpleQueue()
    process = _CONTEXT.Process(target=_measure, args=(source, target, dtype, growth))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return growth.get()


def _convert(conversion: Conversion) -> None:
    torch.set_num_threads(1)
    Converter(conversion).run(lambda _: None)


def _measure(source: Path, target: Path, dtype: str, growth: object) -> None:
    torch.set_num_threads(1)
    converter = Converter(hf_to_megatron(source, target, Options(dtype=dtype)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    converter.run(lambda _: None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth.put((peak - before) * 1024)  # type: ignore[attr-defined]


_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.unit.megatron_bridge.folders"])
