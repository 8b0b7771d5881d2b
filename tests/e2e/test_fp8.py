"""A whole run whose generator holds FP8: it starts, trains, and says how far pi and mu are apart."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.conftest import Task
from tests.jobs import ROOT, read_rows, run_command

pytestmark = pytest.mark.e2e

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def _write_model(task: Task, folder: Path) -> Path:
    """Write a model of whole blocks with the task's tokenizer.

    Two trainer ranks cut its key and value heads inside a block: these the generator quantises.
    """
    shutil.copytree(task.folder / "model", folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.08,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def test_a_run_with_an_fp8_generator_corrects_for_what_quantising_changes(
    task: Task, tmp_path: Path
) -> None:
    overrides = task.overrides(
        tmp_path,
        "name=fp8",
        f"model.path={_write_model(task, tmp_path / 'model')}",
        "model.dtype=bfloat16",
        "generator.layout.quantization=fp8_block",
        "algorithm.policy_loss=aipo",
        "max_steps=3",
        "trainer.lr=1e-3",
        "rollout.max_response_length=16",
        "data.eval_path=",
        f"reward.path={Path(__file__).with_name('odd_length.py')}:score",
    )
    run_command("train", str(QUICKSTART), *overrides)
    rows = read_rows(tmp_path / "fp8")
    assert sorted(rows) == [1, 2, 3]
    for row in rows.values():
        assert math.isfinite(row["actor/loss"])
        assert row["actor/grad_norm"] > 0
        assert 1e-3 < row["rollout_corr/k3_kl"] < math.inf
    # Equal weights differ by 0.004 in bfloat16; what quantising adds was measured as 0.06 and 0.3.
    first = rows[1]
    assert 0.02 < first["contract/mean_logprob_error"] < 0.12
    assert 0.1 < first["contract/max_logprob_error"] < 1
    assert first["contract/equal_bytes"] > 400_000
