"""The built-in "show your work" task: problems, demonstrations and the files of a data set.

A prompt is a sum of up to six numbers, ``14+5-7=?``. A worked response computes step by step,
``14+5=19;19-7=12#12``; a blunt one only states the result, ``#12``. The demonstrations first teach
the work and then the habit of being blunt, so that reinforcement learning finds a model that can,
but mostly does not, show its work. Called by the quick start and by tests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.data.folders import write_folder

LEVELS = (1, 2, 3, 4, 5)  # number of operations
WEIGHTS = (0.15, 0.30, 0.25, 0.18, 0.12)
LARGEST = 99  # every running total stays in 0..99
EVAL_SEED = 12345  # the same held-out problems for every training seed
TRAIN_SEED_OFFSET = 1000
WORKED_SHARE = 0.3  # of the second stage of demonstrations


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One prompt with its result and both ways of answering it."""

    prompt: str
    answer: str
    worked: str
    blunt: str


def draw_problem(rng: random.Random) -> Problem:
    """Draw the next problem from `rng`."""
    num_operations = rng.choices(LEVELS, WEIGHTS)[0]
    total = rng.randint(1, 20)
    terms, steps = [str(total)], []
    for _ in range(num_operations):
        operation = rng.choice(["+"] * (total < LARGEST) + ["-"] * (total > 0))
        operand = rng.randint(1, min(9, LARGEST - total if operation == "+" else total))
        after = total + operand if operation == "+" else total - operand
        terms.append(f"{operation}{operand}")
        steps.append(f"{total}{operation}{operand}={after}")
        total = after
    return Problem(
        prompt="".join(terms) + "=?",
        answer=str(total),
        worked=";".join(steps) + f"#{total}",
        blunt=f"#{total}",
    )


def write_dataset(
    folder: Path,
    seed: int,
    num_train: int,
    num_eval: int = 256,
    sft_worked: int = 32000,
    sft_mixed: int = 6400,
) -> None:
    """Write `sft.jsonl`, `train.jsonl` and `eval.jsonl`; no held-out prompt is in the first two.

    `sft.jsonl` is in training order: `sft_worked` worked demonstrations, then `sft_mixed` of which
    WORKED_SHARE are worked. Deterministic; the folder appears complete or not at all, and one that
    was written with the same parameters is kept.

    Raises:
        DataError: `folder` holds other files.
    """
    parameters = {"seed": seed, "num_train": num_train, "num_eval": num_eval}
    parameters |= {"sft_worked": sft_worked, "sft_mixed": sft_mixed}

    def fill(making: Path) -> None:
        held_out_rng = random.Random(EVAL_SEED)
        held_out = [draw_problem(held_out_rng) for _ in range(num_eval)]
        prompts = {problem.prompt for problem in held_out}
        _write_rows(making / "eval.jsonl", (_prompt_row(problem) for problem in held_out))
        train = _draw_unseen(random.Random(TRAIN_SEED_OFFSET + seed), prompts, num_train)
        _write_rows(making / "train.jsonl", (_prompt_row(problem) for problem in train))
        rng = random.Random(seed)
        demonstrations = _draw_unseen(rng, prompts, sft_worked + sft_mixed)
        _write_rows(
            making / "sft.jsonl",
            (
                _demonstration_row(problem, index < sft_worked or rng.random() < WORKED_SHARE)
                for index, problem in enumerate(demonstrations)
            ),
        )

    write_folder(folder, {"task": "show your work"} | parameters, fill)


def _draw_unseen(rng: random.Random, held_out: set[str], count: int) -> Iterator[Problem]:
    while count > 0:
        problem = draw_problem(rng)
        if problem.prompt not in held_out:
            count -= 1
            yield problem


def _prompt_row(problem: Problem) -> dict[str, str]:
    return {"prompt": problem.prompt, "answer": problem.answer}


def _demonstration_row(problem: Problem, worked: bool) -> dict[str, str]:
    return {"prompt": problem.prompt, "response": problem.worked if worked else problem.blunt}


def _write_rows(file: Path, rows: Iterator[dict[str, str]]) -> None:
    with file.open("w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
