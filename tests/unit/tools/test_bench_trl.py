"""The benchmark beside TRL: its figures, its work, and what it says where TRL is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config_file import load_config
from tools import trl_work
from tools.bench_trl import Run, result_of
from tools.trl_work import DRAIN_STEPS, WARM_UP_STEPS, Work, samples_per_second

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    made = Work(folder=tmp_path_factory.mktemp("work"), steps=1)
    assert 350_000 < trl_work.write_work(made) < 450_000
    return made


def _run(side: str, repeat: int, speed: float) -> Run:
    return Run(side=side, repeat=repeat, samples_per_second=speed, step_seconds=[1.0], reward=0.5)


def test_where_trl_is_missing_one_sentence_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['trl'] = None; from tools.bench_trl import main; main(['--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "pip install" in done.stderr
    assert ".[trl]" in done.stderr


def test_start_and_end_of_a_run_do_not_count() -> None:
    seconds = [100.0] * WARM_UP_STEPS + [1.0, 3.0] + [0.001] * DRAIN_STEPS
    assert samples_per_second(seconds) == pytest.approx(512 / 2.0)
    with pytest.raises(ValueError, match="expected more than"):
        samples_per_second([1.0] * (WARM_UP_STEPS + DRAIN_STEPS))


def test_trl_counts_with_its_better_number_of_threads() -> None:
    speeds = {"megarl": (300, 100, 200), "trl-1": (80, 90, 400), "trl-2": (100, 110, 90)}
    runs = [_run(side, i, v) for side, values in speeds.items() for i, v in enumerate(values)]
    result = result_of(runs)
    assert result["trl_threads"] == 2
    assert result["trl_samples_per_second"] == 100
    assert result["megarl_samples_per_second"] == 200
    assert result["speedup_over_trl"] == 2
    assert len(result["runs"]) == 9


def test_the_model_does_not_end_a_response_and_prompts_have_one_length(work: Work) -> None:
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    texts = [json.loads(line)["prompt"] for line in work.prompts.read_text().splitlines()]
    assert len(texts) == trl_work.NUM_PROMPTS * work.total_steps
    tokens = torch.tensor(tokenizer(texts[:64])["input_ids"])
    assert tokens.shape == (64, trl_work.PROMPT_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(work.model)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        chances = model(tokens).logits.softmax(-1)
    assert chances[..., :3].max() < 1e-20
    assert chances.max() < 0.05  # the other words are open


def test_the_reward_counts_words_of_the_first_half() -> None:
    assert trl_work.score("", "w3 w255 w256 w511", "", {}) == 0.5
    assert trl_work.score("", "", "", {}) == 0.0


def test_the_configuration_is_one_that_megarl_takes(work: Work) -> None:
    path = work.folder / "megarl.yaml"
    path.write_text(yaml.safe_dump(trl_work.megarl_config(work)))
    config = load_config(path, ())
    assert config.max_steps == work.total_steps
    assert config.data.train_batch_size * config.rollout.n == 512
