"""Conversion of a checkpoint from files to files: a proven plan, executed window by window.

Called by the command line and by the benchmark. It knows no format: `io.store` says where regions
lie in files, `plan` which go where. Worker threads take a region of a new file each, read it in
windows of some megabytes, cast, digest and write; nothing larger is ever in memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_bridge.errors import BridgeError, ConversionError
from megatron_bridge.io.coverage import check_stored, prove_files
from megatron_bridge.io.gather import Gather, Piece
from megatron_bridge.io.output import Output, file_digest, in_threads
from megatron_bridge.io.partial import PartialFolder, Record, partial_path, refuse_existing
from megatron_bridge.io.store import Chunk, Stored, Target, TargetFile
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.operations import BLOCK, ITEMSIZE
from megatron_bridge.plan import plan

MANIFEST_NAME = "conversion_manifest.json"
_LISTED = 64  # source regions of a tensor; of more the manifest says what they lie within
_PROCESS_BYTES = 350 << 20  # of Python with torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is converted, and how."""

    source: Stored
    target: Target
    folder: Path  # must not exist
    workers: int = 2
    window_bytes: int = 4 << 20


class Job(NamedTuple):
    """One region of a new file, and the region of its scales where it is FP8."""

    file: TargetFile
    name: str
    chunk: Chunk
    scales: tuple[str, Chunk] | None


