"""A small random Llama for the built-in task, as a Hugging Face folder; the quick start's model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.data.folders import write_folder
from megarl.data.tokenizer import build_character_tokenizer


def write_starting_model(folder: Path, seed: int) -> None:
    """Write model and tokenizer; kept where they stand already with the same seed.

    100 k parameters in float32. The wide initialisation suits the small hidden size: with the usual
    0.02 it learns far more slowly. Four heads of size 32 let it run under tensor parallelism of 2.

    Raises:
        DataError: `folder` holds other files.
    """
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )

    def fill(making: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            LlamaForCausalLM(config).save_pretrained(making)
        build_character_tokenizer().save_pretrained(making)

    write_folder(folder, {"model": "show your work, random", "seed": seed}, fill)
