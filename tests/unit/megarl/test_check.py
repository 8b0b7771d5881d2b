"""What is refused of a batch before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.check import Command, check_run
from megarl.config import RunConfig
from megarl.config_file import load_config
from megarl.data.starting_model import write_starting_model
from megarl.errors import ConfigError


def _make_config(folder: Path, *overrides: str) -> RunConfig:
    write_starting_model(folder / "model", 0)
    rows = [{"prompt": "1+1=?", "answer": "2", "response": "2"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text("name: x\n")
    common = (
        f"run_dir={folder}",
        f"model.path={folder / 'model'}",
        f"data.train_path={folder / 'train.jsonl'}",
        "data.max_prompt_length=16",
        "rollout.max_response_length=16",
        "trainer.layout.vocab_divisor=16",
        "trainer.layout.dp=2",
        "data.train_batch_size=3",
        "rollout.n=2",
    )
    return load_config(folder / "run.yaml", (*common, *overrides))


def test_every_rank_needs_a_sequence_in_every_update(tmp_path: Path) -> None:
    check_run(Command.TRAIN, _make_config(tmp_path, "trainer.updates_per_batch=3"))
    with pytest.raises(
        ConfigError, match=r"6 sequences .*updates_per_batch 4 x .*dp = 8: .*update"
    ):
        check_run(Command.TRAIN, _make_config(tmp_path, "trainer.updates_per_batch=4"))
    with pytest.raises(ConfigError, match=r"6 sequences is less than trainer\.layout\.dp = 7: "):
        check_run(Command.TRAIN, _make_config(tmp_path, "trainer.layout.dp=7"))


def test_fine_tuning_has_one_update_a_batch(tmp_path: Path) -> None:
    check_run(Command.SFT, _make_config(tmp_path))
    with pytest.raises(ConfigError, match=r"updates_per_batch is 2, expected 1 for megarl sft"):
        check_run(Command.SFT, _make_config(tmp_path, "trainer.updates_per_batch=2"))