class Converter:
    """A conversion, planned and proven when it is made; `run` executes it.

    Raises:
        PlanError: the target is not a whole checkpoint, or not one of the source's model.
    """

    def __init__(self, conversion: Conversion):
        self.conversion = conversion
        self._source, self._target = conversion.source, conversion.target
        prove_files(self._target)
        self.plan = plan(self._source.side, self._target.side)
        self._gather = Gather(self._source, self.plan)
        self._params = {param.name: param for param in self._target.side.manifest(0).params}
        self._jobs = {file.name: self._jobs_of(file) for file in self._target.files}

    def _jobs_of(self, file: TargetFile) -> list[Job]:
        """Return the jobs of a file, the largest first, so that the last ones end together."""
        jobs: list[Job] = []
        for name, chunks in file.chunks.items():
            param = self._params[name]
            if not param.derived:
                scales = (param.scales, file.chunks[param.scales][0]) if param.scales else None
                jobs += [Job(file, name, chunk, scales) for chunk in chunks]
        return sorted(jobs, key=lambda job: (-job.chunk.nbytes, job.chunk.offset))

    # --- What will be done --------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of the new files that hold tensors."""
        return sum(file.size for file in self._target.files)

    @property
    def num_parameters(self) -> int:
        """Elements of the model, each once."""
        return sum(prod(tensor.shape) for tensor in canonical_tensors(self._target.spec))

    @property
    def largest_tensor_bytes(self) -> int:
        return max(job.chunk.nbytes for jobs in self._jobs.values() for job in jobs)

    @property
    def peak_bytes(self) -> int:
        """Peak memory to be expected: what each worker has mapped, gathered and cast."""
        largest = max(
            self._rows(job) * job.chunk.box.numel // job.chunk.box.shape[0] * ITEMSIZE["float32"]
            for jobs in self._jobs.values()
            for job in jobs
        )
        return _PROCESS_BYTES + self.conversion.workers * 3 * largest

    # --- Doing it -----------------------------------------------------------------------------

    def run(self, advance: Callable[[int], None]) -> None:
        """Write the checkpoint, or what an attempt that was killed has not written.

        Calls ``advance``, from any thread, with the bytes just written or found in their place.

        Raises:
            ConversionError: the target exists, there is no space, a file of the source is missing or
                truncated, another conversion to this target is unfinished; nothing is written then.
                Or the target cannot hold a value; nothing stays then.
            OSError: reading or writing failed; what is done stays for the next attempt.
        """
        check_stored(self._source)
        folder, workers = self.conversion.folder, self.conversion.workers
        refuse_existing(folder)
        _check_space(folder, self.num_bytes)
        with PartialFolder(folder, self._fingerprint()) as partial:
            done = [file for file in self._target.files if file.name in partial.records]
            in_threads(done, lambda file, _: _recheck(partial, file, advance), workers)
            files = [file for file in self._target.files if file.name not in partial.records]
            lock = threading.Lock()
            outputs = {
                file.name: Output(partial, file, len(self._jobs[file.name]), lock) for file in files
            }
            jobs = [job for file in files for job in self._jobs[file.name]]
            try:
                in_threads(
                    jobs,
                    lambda job, stop: self._write(job, outputs[job.file.name], stop, advance),
                    workers,
                )
            except BridgeError:  # the same input would fail again
                partial.discard()
                raise
            finally:
                for output in outputs.values():
                    output.close()
            partial.publish({**self._target.closing, MANIFEST_NAME: self._manifest(partial)})

    def _fingerprint(self) -> str:
        """Return what differs where another conversion is asked for, or its source has changed."""
        digest = hashlib.sha256(self.plan.digest.encode())
        for file in self._target.files:
            digest.update(repr((file.name, file.size, sorted(file.chunks.items()))).encode())
            for at, content in file.fixed:
                digest.update(b"%d:" % at + content)
        for name, content in self._target.closing.items():
            digest.update(name.encode() + content)
        files = {chunk.file for chunks in self._source.chunks.values() for chunk in chunks}
        for name in sorted(files):
            status = (self._source.folder / name).stat()
            digest.update(f"{name} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()

    def _rows(self, job: Job) -> int:
        """Return the rows of a window: whole blocks, where there are so many."""
        rows = max(1, self.conversion.window_bytes * job.chunk.box.shape[0] // job.chunk.nbytes)
        if rows >= BLOCK or job.scales:
            rows = max(BLOCK, rows - rows % BLOCK)
        return rows

    def _write(
        self, job: Job, output: Output, stop: threading.Event, advance: Callable[[int], None]
    ) -> None:
        """Write one region, with its scales, from its first row to its last."""
        region = output.region(job.name, job.chunk)
        scales = output.region(*job.scales) if job.scales else None
        dtype = getattr(torch, job.chunk.dtype)
        with self._gather.reader(job.name) as reader:
            rows = self._rows(job)
            for box in reader.windows(job.chunk.box, rows, at_pieces=scales is None):
                if stop.is_set():
                    return
                if scales is None:
                    advance(region.append(reader.window(box, dtype)))
                else:
                    elements, factors = reader.quantized_window(box)
                    advance(region.append(elements) + scales.append(factors))
        sources = [_origin(piece) for piece in reader.within(job.chunk.box)]
        records = [region.record(_listed(sources))]
        if scales:
            records.append(scales.record([{"name": job.name}]))
        output.end_job(records)

    def _manifest(self, partial: PartialFolder) -> bytes:
        """Return what the new checkpoint consists of, and where each part of it comes from."""
        files = {name: partial.records[name] for name in sorted(partial.records)}
        manifest = {
            "source": {"format": self._source.format, "name": self._source.folder.name},
            "format": self._target.format,
            "parameters": self.num_parameters,
            "bytes": self.num_bytes,
            "plan": self.plan.digest,
            "dropped": dict(self._source.dropped),
            "tensors": [tensor for record in files.values() for tensor in record["tensors"]],
        }
        return (json.dumps(manifest, indent=1) + "\n").encode()


def _check_space(folder: Path, num_bytes: int) -> None:
    """Raise ConversionError where what is still to be written does not fit."""
    files = partial_path(folder).rglob("*")
    there = sum(path.stat().st_size for path in files if path.is_file())
    parent = next(path for path in folder.absolute().parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    if num_bytes - there > free:
        raise ConversionError(
            f"{parent} has {free} bytes free, expected {num_bytes - there} for {folder}"
        )


def _recheck(partial: PartialFolder, file: TargetFile, advance: Callable[[int], None]) -> None:
    """Forget a file of an earlier attempt that does not hold what was written."""
    if _is_intact(partial.files / file.name, file, partial.records[file.name]["tensors"]):
        advance(file.size)
    else:
        partial.forget(file.name)


def _is_intact(path: Path, file: TargetFile, tensors: list[Record]) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    spans = [(t["offset"], t["bytes"], t["sha256"]) for t in tensors]
    spans += [(at, len(fixed), hashlib.sha256(fixed).hexdigest()) for at, fixed in file.fixed]
    return all(file_digest(path, at, size) == digest for at, size, digest in spans)


def _origin(piece: Piece) -> Record:
    (rank, name), box = piece.source, piece.source_box
    return {"rank": rank, "name": name, "box": [list(box.start), list(box.stop)]}


def _listed(sources: list[Record]) -> list[Record]:
    """Return the regions that a tensor comes from, or of many what they lie within, by tensor."""
    if len(sources) <= _LISTED:
        return sources
    within: dict[tuple[int, str], Record] = {}
    for source in sources:
        known = within.setdefault((source["rank"], source["name"]), {**source, "regions": 0})
        starts, stops = zip(known["box"], source["box"], strict=True)
        known["box"] = [list(map(min, *starts)), list(map(max, *stops))]
        known["regions"] += 1
    return list(within.values())
