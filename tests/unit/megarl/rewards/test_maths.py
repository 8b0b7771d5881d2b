"""The maths reward on GSM8K's reference solutions and on answers of many notations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.rewards.maths import score

GOLDEN = Path(__file__).parents[3] / "golden" / "gsm8k_40.jsonl"
ROWS = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
FINISHED, CUT = {"finished": True}, {"finished": False}


def _final(solution: str) -> str:
    return solution.rpartition("#### ")[2]


def test_the_excerpt_holds_separators_and_negative_numbers() -> None:
    finals = [_final(row["answer"]) for row in ROWS]
    assert len(finals) == 40
    assert any("," in final for final in finals)
    assert any("-" in final for final in finals)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: _final(row["answer"]))
def test_reference_solutions_score_one_and_perturbed_ones_zero(row: dict) -> None:
    solution, final = row["answer"], _final(row["answer"])
    plain = final.replace(",", "")
    steps = solution.rpartition("#### ")[0]
    right = [solution, f"{steps}#### {plain}.00", f"{steps}\\boxed{{{plain}}}"]
    right += [f"{steps}So the answer is {final}.", f"{steps}#### {final} dollars"]
    wrong = [f"{steps}#### {int(plain) + 1}", f"{steps}#### {-int(plain)}", f"#### {plain}.5"]
    wrong += [f"{solution}\nWait.\n#### {int(plain) - 1}", f"\\boxed{{{plain}0}}", "####", ""]
    for reference in (solution, final, plain):
        assert [score("", text, reference, FINISHED) for text in right] == [1.0] * len(right)
        assert [score("", text, reference, FINISHED) for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("1/2", r"\boxed{\frac{1}{2}}"),
        ("0.5", r"so $\boxed{\dfrac12}$."),
        (r"\frac{3}{4}", "#### 0.75"),
        ("3/4", "it is 3/4"),
        ("x+1", r"\boxed{1+x}"),
        (r"5\pi", r"\boxed{5 \pi}"),
        ("(1,2]", r"\boxed{(1, 2]}"),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
        ("50%", r"\boxed{50\%}"),
        ("18", r"\boxed{18\text{ dollars}}"),
        ("18", r"#### \boxed{18}"),
        ("-5", "a loss: -$5"),
        ("70000", "#### $70,000"),
        ("12", "5-12"),
        ("Solution: \\boxed{7}", "7"),
    ],
)
def test_equal_answers_in_another_notation_score_one(answer: str, response: str) -> None:
    assert score("", response, answer, FINISHED) == 1.0


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("2", r"\boxed{2x}"),
        ("5", r"\boxed{5 pi}"),
        ("(1,2]", r"\boxed{(1,2)}"),
        ("1/3", "#### 0.3333"),
        ("1234", "#### 12,34"),
        ("3", "#### 1/0"),
        ("3", "no number at all"),
        ("3", "#### " + "3" * 5000),
        ("3", r"\boxed{\frac{\frac{\frac{}{}"),
    ],
)
def test_unequal_or_malformed_answers_score_zero(answer: str, response: str) -> None:
    assert score("", response, answer, FINISHED) == 0.0


def test_a_cut_response_scores_only_by_a_closed_box() -> None:
    assert score("", r"\boxed{18} and then", "18", CUT) == 1.0
    assert score("", r"\boxed{1", "1", CUT) == 0.0
    assert score("", "#### 18", "18", CUT) == 0.0
    assert score("", "it is 18", "18", CUT) == 0.0
