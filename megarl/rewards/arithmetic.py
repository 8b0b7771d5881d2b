"""Reward of the built-in "show your work" task; called in reward processes."""

from __future__ import annotations


def score(prompt: str, response: str, answer: str, extra: dict) -> float:
    """Return 1 if the response ended by itself and its text after the last '#' is the answer."""
    _, mark, last = response.rpartition("#")
    return float(bool(mark) and extra["finished"] and last == answer)
