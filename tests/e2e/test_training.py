"""Properties of whole runs on the real engines: exactness of weights, ratios and resuming."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megarl.executors.base import Executor
from megarl.topology import REWARD
from tests.chaos import consumed_prompts
from tests.e2e.conftest import Task
from tests.jobs import ROOT, read_rows, run_job

pytestmark = pytest.mark.e2e

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def digest_of_weights(executor: Executor) -> tuple[str, str]:
    """Return (executor, SHA-256 of all its live parameters)."""
    if executor.name == REWARD:
        return executor.name, ""
    sha = hashlib.sha256()
    for name, tensor in sorted(executor.get_model().items()):
        sha.update(name.encode())
        sha.update(tensor.detach().contiguous().numpy().tobytes())
    return executor.name, sha.hexdigest()


def nothing(executor: Executor) -> None:
    """Look at nothing."""


def _write_mixture(task: Task, folder: Path) -> Path:
    """Write a mixture of experts with the task's tokenizer."""
    shutil.copytree(task.folder / "model", folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.08,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_without_a_learning_rate_three_async_steps_change_no_bit_and_ratios_stay_at_one(
    experts: bool, task: Task, tmp_path: Path
) -> None:
    model = task.folder / "model"
    overrides = task.overrides(tmp_path, "name=still", "trainer.lr=0", "max_steps=3")
    if experts:
        model = _write_mixture(task, tmp_path / "model")
        layout = ("trainer.layout.tp=1", "trainer.layout.dp=2", "trainer.layout.ep=2")
        overrides = (*overrides, f"model.path={model}", *layout)
    seen = run_job(QUICKSTART, overrides, digest_of_weights)
    for ticks in seen:
        # Before the first tick the generator holds vLLM's dummy weights, then always the same.
        assert len(set(ticks[1:])) == 1, ticks
    generator = next(ticks for ticks in seen if ticks[0][0] == "generator")  # type: ignore[index]
    assert generator[0] != generator[1]
    rows = read_rows(tmp_path / "still")
    assert sorted(rows) == [1, 2, 3]
    for row in rows.values():
        assert row["rollout_corr/importance_ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert row["rollout_corr/importance_ratio_max"] <= 1 + 2e-2
    before = load_file(model / "model.safetensors")
    after = load_file(next((tmp_path / "still" / "hf").glob("*.safetensors")))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_a_run_goes_on_in_another_layout_with_all_that_was_in_flight(
    task: Task, tmp_path: Path
) -> None:
    """From tp 2 and one replica into pp2 and two replicas: no prompt lost, the same next loss."""
    common = ("mode=async", "max_staleness=1", "trainer.lr=1e-3", "resume=auto", "data.eval_path=")
    odd = f"reward.path={Path(__file__).with_name('odd_length.py')}:score"
    begun = task.overrides(tmp_path, *common, odd, "name=begun", "max_steps=3")

    def run(name: str, *more: str) -> None:
        run_job(QUICKSTART, task.overrides(tmp_path, *common, odd, f"name={name}", *more), nothing)

    run_job(QUICKSTART, (*begun, "checkpoint.save_freq=2"), nothing)
    for name in ("same", "other"):
        shutil.copytree(tmp_path / "begun", tmp_path / name)
        (tmp_path / name / "checkpoints" / "latest").write_text("step_000002")
    run("same", "max_steps=3")
    run(
        "other",
        "max_steps=3",
        "trainer.layout.tp=1",
        "trainer.layout.pp=2",
        "generator.layout.replicas=2",
    )
    same, other = read_rows(tmp_path / "same"), read_rows(tmp_path / "other")
    assert sorted(same) == sorted(other) == [1, 2, 3]
    for key in ("actor/loss", "actor/grad_norm", "rollout/reward", "perf/total_tokens"):
        assert other[3][key] == pytest.approx(same[3][key], rel=1e-4, abs=1e-7), key
    for name in ("begun", "same", "other"):
        assert consumed_prompts(tmp_path / name) == list(range(3 * 8)), name
    assert same[3]["staleness/max"] <= 1


def test_a_synchronous_run_with_kl_clip_and_several_ranks_of_each_kind(
    task: Task, tmp_path: Path
) -> None:
    overrides = task.overrides(
        tmp_path,
        "name=wide",
        "mode=sync",
        "max_steps=2",
        "trainer.lr=1e-3",
        "trainer.layout.tp=1",
        "trainer.layout.dp=2",
        "trainer.distributed_optimizer=true",
        "generator.layout.replicas=2",
        "algorithm.policy_loss=grpo",
        "algorithm.norm_adv_by_std=true",
        "algorithm.kl_loss_coef=0.1",
        f"reward.path={Path(__file__).with_name('odd_length.py')}:score",
    )
    run_job(QUICKSTART, overrides, digest_of_weights)
    rows = read_rows(tmp_path / "wide")
    assert sorted(rows) == [1, 2]
    assert all(row["staleness/max"] == 0 for row in rows.values())
    # The first step starts at the reference, the second has left it.
    assert rows[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert rows[2]["actor/kl_loss"] > 1e-5
    assert 0 < rows[1]["rollout/reward"] < 1
