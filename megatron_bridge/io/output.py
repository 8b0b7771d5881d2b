"""New files while worker threads fill them, and the threads.

Called by `convert`. A file is made when its first region is written, and gets its name when its
last one is there; a region is written and digested from its beginning to its end by one thread.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.partial import PartialFolder, Record
from megatron_bridge.io.store import Chunk, TargetFile

_PIECE_BYTES = 4 << 20  # read at once to digest a file
Item = TypeVar("Item")


def in_threads(
    items: Iterable[Item], work: Callable[[Item, threading.Event], None], workers: int
) -> None:
    """Do ``work`` on each item, in about their order; raise what the first failure raised.

    Workers consume items until there are none, or until the event is set that each gets with its
    item: one of them has failed, or the caller is interrupted.
    """
    remaining, lock, stop = iter(list(items)), threading.Lock(), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with lock:
                try:
                    item = next(remaining)
                except StopIteration:
                    return
            work(item, stop)

    with ThreadPoolExecutor(workers, "convert") as pool:
        loops = [pool.submit(loop) for _ in range(workers)]
        try:
            wait(loops, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for ended in loops:
        ended.result()


def file_digest(path: Path, offset: int, num_bytes: int) -> str:
    """Return the SHA-256 of a part of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(offset)
        while num_bytes:
            content = stream.read(min(num_bytes, _PIECE_BYTES))
            if not content:
                break
            digest.update(content)
            num_bytes -= len(content)
    return digest.hexdigest()


class Region:
    """One region of a new file, appended to row by row."""

    def __init__(self, descriptor: int, name: str, chunk: Chunk):
        self._descriptor, self._name, self._chunk = descriptor, name, chunk
        self._at = chunk.offset
        self._digest = hashlib.sha256()

    def append(self, values: Tensor) -> int:
        """Write the next rows, which lie row-major in memory; return their bytes."""
        content = memoryview(values.reshape(-1).view(torch.uint8).numpy().data)
        self._digest.update(content)
        written = 0
        while written < len(content):
            written += os.pwrite(self._descriptor, content[written:], self._at + written)
        self._at += written
        return written

    def record(self, sources: list[Record]) -> Record:
        """Return what the manifest says of the region.

        Raises:
            ConversionError: not all of it was written.
        """
        chunk = self._chunk
        if self._at - chunk.offset != chunk.nbytes:
            raise ConversionError(
                f"{self._name}: {self._at - chunk.offset} bytes were written to {chunk.file}, "
                f"expected {chunk.nbytes}"
            )
        return {
            "name": self._name,
            "box": [list(chunk.box.start), list(chunk.box.stop)],
            "dtype": chunk.dtype,
            "file": str(chunk.file),
            "offset": chunk.offset,
            "bytes": chunk.nbytes,
            "sha256": self._digest.hexdigest(),
            "sources": sources,
        }


class Output:
    """One new file: made by the first `region`, finished by the last `end_job`, else left by `close`.

    Threads share it; ``lock`` is one for all files of a conversion, whose journal is one too.
    """

    def __init__(
        self, partial: PartialFolder, file: TargetFile, num_jobs: int, lock: threading.Lock
    ):
        self._partial, self._file, self._lock = partial, file, lock
        self._missing = num_jobs
        self._descriptor: int | None = None
        self._records: list[Record] = []

    def region(self, name: str, chunk: Chunk) -> Region:
        """Return a region of the file, to be appended to."""
        with self._lock:
            if self._descriptor is None:
                self._descriptor = self._make()
            return Region(self._descriptor, name, chunk)

    def _make(self) -> int:
        path = self._partial.unfinished_path(self._file.name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(descriptor, self._file.size)
        for at, content in self._file.fixed:
            os.pwrite(descriptor, content, at)
        return descriptor

    def end_job(self, records: list[Record]) -> None:
        """Take note of what one job has written; the last one gives the file its name."""
        with self._lock:
            self._records += records
            self._missing -= 1
            if self._missing:
                return
            self._close()
            self._records.sort(key=lambda record: record["offset"])
            self._partial.finish(self._file.name, {"tensors": self._records})

    def close(self) -> None:
        """Let go of a file that is not finished."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
