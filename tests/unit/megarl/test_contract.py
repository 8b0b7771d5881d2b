"""The start-up contract's comparisons; parameters come from transformers, fused by the tests."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from megarl.config import FaultConfig, GeneratorConfig, ModelConfig, RunConfig
from megarl.contract import (
    compare_manifest,
    error_bounds,
    first_difference,
    merge_errors,
    poison,
    require_agreement,
    require_manifest,
    token_errors,
)
from megarl.errors import ContractError, WeightSyncError
from megarl.types import TrainBatch
from megatron_bridge.layouts.vllm import vllm_manifest
from megatron_bridge.models.families import load_spec
from megatron_bridge.parallel import GeneratorLayout, Quantization
from megatron_bridge.spec import RankManifest
from tests.dist.vllm_cases import fused

VOCAB, PADDED, HEAD_DIM = 90, 128, 8
QKV, EMBEDDING = "model.layers.1.self_attn.qkv_proj.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model in several files, in float32, with biases and norms of random values."""
    path = tmp_path_factory.mktemp("qwen2")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    model.save_pretrained(path, max_shard_size="10KB")
    return path


def _manifest(folder: Path) -> RankManifest:
    return vllm_manifest(load_spec(folder), 1, 0, global_rank=2)


def _live(folder: Path) -> dict[str, Tensor]:
    """Return what an engine of one rank must hold of the model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    live = fused({name: weight.detach().clone() for name, weight in model.named_parameters()})
    live[EMBEDDING] = torch.cat([live[EMBEDDING], torch.zeros(PADDED - VOCAB, 32)])
    return live


def _flip(tensor: Tensor, index: tuple[int, ...], bit: int) -> None:
    tensor.view(torch.int32)[index] ^= 1 << bit


def test_parameters_that_are_the_checkpoint_have_no_difference(folder: Path) -> None:
    manifest, live = _manifest(folder), _live(folder)
    float32, bfloat16 = torch.float32, torch.bfloat16
    assert first_difference(folder, manifest, live, float32) is None
    rounded = {name: tensor.bfloat16() for name, tensor in live.items()}
    assert first_difference(folder, manifest, rounded, float32) is None
    assert first_difference(folder, manifest, rounded, bfloat16) is None
    # A float32 engine of a bfloat16 trainer holds rounded values, and not the checkpoint's own.
    widened = {name: tensor.float() for name, tensor in rounded.items()}
    assert first_difference(folder, manifest, widened, bfloat16) is None
    assert first_difference(folder, manifest, widened, float32) is not None


@pytest.mark.parametrize("bit", [0, 15, 31])
def test_one_flipped_bit_is_found_and_named(folder: Path, bit: int) -> None:
    live = _live(folder)
    row = 4 * HEAD_DIM + 3  # four query heads lie above the keys
    before = live[QKV][row, 5].item()
    _flip(live[QKV], (row, 5), bit)
    found = first_difference(folder, _manifest(folder), live, torch.float32)
    assert found is not None
    assert found.startswith(f"model.layers.1.self_attn.k_proj.weight[3, 5] (in {QKV}[{row}, 5])")
    assert f"is {live[QKV][row, 5].item()!r} in the engine and {before!r} in {folder}" in found
    assert found.endswith("of the parameter's 2048 elements 1 differ")


def test_swapped_names_are_found(folder: Path) -> None:
    live = _live(folder)
    top, keys, values = live[QKV].split([4 * HEAD_DIM, 2 * HEAD_DIM, 2 * HEAD_DIM])
    live[QKV] = torch.cat([top, values, keys])
    found = first_difference(folder, _manifest(folder), live, torch.float32)
    assert found is not None
    assert found.startswith("model.layers.1.self_attn.k_proj.weight[0, 0]")


@pytest.mark.parametrize("value", [1.0, math.nan, -0.0])
def test_padding_must_be_zero_to_the_bit(folder: Path, value: float) -> None:
    live = _live(folder)
    live[EMBEDDING][VOCAB + 1, 7] = value
    found = first_difference(folder, _manifest(folder), live, torch.float32)
    assert found is not None
    assert found.startswith(f"padding (in {EMBEDDING}[91, 7]) is {value!r} in the engine and 0.0")


def test_poison_that_a_transfer_left_is_found_in_every_parameter(folder: Path) -> None:
    manifest, counter = _manifest(folder), torch.arange(3)
    for name in _live(folder):
        live = _live(folder)
        poison({name: live[name], "counter": counter})
        found = first_difference(folder, manifest, live, torch.float32)
        assert found is not None
        assert f"{name}[0" in found
        assert "is nan in the engine" in found
    assert counter.tolist() == [0, 1, 2]


def test_every_difference_from_the_manifest_is_a_line(folder: Path) -> None:
    manifest, live = _manifest(folder), _live(folder)
    assert compare_manifest(manifest, live, torch.float32, {}) == []
    del live["model.norm.weight"]
    live["model.extra.weight"] = torch.zeros(2, 3)
    live[EMBEDDING] = live[EMBEDDING][:VOCAB]
    live[QKV] = live[QKV].bfloat16()
    down = "model.layers.0.mlp.down_proj.weight"
    live[down] = live[down].t().contiguous().t()
    lines = compare_manifest(manifest, live, torch.float32, {"model.layers.1.mlp": "AWQMethod"})
    assert sorted(lines) == [
        "missing: model.norm.weight, expected (32,) torch.float32",
        f"transformed: {down} has strides (1, 32), expected (48, 1)",
        "transformed: model.layers.1.mlp by AWQMethod, "
        "expected to compute with its weights as they lie",
        "unexpected: model.extra.weight, (2, 3) torch.float32",
        f"wrong dtype: {QKV} is torch.bfloat16, expected torch.float32",
        f"wrong shape: {EMBEDDING} is (90, 32), expected (128, 32)",
    ]
    with pytest.raises(WeightSyncError, match=r"engine of rank 2 .* differences \(5\)") as error:
        require_manifest(manifest, live, torch.float32, {})
    assert all(f"\n  {line}" in str(error.value) for line in lines if "AWQ" not in line)


def _make_batch(rows: list[tuple[int, int, list[float]]], prompt_length: int = 2) -> TrainBatch:
    """Each row: prompt id, micro-batch, log mu of its response."""
    lengths = [prompt_length + len(row[2]) for row in rows]
    mask = [[0.0] * prompt_length + [1.0] * len(row[2]) for row in rows]
    log_mu = [[0.0] * prompt_length + row[2] for row in rows]
    num_tokens = sum(lengths)
    return TrainBatch(
        prompt_ids=torch.tensor([row[0] for row in rows]),
        sample_ids=torch.arange(len(rows)),
        lengths=torch.tensor(lengths),
        tokens=torch.ones(num_tokens, dtype=torch.int64),
        loss_mask=torch.tensor(list(chain(*mask))),
        logprobs=torch.tensor(list(chain(*log_mu))),
        advantages=torch.zeros(num_tokens),
        versions=torch.tensor(list(chain(*mask))).long() - 1,
        micro_batches=torch.tensor([row[1] for row in rows]),
        num_micro_batches=torch.tensor([3]),
    )


def _logprobs(value: float = -0.5) -> list[Tensor]:
    """Of two micro-batches: row 1, then rows 0 and 2; the third holds a dummy token."""
    junk = [9.0, 9.0]  # of prompt tokens: no part of the comparison
    return [
        torch.tensor([*junk, -1.0, -2.0]),
        torch.tensor([*junk, -0.25, *junk, -1.0, value, -3.0]),
        torch.tensor([7.0]),
    ]


ROWS = [(40, 1, [-0.25]), (41, 0, [-1.0, -2.5]), (42, 1, [-1.0, -0.5, -3.0])]


def test_errors_of_all_ranks_are_merged_and_the_worst_token_is_named() -> None:
    batch = _make_batch(ROWS)
    other = _make_batch([(50, 0, [-1.0, -1.0])])
    rows = [
        token_errors(batch, None),  # an earlier pipeline stage
        token_errors(batch, _logprobs(-0.25)),
        token_errors(batch, _logprobs(-0.25)),  # its tensor-parallel neighbour
        token_errors(other, [torch.tensor([0.0, 0.0, -1.0, -1.125])]),
    ]
    rows += [rows[-1], token_errors(other, None)]
    found = merge_errors(torch.stack(rows), copies=2)
    # By hand: |error| .5 (row 1), .25 (row 2) and .125 (the other rank); eight tokens.
    assert (found.largest, found.num_tokens) == (0.5, 8)
    assert found.mean == pytest.approx((0.5 + 0.25 + 0.125) / 8)
    assert found.worst == (
        "token 3 of sample 1 of prompt 41: log-probability -2.000000 in the trainer, "
        "-2.500000 in the generator"
    )
    require_agreement(found, (0.5, 0.11))
    with pytest.raises(
        ContractError, match=r"largest .* is 0\.5, above fault\.max_logprob_error 0\.4"
    ):
        require_agreement(found, (0.4, 1.0))
    with pytest.raises(ContractError, match=r"mean .* 0\.109, above .* prompt 41"):
        require_agreement(found, (1.0, 0.1))


def test_a_log_probability_that_is_no_number_is_never_within_the_bounds() -> None:
    found = merge_errors(token_errors(_make_batch(ROWS), _logprobs(math.nan))[None], copies=1)
    with pytest.raises(ContractError, match=r"token 3 of sample 2 of prompt 42: .* nan in the tr"):
        require_agreement(found, (1e30, 1e30))


@pytest.mark.parametrize(
    ("model", "fault", "expected"),
    [
        ({}, {}, (1e-3, 1e-4)),
        ({"generator_dtype": "bfloat16"}, {}, (4.0, 0.05)),
        ({"dtype": "bfloat16", "generator_dtype": "float32"}, {}, (4.0, 0.05)),
        ({}, {"mean_logprob_error": 0.5}, (1e-3, 0.5)),
        ({"dtype": "bfloat16"}, {"max_logprob_error": 0.5}, (0.5, 0.05)),
    ],
)
def test_bounds_are_those_of_the_coarser_dtype_or_given(
    model: dict[str, Any], fault: dict[str, Any], expected: tuple[float, float]
) -> None:
    config = RunConfig(model=ModelConfig(**model), fault=FaultConfig(**fault))
    assert error_bounds(config) == expected


def test_an_fp8_generator_has_bounds_of_its_own() -> None:
    layout = GeneratorLayout(quantization=Quantization.FP8_BLOCK)
    config = RunConfig(generator=GeneratorConfig(layout=layout))
    assert error_bounds(config) == (4.0, 0.25)
