"""A checkpoint while it is written: files in a folder beside its place, and a journal of those done.

Called by `convert`. The new checkpoint grows in ``NAME.partial/files`` and gets its own name when
all is there, so that a name never stands for less than the whole. A conversion that was killed goes
on from the files that its journal has, once their bytes are found to be those it wrote.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_bridge.errors import ConversionError

_UNFINISHED = ".unfinished"
Record = dict[str, Any]  # what the journal says of a file, as JSON


class PartialFolder:
    """The place where one conversion writes; only one process has it at a time.

    `publish` or `discard` end it. Without them what is there stays for the next attempt.
    """

    def __init__(self, target: Path, fingerprint: str):
        """Take the place for ``target``; ``fingerprint`` tells conversions apart.

        Raises:
            ConversionError: ``target`` exists, another process writes it, or another conversion to
                it was left unfinished.
        """
        refuse_existing(target)
        self._target = target
        self._folder = partial_path(target)
        self.files = self._folder / "files"
        self.files.mkdir(parents=True, exist_ok=True)
        self._journal = (self._folder / "journal.jsonl").open("a+", encoding="utf-8")
        try:
            self._lock()
            self.records = self._read(fingerprint)
            for path in self.files.rglob(f"*{_UNFINISHED}"):
                path.unlink()
        except ConversionError:
            self._journal.close()
            raise

    def __enter__(self) -> PartialFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._journal.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConversionError(f"another process is writing {self._target}") from error

    def _read(self, fingerprint: str) -> dict[str, Record]:
        """Return what an earlier attempt finished, by file."""
        self._journal.seek(0)
        lines = self._journal.read().split("\n")
        torn = lines.pop()  # of a line that a kill cut short
        if torn:
            self._journal.truncate(self._journal.seek(0, os.SEEK_END) - len(torn.encode()))
        records = [json.loads(line) for line in lines]
        if not records:
            self._append({"fingerprint": fingerprint})
            return {}
        if records[0]["fingerprint"] != fingerprint:
            raise ConversionError(
                f"{self._folder} belongs to another conversion, or its source has changed since; "
                "delete it to start anew"
            )
        return {record["file"]: record for record in records[1:]}

    def _append(self, record: Record) -> None:
        self._journal.write(json.dumps(record) + "\n")
        self._journal.flush()

    def unfinished_path(self, name: str) -> Path:
        """Return where a file is written; its folder exists then."""
        path = self.files / f"{name}{_UNFINISHED}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, name: str, record: Record) -> None:
        """Give a file its name and write it down; callers take turns."""
        self.unfinished_path(name).rename(self.files / name)
        self._append({"file": name, **record})
        self.records[name] = {"file": name, **record}

    def forget(self, name: str) -> None:
        """Take a file for not written, whatever the journal has."""
        self.records.pop(name, None)

    def discard(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self._folder)

    def publish(self, closing: Mapping[str, bytes]) -> None:
        """Write the last, small files and let the checkpoint appear under its name.

        Raises:
            ConversionError: the name was taken meanwhile.
        """
        for name, content in closing.items():
            path = self.unfinished_path(name)
            path.write_bytes(content)
            path.rename(self.files / name)
        refuse_existing(self._target)
        self.files.rename(self._target)
        shutil.rmtree(self._folder)


def partial_path(target: Path) -> Path:
    """Return where the checkpoint of this name grows."""
    return target.with_name(f"{target.name}.partial")


def refuse_existing(target: Path) -> None:
    """Raise ConversionError where the name of a new checkpoint is taken."""
    if target.exists() or target.is_symlink():
        raise ConversionError(f"{target} exists already")
