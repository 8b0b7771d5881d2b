"""What ``megarl convert`` shows: progress, the plan of a dry run, contents, differences.

Called by `megarl.convert`.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from megatron_bridge.convert import Converter
from megatron_bridge.io.store import Stored
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.operations import ITEMSIZE
from megatron_bridge.verify import Comparison

_SHOWN = 10  # differences
_PROBE_BYTES = 64 << 20


@contextmanager
def counting(console: Console, what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a bar with rate and time left; yields what moves it on, from any thread."""
    columns: tuple[ProgressColumn, ...] = (
        (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    )
    with Progress(
        TextColumn(what), BarColumn(), *columns, TimeRemainingColumn(), console=console
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def figures(converter: Converter, seconds: float) -> dict[str, float]:
    """Return a conversion in numbers, with the seconds it will take or took."""
    target = converter.conversion.target
    return {
        "parameters": converter.num_parameters,
        "tensors": len(canonical_tensors(target.spec)),
        "bytes": converter.num_bytes,
        "largest_tensor_bytes": converter.largest_tensor_bytes,
        "peak_bytes": converter.peak_bytes,
        "files": len(target.files) + len(target.closing),
        "workers": converter.conversion.workers,
        "seconds": seconds,
    }


def peak_rss_bytes() -> int:
    """Return the most memory that this process ever had, mapped files included.

    Not that of `getrusage`, which begins with what the process had that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def plan_table(converter: Converter, seconds: float, speed: float) -> Group:
    """Return the whole plan of a conversion, with what it is estimated to take."""
    source, target = converter.conversion.source, converter.conversion.target
    files = Table(title=f"{source.format} -> {target.format}: {converter.conversion.folder}")
    for column in ("file", "tensors", "bytes"):
        files.add_column(column, justify="left" if column == "file" else "right")
    for file in target.files:
        files.add_row(file.name, f"{len(file.chunks):,}", f"{file.size:,}")
    for name, content in target.closing.items():
        files.add_row(name, "", f"{len(content):,}")
    parameters = converter.num_parameters
    facts = Table(show_header=False)
    for what, said in (
        ("family", target.spec.family),
        ("parameters", f"{parameters:,} ({parameters / 1e9:.2f}e9)"),
        ("tensors", f"{len(canonical_tensors(target.spec)):,}"),
        ("bytes to write", f"{converter.num_bytes:,} ({converter.num_bytes / 1e9:.2f} GB)"),
        ("largest tensor", f"{converter.largest_tensor_bytes:,} bytes"),
        ("peak memory", f"{converter.peak_bytes:,} bytes"),
        ("files", f"{len(target.files) + len(target.closing)}"),
        ("workers", f"{converter.conversion.workers}"),
        ("time", f"{_duration(seconds)}, if the disk keeps up with {speed / 1e9:.1f} GB/s"),
        ("plan", converter.plan.digest[:16]),
        *(("left out", f"{name}: {why}") for name, why in source.dropped.items()),
    ):
        facts.add_row(what, said)
    return Group(files, facts)


def estimate(converter: Converter) -> tuple[float, float]:
    """Return seconds, and bytes per second that this machine digests and hands to its files."""
    parents = converter.conversion.folder.absolute().parents
    content = bytes(_PROBE_BYTES)
    with tempfile.TemporaryFile(dir=next(path for path in parents if path.is_dir())) as file:
        start = time.perf_counter()
        hashlib.sha256(content).digest()
        file.write(content)
        seconds = time.perf_counter() - start
    speed = converter.conversion.workers * _PROBE_BYTES / seconds
    return converter.num_bytes / speed, speed


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def contents_table(stored: Stored) -> Group:
    """Return every stored tensor, and what they are together."""
    several = len({tensor.rank for tensor in stored.tensors}) > 1
    tensors = Table(title=str(stored.folder))
    for column in (*(("rank",) if several else ()), "tensor", "shape", "dtype", "bytes"):
        tensors.add_column(column, justify="left" if column == "tensor" else "right")
    for tensor in stored.tensors:
        size = prod(tensor.shape) * ITEMSIZE.get(tensor.dtype, 0)
        row = (tensor.name, str(list(tensor.shape)), tensor.dtype, f"{size:,}" if size else "?")
        tensors.add_row(*((str(tensor.rank),) if several else ()), *row)
    spec = stored.spec
    parameters = sum(prod(tensor.shape) for tensor in canonical_tensors(spec))
    kept = [chunk for chunks in stored.chunks.values() for chunk in chunks]
    dtypes = Counter({})
    for chunk in kept:
        dtypes[chunk.dtype] += chunk.nbytes
    facts = Table(show_header=False)
    for what, said in (
        ("format", stored.format),
        ("family", spec.family),
        (
            "layers",
            f"{spec.num_layers}" + f" and {spec.num_mtp_layers} MTP" * bool(spec.num_mtp_layers),
        ),
        ("experts", f"{spec.num_experts} a layer" if spec.num_experts else "none"),
        ("parameters", f"{parameters:,} ({parameters / 1e9:.2f}e9)"),
        ("tensors", f"{len(stored.tensors):,} in {len({chunk.file for chunk in kept})} files"),
        ("bytes", f"{sum(chunk.nbytes for chunk in kept):,}"),
        ("dtypes", ", ".join(f"{dtype} {size:,}" for dtype, size in dtypes.most_common())),
        ("parallel layout", stored.layout),
        ("ties", "lm_head = embed_tokens" if spec.tied_embeddings else "none"),
        *(("left out", f"{name}: {why}") for name, why in stored.dropped.items()),
    ):
        facts.add_row(what, said)
    return Group(tensors, facts)


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield what `verify` found, the first differences first."""
    for difference in (*comparison.sizes, *comparison.differences[:_SHOWN]):
        yield f"[red]{difference.name}[/red] {difference.what}"
    rest = len(comparison.differences) - _SHOWN
    if rest > 0:
        yield f"and {rest} more"
    for difference in comparison.dtypes[:1]:
        yield (
            f"{len(comparison.dtypes)} tensors are equal but for their dtype: "
            f"{difference.name} {difference.what}"
        )
    same = comparison.num_tensors - len(comparison.differences)
    colour = "green" if comparison.is_equal else "red"
    yield (
        f"[{colour}]{same} of {comparison.num_tensors} tensors agree[/{colour}] "
        f"({comparison.num_elements:,} elements compared)"
    )
