"""The built-in task, checked by evaluating its own arithmetic."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megarl.data.arithmetic import draw_problem, write_dataset
from megarl.data.tokenizer import build_character_tokenizer
from megarl.errors import DataError
from megarl.rewards.arithmetic import score

DRAWS = 4000


def _rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_problems_are_right_and_as_long_as_specified() -> None:
    rng = random.Random(0)
    tokenizer = build_character_tokenizer()
    prompts, worked_lengths, num_operations = [], [], []
    for _ in range(DRAWS):
        problem = draw_problem(rng)
        expression, equals, question = problem.prompt.partition("=")
        assert equals + question == "=?"
        assert str(eval(expression)) == problem.answer  # digits, + and - of our own making
        steps, _, result = problem.worked.partition("#")
        for step in steps.split(";"):
            left, _, right = step.partition("=")
            assert eval(left) == int(right)
            assert 0 <= int(right) <= 99
        assert result == problem.answer
        assert problem.blunt == f"#{problem.answer}"
        num_operations.append(steps.count(";") + 1)
        prompts.append(problem.prompt)
        worked_lengths.append(len(problem.worked) + 1)
    prompt_lengths = [len(ids) for ids in tokenizer(prompts)["input_ids"]]
    # the specification's own figures
    assert max(prompt_lengths) <= 15
    assert sum(prompt_lengths) / DRAWS == pytest.approx(10.2, abs=0.15)
    assert sum(worked_lengths) / DRAWS == pytest.approx(22.6, abs=0.5)
    assert 40 <= max(worked_lengths) <= 43
    for level, share in {1: 0.15, 2: 0.30, 3: 0.25, 4: 0.18, 5: 0.12}.items():
        assert num_operations.count(level) / DRAWS == pytest.approx(share, abs=0.03)


def test_the_data_set_holds_out_its_evaluation_prompts(tmp_path: Path) -> None:
    folder = tmp_path / "arithmetic"
    write_dataset(folder, seed=3, num_train=2000, sft_worked=1500, sft_mixed=1000)
    held_out, train = _rows(folder / "eval.jsonl"), _rows(folder / "train.jsonl")
    sft = _rows(folder / "sft.jsonl")
    assert (len(held_out), len(train), len(sft)) == (256, 2000, 2500)
    rng = random.Random(12345)
    assert [row["prompt"] for row in held_out] == [draw_problem(rng).prompt for _ in range(256)]
    prompts = {row["prompt"] for row in held_out}
    assert not prompts & {row["prompt"] for row in train + sft}
    rng = random.Random(1003)
    fresh = [p for p in (draw_problem(rng) for _ in range(3000)) if p.prompt not in prompts]
    assert [row["answer"] for row in train] == [problem.answer for problem in fresh[:2000]]
    worked = ["=" in row["response"] for row in sft]
    assert all(worked[:1500])
    assert sum(worked[1500:]) / 1000 == pytest.approx(0.3, abs=0.05)
    for row in sft:
        answer = str(eval(row["prompt"].removesuffix("=?")))
        assert score(row["prompt"], row["response"], answer, {"finished": True}) == 1.0


def test_a_complete_data_set_is_kept_and_another_one_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "arithmetic"
    sizes = {"num_train": 20, "num_eval": 5, "sft_worked": 3, "sft_mixed": 2}
    write_dataset(folder, seed=0, **sizes)
    before = {file.name: (file.stat().st_ino, file.read_bytes()) for file in folder.iterdir()}
    write_dataset(folder, seed=0, **sizes)
    after = {file.name: (file.stat().st_ino, file.read_bytes()) for file in folder.iterdir()}
    assert before == after
    write_dataset(folder, seed=1, **sizes)
    assert (folder / "train.jsonl").read_bytes() != before["train.jsonl"][1]
    assert (folder / "eval.jsonl").read_bytes() == before["eval.jsonl"][1]
    write_dataset(tmp_path / "again", seed=0, **sizes)
    for name, (_, content) in before.items():
        assert (tmp_path / "again" / name).read_bytes() == content
    assert [path.name for path in folder.parent.iterdir()] == ["arithmetic"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear reader")
    with pytest.raises(DataError, match="already holds other files"):
        write_dataset(tmp_path, seed=0, num_train=1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
