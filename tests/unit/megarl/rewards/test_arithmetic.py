"""The reward of the built-in task, on responses a model may give."""

from __future__ import annotations

import pytest

from megarl.rewards.arithmetic import score


@pytest.mark.parametrize(
    ("response", "finished", "expected"),
    [
        ("#13", True, 1.0),
        ("9+4=13#13", True, 1.0),
        ("9+4=99#13", True, 1.0),  # nothing looks at the steps
        ("#12#13", True, 1.0),
        ("#13#12", True, 0.0),
        ("#13", False, 0.0),  # cut
        ("13", True, 0.0),  # no mark
        ("#13=", True, 0.0),
        ("#013", True, 0.0),
        ("#", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_only_a_finished_right_number_after_the_last_mark_scores(
    response: str, finished: bool, expected: float
) -> None:
    assert score("9+4=?", response, "13", {"finished": finished}) == expected
