"""Write docs/config.md from the schema: ``python -m tools.config_reference``.

The text behind each key is the comment behind its field in the source, so there is one place to
change. A test compares the file with what this prints.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import get_type_hints

from megarl.config import RunConfig

TARGET = Path(__file__).parents[1] / "docs" / "config.md"
HEAD = """# Configuration

Every key of a run's YAML file, its type, its default and its meaning. On the command line a key is
`group.key=value`; an unknown key is an error that names the nearest one. This page is made by
`python -m tools.config_reference` from the dataclasses in `megarl/config.py`.
"""
_FIELD = re.compile(r"^    (?P<name>\w+): .*?  # (?P<text>.*)$")


def _comments(schema: type) -> dict[str, str]:
    lines = inspect.getsource(schema).splitlines()
    found = (_FIELD.match(line) for line in lines)
    return {match["name"]: match["text"] for match in found if match}


def _type_name(kind: object) -> str:
    if isinstance(kind, type):
        if issubclass(kind, StrEnum):
            return " \\| ".join(member.value for member in kind)
        return kind.__name__
    return str(kind).replace("|", "\\|")


def _default(value: object) -> str:
    if isinstance(value, StrEnum):
        value = value.value
    if isinstance(value, bool):
        value = str(value).lower()
    return "" if value in ("", None) else f"`{value}`"


def _section(schema: type, prefix: str) -> list[str]:
    hints, comments, defaults = get_type_hints(schema), _comments(schema), schema()
    rows, groups = [], []
    for item in fields(schema):
        kind = hints[item.name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            groups += _section(kind, f"{prefix}{item.name}.")
            continue
        name, default = _type_name(kind), _default(getattr(defaults, item.name))
        rows.append(f"| `{prefix}{item.name}` | {name} | {default} | {comments[item.name]} |")
    title = f"## {prefix.rstrip('.') or 'The run'}"
    table = [
        "",
        title,
        "",
        "| key | type | default | meaning |",
        "| --- | --- | --- | --- |",
        *rows,
    ]
    return (table if rows else []) + groups


def reference() -> str:
    """Return the page."""
    return HEAD + "\n".join(_section(RunConfig, "")) + "\n"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
