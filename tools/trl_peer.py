"""TRL's side of `tools.bench_trl`, in a process of its own: ``python -m tools.trl_peer FOLDER``.

Trains with `GRPOTrainer` and writes the seconds of each step into a JSON file.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset  # pyright: ignore[reportMissingImports] - of the extra `trl`
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from tools.trl_work import Work, score, trl_config


class _StepClock(TrainerCallback):
    """The time between one step's end and the next one's; the first counts from the start."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return the scores of the samples; the name appears in TRL's log."""
    return [score(p, c, "", {}) for p, c in zip(prompts, completions, strict=True)]


def train(work: Work) -> dict[str, Any]:
    """Train for all steps; return their seconds and the lengths that TRL saw."""
    clock = _StepClock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work.model),
        processing_class=AutoTokenizer.from_pretrained(work.model),
        reward_funcs=reward,
        args=GRPOConfig(**trl_config(work)),
        train_dataset=load_dataset(
            "json",
            data_files=str(work.prompts),
            split="train",
            cache_dir=str(work.folder / "datasets"),
        ),
        callbacks=[clock],
    )
    trainer.train()
    (log,) = (row for row in trainer.state.log_history if "completions/mean_length" in row)
    return {
        "step_seconds": clock.seconds,
        "response_tokens": [log["completions/min_length"], log["completions/max_length"]],
        "reward": log["reward"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.trl_peer", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    said = parser.parse_args()
    torch.set_num_threads(said.threads)
    result = train(Work(folder=said.folder, steps=said.steps))
    said.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
