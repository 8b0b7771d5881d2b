"""The quick start in short: the model learns from its own rollouts, so weights reach the sampler."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from tests.jobs import ROOT, read_rows, run_command

pytestmark = pytest.mark.e2e

MAX_STEPS = 14  # reward passes .75 by step 10 + 2 x lag in every run seen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task, supervised start and a short asynchronous run, by the commands of the quick start."""
    folder = tmp_path_factory.mktemp("quickstart")
    run_command("data", str(folder))
    sft = str(ROOT / "configs" / "quickstart_sft.yaml")
    base = (f"run_dir={folder}", f"model.path={folder / 'model'}")
    run_command("sft", sft, *base, f"data.train_path={folder / 'sft.jsonl'}", timeout=600)
    run_command(
        "train",
        str(ROOT / "configs" / "quickstart.yaml"),
        f"run_dir={folder}",
        f"model.path={folder / 'quickstart-sft' / 'hf'}",
        f"data.train_path={folder / 'train.jsonl'}",
        f"data.eval_path={folder / 'eval.jsonl'}",
        f"max_steps={MAX_STEPS}",
        timeout=600,
    )
    return folder / "quickstart"


def test_rollouts_get_better_and_longer(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == MAX_STEPS
    assert summary["rollout_reward_first"] <= 0.5
    assert summary["rollout_reward_last"] >= 0.75
    assert summary["response_length_last"] >= 1.5 * summary["response_length_first"]
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.75
    assert 0 < summary["staleness_mean"] <= 1  # the bound; less where the trainer waited
    for key in ("wall_seconds", "weight_sync_seconds_mean"):
        assert summary[key] > 0
    for key in ("trainer_idle_ratio", "generator_idle_ratio"):
        assert 0 <= summary[key] < 1


def test_every_step_has_the_numbers_that_people_look_for(run: Path) -> None:
    rows = read_rows(run)
    assert sorted(rows) == list(range(1, MAX_STEPS + 1))
    names = [
        "actor/loss",
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/ppo_kl",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
        "rollout/reward",
        "rollout/reward_std",
        "rollout/response_length_mean",
        "rollout/response_length_clip_ratio",
        "training/rollout_probs_diff_mean",
        "training/rollout_probs_diff_max",
        "rollout_corr/importance_ratio_mean",
        "rollout_corr/importance_ratio_max",
        "rollout_corr/ess",
        "staleness/mean",
        "staleness/max",
        "staleness/dropped",
        "trainer/idle_ratio",
        "generator/idle_ratio",
        "timing_s/update_weights",
        "timing_s/gen",
        "timing_s/update_actor",
        "timing_s/step",
        "perf/tokens_per_second",
        "perf/tokens_per_second_per_gpu",
        "perf/weight_sync_bytes",
        "perf/peak_memory_gib",
    ]
    for row in rows.values():
        assert not [name for name in names if name not in row]
        # Weights are one version old and fp32 on both sides: ratios stay near one.
        assert row["rollout_corr/importance_ratio_mean"] == pytest.approx(1, abs=0.05)


def test_the_timeline_shows_trainer_and_generator_at_work_at_the_same_time(run: Path) -> None:
    events = json.loads((run / "trace.json").read_text())["traceEvents"]

    def spans(name: str) -> list[tuple[float, float]]:
        found = [e for e in events if e["ph"] == "X" and e["name"] == name]
        return [(e["ts"], e["ts"] + e["dur"]) for e in found]

    overlaps = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for (start, end), (other_start, other_end) in product(spans("update_actor"), spans("gen"))
    )
    trained = sum(end - start for start, end in spans("update_actor"))
    assert overlaps > 0.25 * trained


def test_the_run_folder_holds_what_the_documentation_lists(run: Path) -> None:
    assert (run / "learning_curve.png").stat().st_size > 10_000
    assert list((run / "tensorboard").glob("events.*"))
    assert (run / "config.yaml").is_file()
    assert (run / "checkpoints" / "latest").read_text() == f"step_{MAX_STEPS:06d}"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [sample["version"] for sample in samples] == [0, MAX_STEPS]


def test_eval_scores_the_exported_model_as_the_run_did(run: Path) -> None:
    run_command(
        "eval",
        str(ROOT / "configs" / "quickstart.yaml"),
        f"run_dir={run.parent}",
        "name=scored",
        f"model.path={run / 'hf'}",
        f"data.eval_path={run.parent / 'eval.jsonl'}",
    )
    result = json.loads((run.parent / "scored" / "eval.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    # Other seeds, 1024 samples on either side: three standard errors of their difference.
    assert result["accuracy"] == pytest.approx(summary["accuracy_after"], abs=0.06)
    assert result["prompts"] == 256
