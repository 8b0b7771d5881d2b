"""The starting model as transformers loads it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megarl.data.starting_model import write_starting_model


def test_the_starting_model_has_the_specified_shape(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    write_starting_model(tmp_path / "model", seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["model.embed_tokens.weight"] == (32, 64)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (128, 64)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (64, 64)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (64, 192)
    assert "lm_head.weight" not in shapes  # tied
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert 0.075 < float(model.model.layers[0].mlp.up_proj.weight.detach().std()) < 0.085
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_starting_model(tmp_path / name, seed)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
