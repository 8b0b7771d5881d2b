"""Measure conversion against ``cp``: ``python -m tools.bench_convert --json``.

Writes a synthetic checkpoint of Llama's shape, copies its files with ``cp``, and converts them to
Megatron's torch_dist with the command that a user calls; takes turns, and takes the median. A
conversion's seconds are from the first look at the source to the target's name, planning and digests
included. Python's start and imports, the same for a model of any size, are in ``command_seconds``
only. Peak memory is that of the whole command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_bridge.io.hf_store import hf_target
from megatron_bridge.io.store import Form, TargetFile
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.models.hf_config import hf_config
from megatron_bridge.spec import ModelSpec

_PIECE_BYTES = 8 << 20
_FINITE = np.uint64(0xBFFFBFFFBFFFBFFF)  # clears the highest bit of each bfloat16's exponent


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One conversion."""

    seconds: float
    command_seconds: float  # with Python's start
    peak_rss_bytes: int


def spec_of_bytes(num_bytes: float) -> ModelSpec:
    """Return Llama-3.1-8B with so many layers that its bfloat16 weights have about this size.

    Below 4 GB all its widths are an eighth of what they are.
    """
    scale = 1 if num_bytes >= 4e9 else 8
    spec = ModelSpec(
        family="llama",
        vocab_size=128256 // scale,
        hidden_size=4096 // scale,
        ffn_size=14336 // scale,
        num_layers=1,
        num_heads=32 // scale,
        num_kv_heads=8 // scale,
        head_dim=128,
        norm_eps=1e-5,
        rope_theta=5e5,
        max_positions=8192,
        tied_embeddings=False,
    )
    sizes = [(2 * prod(tensor.shape), tensor.layer) for tensor in canonical_tensors(spec)]
    outer = sum(size for size, layer in sizes if layer is None)
    inner = sum(size for size, layer in sizes if layer is not None)
    return replace(spec, num_layers=max(1, round((num_bytes - outer) / inner)))


def write_checkpoint(spec: ModelSpec, folder: Path) -> int:
    """Write random finite bfloat16 weights, no block of them zero; return the bytes of tensors."""
    dtypes = {tensor.name: "bfloat16" for tensor in canonical_tensors(spec)}
    config = json.dumps(hf_config(spec)).encode()
    target = hf_target(spec, Form(dtypes=dtypes), {"config.json": config})
    folder.mkdir(parents=True)
    random = np.random.Generator(np.random.SFC64(0))
    for file in target.files:
        _write_random(folder / file.name, file, random)
    for name, content in target.closing.items():
        (folder / name).write_bytes(content)
    os.sync()
    return sum(file.size for file in target.files)


def _write_random(path: Path, file: TargetFile, random: np.random.Generator) -> None:
    with path.open("wb") as stream:
        for _, content in file.fixed:
            stream.write(content)
        rest = file.size - stream.tell()
        while rest:
            size = min(rest, _PIECE_BYTES)
            words = random.integers(0, 2**64, -(-size // 8), dtype=np.uint64) & _FINITE
            stream.write(words.tobytes()[:size])
            rest -= size


def measure_copy(source: Path, target: Path) -> float:
    """Return the seconds in which ``cp`` copies a folder's bytes; removes the copy."""
    start = time.perf_counter()
    subprocess.run(
        ["cp", "-r", "--reflink=never", "--sparse=never", str(source), str(target)], check=True
    )
    seconds = time.perf_counter() - start
    _remove(target)
    return seconds


def measure_conversion(source: Path, target: Path, workers: int) -> Measured:
    """Return what one conversion takes; removes what it wrote.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "tools.convert_checkpoint", "hf-to-megatron", "--json"]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*command, str(source), str(target), "--workers", str(workers)], stdout=said
        )
        code = process.wait()
        seconds = time.perf_counter() - start
        if code:
            sys.exit(f"the conversion ended with exit code {code}")
        said.seek(0)
        found = json.loads(said.read())
    _remove(target)
    return Measured(
        seconds=found["seconds"],
        command_seconds=seconds,
        peak_rss_bytes=found["peak_rss_bytes"],
    )


def _remove(folder: Path) -> None:
    """Delete a folder and let the disk come to rest: each measurement starts alike."""
    shutil.rmtree(folder)
    os.sync()


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write, copy and convert; return the figures."""
    spec = spec_of_bytes(arguments.gigabytes * 1e9)
    num_bytes = write_checkpoint(spec, folder / "source")
    copies: list[float] = []
    conversions: list[Measured] = []
    for _ in range(arguments.repeats):
        copies.append(measure_copy(folder / "source", folder / "copy"))
        conversions.append(
            measure_conversion(folder / "source", folder / "converted", arguments.workers)
        )
    copied, converted = median(copies), median(found.seconds for found in conversions)
    command = median(found.command_seconds for found in conversions)
    largest = 2 * spec.vocab_size * spec.hidden_size
    return {
        "copy_seconds": copied,
        "convert_seconds": converted,
        "ratio_to_copy": copied / converted,  # of throughputs
        "peak_rss_bytes": max(found.peak_rss_bytes for found in conversions),
        "largest_tensor_bytes": largest,
        "peak_rss_bound_bytes": 2 * largest + 500_000_000,
        "command_seconds": command,
        "command_ratio_to_copy": copied / command,
        "bytes": num_bytes,
        "convert_bytes_per_second": num_bytes / converted,
        "workers": arguments.workers,
        "all_copy_seconds": copies,
        "all_convert_seconds": [found.seconds for found in conversions],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_convert", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of the checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder in it")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(arguments, Path(folder))
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    table = Table("figure", "value", title="Conversion of a Hugging Face folder to torch_dist")
    for name, value in found.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value}")
    Console().print(table)


if __name__ == "__main__":
    main()
