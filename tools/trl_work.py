"""The work of `tools.bench_trl`, said once for both sides: model, prompts, reward and settings.

Made from fixed seeds. Reward processes import this file: it imports no engine by itself.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_PROMPTS = 64  # a step
NUM_SAMPLES = 8  # of a prompt
PROMPT_TOKENS = 16  # BOS included, of every prompt: neither side pads
RESPONSE_TOKENS = 48  # of every response: EOS is out of reach
VOCAB_SIZE = 512
LR = 1e-4
WARM_UP_STEPS = 2  # not counted, on both sides
MAX_STALENESS = 2  # of megarl's batches, in versions
MICRO_BATCH = {"megarl": 24, "trl": 32}  # samples; of those tried, the fastest on two cores
DRAIN_STEPS = MAX_STALENESS + 1  # not counted: the last batches' prompts are sampled already
MODEL, PROMPTS = "model", "prompts.jsonl"

_PAD, _BOS, _EOS = 0, 1, 2
_NUM_SPECIAL = 3
_SPECIAL_LOGIT = -60.0  # a chance of about e^-60 at every token


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How much of it: ``steps`` are measured, after the warm-up and before the drain."""

    folder: Path
    steps: int

    @property
    def total_steps(self) -> int:
        return WARM_UP_STEPS + self.steps + DRAIN_STEPS

    @property
    def model(self) -> Path:
        return self.folder / MODEL

    @property
    def prompts(self) -> Path:
        return self.folder / PROMPTS


def samples_per_second(step_seconds: list[float]) -> float:
    """Return the throughput of a run without the steps that do not count.

    Raises:
        ValueError: no step is left.
    """
    counted = step_seconds[WARM_UP_STEPS : len(step_seconds) - DRAIN_STEPS]
    if not counted:
        raise ValueError(
            f"{len(step_seconds)} steps, expected more than {WARM_UP_STEPS + DRAIN_STEPS}: "
            "those at the start and at the end do not count"
        )
    return NUM_PROMPTS * NUM_SAMPLES * len(counted) / sum(counted)


def score(prompt: str, response: str, answer: str, extra: dict) -> float:
    """Return the share of words of the response that are in the first half of the vocabulary."""
    words = response.split()
    return sum(int(word[1:]) < VOCAB_SIZE // 2 for word in words) / max(len(words), 1)


def write_work(work: Work) -> int:
    """Write model and prompts into the folder; return the number of parameters."""
    work.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    with work.prompts.open("w") as stream:
        for _ in range(NUM_PROMPTS * work.total_steps):
            words = [
                f"w{rng.randrange(_NUM_SPECIAL, VOCAB_SIZE)}" for _ in range(PROMPT_TOKENS - 1)
            ]
            stream.write(json.dumps({"prompt": " ".join(words), "answer": "none"}) + "\n")
    return _write_model(work.model)


def _write_model(folder: Path) -> int:
    """Write a random Llama that never ends a response, nor says another special token.

    Channel 0 of the residual stream is the same constant at every token: all embeddings have it and
    no layer writes to it. The head reads it for special tokens only, with a very negative weight.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=PROMPT_TOKENS + RESPONSE_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=_PAD,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0  # pyright: ignore
            layer.mlp.down_proj.weight[0] = 0.0  # pyright: ignore
        # After the last norm channel 0 is about sqrt(hidden size), since the others are small.
        head: Any = model.lm_head.weight
        head[:, 0] = 0.0
        head[:_NUM_SPECIAL] = 0.0
        head[:_NUM_SPECIAL, 0] = _SPECIAL_LOGIT / config.hidden_size**0.5
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return sum(weight.numel() for weight in model.parameters())


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token a word, w3 to w511, and BOS in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(_NUM_SPECIAL, VOCAB_SIZE))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", _BOS)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def megarl_config(work: Work) -> dict[str, Any]:
    """Return the configuration of ``megarl train``."""
    return {
        "name": "megarl",
        "run_dir": str(work.folder),
        "mode": "async",
        "max_staleness": MAX_STALENESS,
        "max_steps": work.total_steps,
        "model": {"path": str(work.model)},
        "trainer": {
            "layout": {"vocab_divisor": 16},
            "lr": LR,
            "max_tokens_per_micro_batch": MICRO_BATCH["megarl"] * (PROMPT_TOKENS + RESPONSE_TOKENS),
        },
        # vLLM's CPU blocks hold 128 tokens, so each sequence takes one: 512 and one it keeps free.
        "generator": {
            "max_running_sequences": NUM_PROMPTS * NUM_SAMPLES,
            "kv_cache_gib": 0.125,
            "prefix_caching": False,
        },
        "rollout": {
            "n": NUM_SAMPLES,
            "temperature": 1.0,
            "max_response_length": RESPONSE_TOKENS,
            "partial_kv": "keep",
        },
        "data": {
            "train_path": str(work.prompts),
            "train_batch_size": NUM_PROMPTS,
            "max_prompt_length": PROMPT_TOKENS,
        },
        "algorithm": {"policy_loss": "grpo", "norm_adv_by_std": True},
        "reward": {"path": "tools.trl_work:score"},
        "checkpoint": {"export_hf": False},
        "observe": {"trace": False},
        "fault": {"timeout_seconds": 120},
    }


def trl_config(work: Work) -> dict[str, Any]:
    """Return what ``GRPOConfig`` takes: one generation and one update of all samples a step."""
    return {
        "output_dir": str(work.folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        "max_steps": work.total_steps,
        "per_device_train_batch_size": MICRO_BATCH["trl"],
        "gradient_accumulation_steps": NUM_PROMPTS * NUM_SAMPLES // MICRO_BATCH["trl"],
        "num_generations": NUM_SAMPLES,
        "max_completion_length": RESPONSE_TOKENS,
        "temperature": 1.0,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": work.total_steps,  # once, at the end, for the lengths
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }
