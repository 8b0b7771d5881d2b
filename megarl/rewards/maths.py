"""Reward for maths answers (GSM8K, MATH and their like); called in reward processes.

Plain numbers are compared here, exactly. Anything else (fractions of LaTeX, intervals, symbols) is
left to the `math-verify` library, without its own timeouts: the pool's killable processes are the
timeout.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

MAX_ANSWER_CHARACTERS = 1000  # longer is no answer, and int() of it would be slow or refused

# A minus only where it is a sign: "5-12" ends in 12.
_NUMBER = re.compile(r"(?:(?<![\w)])-\s*)?[$€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
_PLAIN = re.compile(
    r"(?P<sign>-?)\s*[$€£]?\s*"  # -$5, $ 5
    r"(?P<whole>\d+|\d{1,3}(?:,\d{3})+)?(?P<decimals>\.\d+)?"
    r"(?:\s*/\s*(?P<divisor>\d+))?"
    r"(?:\s*[%°]|\s+(?!pi\b)[A-Za-z]{2,}(?:\s+[A-Za-z]+)*)?"  # a unit: "18 dollars", but not "5 pi"
    r"\s*\.?"
)
_LATEX_NOISE = re.compile(
    r"\\(?:text|mathrm|mbox)\{(?P<unit>[^{}]*)\}|\\[!,; ]|\\(?=[$%])|\$(?=\s*$)"
)


def score(prompt: str, response: str, answer: str, extra: dict) -> float:
    """Return 1 if the response's final answer equals `answer`, else 0.

    The final answer is what follows the last "####", else the last \\boxed{}, else the last number.
    A response that was cut scores only by a \\boxed{} it had closed. `answer` may be the answer
    alone or a whole solution ending in "#### 18" or holding a \\boxed{}.
    """
    expected = _marked_answer(answer) or answer.strip()
    given = _marked_answer(response) if extra["finished"] else _last_boxed(response)
    if given is None and extra["finished"]:
        numbers = _NUMBER.findall(response)
        given = numbers[-1].rstrip(",") if numbers else None
    if not given or len(given) > MAX_ANSWER_CHARACTERS:
        return 0.0
    expected_number, given_number = _plain_number(expected), _plain_number(given)
    if expected_number is not None and given_number is not None:
        return float(expected_number == given_number)
    return float(_verify(expected, given))


def _marked_answer(text: str) -> str | None:
    """Return the line after the last "####", else the last \\boxed{}'s content, else None."""
    _, mark, rest = text.rpartition("####")
    if mark:
        line = rest.strip().partition("\n")[0].strip()
        return _last_boxed(line) or line
    return _last_boxed(text)


def _last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{..}, or None where there is none or it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    begin = start + len("\\boxed{")
    for position in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def _plain_number(text: str) -> Fraction | None:
    """Return the value of "$1,234.50", "3/4", "50%" or "18 dollars", or None for anything else."""
    text = (
        _LATEX_NOISE.sub(lambda match: f" {match['unit'] or ''}", text).strip().strip("$").strip()
    )
    match = _PLAIN.fullmatch(text)
    if not match or not (match["whole"] or match["decimals"]):
        return None
    divisor = int(match["divisor"] or 1)
    if divisor == 0:
        return None
    value = (
        Fraction(f"{(match['whole'] or '0').replace(',', '')}{match['decimals'] or ''}") / divisor
    )
    return -value if match["sign"] else value


def _verify(expected: str, given: str) -> bool:
    # Imported when first needed: sympy takes most of a second, and GSM8K rarely needs it.
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of disabled timeouts
    gold, target = (parse(f"${text.strip('$')}$", parsing_timeout=0) for text in (expected, given))
    return verify(gold, target, timeout_seconds=0)
