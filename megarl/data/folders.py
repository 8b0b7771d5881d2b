"""Folders that appear complete or not at all; used by what this package writes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from megarl.errors import DataError

MANIFEST = "manifest.json"


def write_folder(
    folder: Path, manifest: Mapping[str, object], fill: Callable[[Path], None]
) -> None:
    """Have `fill` write into a temporary folder beside `folder`, then rename it.

    Does nothing where a complete folder with the same manifest stands; replaces one that was
    written with another manifest.

    Raises:
        DataError: `folder` holds something that this function did not write.
    """
    written = folder / MANIFEST
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    if written.is_file() and written.read_text() == text:
        return
    if folder.exists() and not written.is_file() and not _is_empty_folder(folder):
        raise DataError(
            f"{folder} already holds other files (no {MANIFEST}): choose another folder, "
            "or remove it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = folder.with_name(f".{folder.name}.{os.getpid()}.making")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    making.mkdir()
    try:
        fill(making)
        (making / MANIFEST).write_text(text)
        if folder.exists():
            folder.rename(old)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _is_empty_folder(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())
