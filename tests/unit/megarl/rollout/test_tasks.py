"""What is asked for: requests and seeds of prompts, what a resumed run goes on with, evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config import DataConfig, EvalConfig, RolloutConfig, RunConfig
from megarl.data.tokenizer import build_character_tokenizer
from megarl.errors import ChannelError
from megarl.rollout.engine import Sample, SampleRequest
from megarl.rollout.tasks import TaskBook, sampling_seed

NUM_ROWS = 5


def _make_book(folder: Path, **changes: object) -> TaskBook:
    for name in ("train", "eval"):
        rows = [{"prompt": f"{row}+{name == 'eval':d}=?", "answer": row} for row in range(NUM_ROWS)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict = {
        "seed": 3,
        "max_steps": 10,
        "data": DataConfig(
            train_path=str(folder / "train.jsonl"),
            eval_path=str(folder / "eval.jsonl"),
            shuffle=False,
        ),
        "rollout": RolloutConfig(n=2, temperature=0.7, max_response_length=6),
        "eval": EvalConfig(n=2, test_freq=4),
        **changes,
    }
    return TaskBook(RunConfig(**values), build_character_tokenizer())


def _make_sample(request: SampleRequest, *tokens: int, finished: bool = True) -> Sample:
    return Sample(
        request_id=request.request_id,
        tokens=tokens,
        logprobs=(-1.0,) * len(tokens),
        versions=(1,) * len(tokens),
        finished=finished,
    )


def test_sampling_seeds_repeat_and_differ_by_run_prompt_and_sample() -> None:
    seeds = {
        sampling_seed(seed, prompt, sample)
        for seed in range(3)
        for prompt in range(200)
        for sample in range(8)
    }
    assert len(seeds) == 3 * 200 * 8
    assert min(seeds) >= 0
    assert max(seeds) < 1 << 32
    assert sampling_seed(1, 2, 3) == sampling_seed(1, 2, 3)


def test_a_prompt_becomes_requests_whose_seeds_do_not_depend_on_the_order(tmp_path: Path) -> None:
    book, other = _make_book(tmp_path), _make_book(tmp_path)
    first, second = book.train(1, range(2), {}), book.train(8, range(2), {})
    assert [r.request_id for r in (*first, *second)] == [0, 1, 2, 3]
    # Of <bos> 1 + 0 = ?: the prompt stream repeats the five rows.
    assert first[0].prompt == (1, 4, 13, 3, 15, 18)
    assert second[0].prompt == (1, 6, 13, 3, 15, 18)
    assert {(r.max_tokens, r.temperature, r.eos_token_id, r.generated) for r in first} == {
        (6, 0.7, 2, ())
    }
    assert [r.seed for r in second] == [r.seed for r in other.train(8, range(2), {})]
    assert [r.seed for r in first] == [sampling_seed(3, 1, 0), sampling_seed(3, 1, 1)]
    assert [book.place_of(r.request_id) for r in second] == [(8, 0), (8, 1)]


def test_a_resumed_run_goes_on_with_what_it_had_begun(tmp_path: Path) -> None:
    book = _make_book(tmp_path)
    begun = Sample(
        request_id=77, tokens=(5, 6), logprobs=(-0.5, -0.25), versions=(4, 5), finished=False
    )
    requests = book.train(6, [1, 0], {(6, 0): begun, (7, 1): begun})
    assert (requests[0].generated, requests[0].request_id) == ((), 0)
    assert requests[1].generated == (5, 6)
    assert requests[1].logprobs == (-0.5, -0.25)
    assert requests[1].versions == (4, 5)
    assert requests[1].seed == sampling_seed(3, 6, 0)
    assert book.place_of(1) == (6, 0)


def test_a_group_that_is_complete_after_a_restart_still_has_its_prompt(tmp_path: Path) -> None:
    book = _make_book(tmp_path)
    assert book.train(4, [], {}) == []
    assert book.prompts([4])[4].text == "4+0=?"


def test_a_finished_sample_closes_its_task(tmp_path: Path) -> None:
    book = _make_book(tmp_path)
    requests = book.train(2, range(2), {})
    task = book.finish(_make_sample(requests[1], 5, 2))
    assert (task.prompt.prompt_id, task.sample_id, task.is_evaluation) == (2, 1, False)
    assert task.prompt.answer == "2"
    with pytest.raises(KeyError):
        book.place_of(requests[1].request_id)
    assert book.forget(2) == [requests[0].request_id]
    assert book.forget(2) == []


@pytest.mark.parametrize(
    ("known", "expected"),
    [([], [0, 4, 8, 10]), ([0, 4], [8, 10]), ([0], [4, 8, 10])],  # killed before it evaluated 4
)
def test_the_first_the_last_and_every_few_versions_are_evaluated_once(
    tmp_path: Path, known: list[int], expected: list[int]
) -> None:
    book = _make_book(tmp_path)
    assert [version for version in range(11) if book.evaluation_due(version, known)] == expected


def test_without_held_out_prompts_or_a_frequency_less_is_evaluated(tmp_path: Path) -> None:
    book = _make_book(tmp_path, eval=EvalConfig(n=2, test_freq=0))
    assert [v for v in range(11) if book.evaluation_due(v, ())] == [0, 10]
    data = DataConfig(train_path=str(tmp_path / "train.jsonl"))
    none = _make_book(tmp_path, data=data)
    assert not any(none.evaluation_due(version, ()) for version in range(11))


def test_an_evaluation_asks_for_each_prompt_and_reports_when_all_is_there(tmp_path: Path) -> None:
    book = _make_book(tmp_path)
    groups = book.evaluation(4)
    assert [len(group) for group in groups] == [3, 2, 2, 2, 2]  # one greedy answer, to the first
    requests = [request for group in groups for request in group]
    assert [r.temperature for r in requests] == [0.7, 0.7, 0.0] + [0.7] * 8
    assert groups[3][0].prompt == (1, 6, 13, 4, 15, 18)  # 3+1=?
    with pytest.raises(ChannelError, match="request 0 of an evaluation is open"):
        book.place_of(0)
    for number, request in enumerate(reversed(requests)):
        assert book.evaluating
        assert book.take_evaluation() is None
        sample = _make_sample(request, *([5] * (1 + number % 2)))
        task = book.finish(sample)
        assert task.is_evaluation
        greedy = task.sample_id == 2
        book.note(task, sample, 7.0 if greedy else float(task.prompt.prompt_id == 3))
    found = book.take_evaluation()
    assert found is not None
    assert found.metrics["val/accuracy"] == pytest.approx(2 / 10)  # the greedy one is not counted
    assert found.metrics["val/response_length_mean"] == pytest.approx(1.5)
    assert (found.greedy.request_id, found.greedy_score) == (2, 7.0)
    assert found.prompt.text == "0+1=?"
    assert not book.evaluating
    assert book.take_evaluation() is None


def test_evaluations_sample_apart_from_training_and_from_one_another(tmp_path: Path) -> None:
    book = _make_book(tmp_path)
    seeds = [r.seed for v in (0, 4, 8) for group in book.evaluation(v) for r in group]
    seeds += [r.seed for prompt in range(60) for r in book.train(prompt, range(3), {})]
    assert len(set(seeds)) == len(seeds)
