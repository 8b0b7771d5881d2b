"""Memory of a rank against closed forms, and against what the engines' own code holds."""

from dataclasses import replace
from math import prod

import pytest

from launch.activations import chunks_in_flight, layer_bytes, num_micro_batches, stage_bytes
from launch.memory import check_memory, kv_bytes_per_token, memory_table, optimizer_bytes
from launch.site import GIB, Device
from megarl.config import (
    AlgorithmConfig,
    DataConfig,
    GeneratorConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from megarl.errors import ConfigError
from megarl.weights import run_sides
from megatron_bridge.models.families import canonical_tensors
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.spec import ModelSpec

DEVICE = Device(memory_gib=80.0, peak_tflops=989.0, memory_bytes_per_second=3.35e12)


def _make_spec(**extra: int) -> ModelSpec:
    sizes = {"vocab_size": 1024, "hidden_size": 256, "ffn_size": 512, "num_layers": 4}
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "max_positions": 4096}
    return ModelSpec(
        family="llama",
        norm_eps=1e-5,
        rope_theta=1e4,
        tied_embeddings=False,
        **(sizes | heads | extra),
    )


def _make_moe() -> ModelSpec:
    return replace(
        _make_spec(), family="mixtral", num_experts=8, experts_per_token=2, moe_ffn_size=128
    )


def _make_config(
    layout: TrainerLayout | None = None, dtype: str = "bfloat16", **trainer: bool
) -> RunConfig:
    return RunConfig(
        model=ModelConfig(dtype=dtype),
        trainer=TrainerConfig(layout=layout or TrainerLayout(), **trainer),
        generator=GeneratorConfig(layout=GeneratorLayout(tp=2, replicas=2), kv_cache_gib=1.0),
        rollout=RolloutConfig(n=4, max_response_length=768),
        data=DataConfig(train_batch_size=64, max_prompt_length=256),
    )


def _table(config: RunConfig, spec: ModelSpec):
    return memory_table(config, spec, run_sides(config, spec, te=True), DEVICE)


def _num_parameters(spec: ModelSpec) -> int:
    return sum(prod(tensor.shape) for tensor in canonical_tensors(spec))


# Megatron-LM's theoretical_memory_usage: 18 bytes a bf16 parameter, 6 + 12 / dp with the
# distributed optimizer. Plain float32 Adam: weight, gradient, two moments.
@pytest.mark.parametrize(
    ("dtype", "distributed", "bytes_each"),
    [
        ("bfloat16", False, 18),
        ("bfloat16", True, 6 + 12 / 4),
        ("float32", False, 16),
        ("float32", True, 8 + 8 / 4),
    ],
)
def test_a_parameter_costs_as_many_bytes_as_megatron_says(
    dtype: str, distributed: bool, bytes_each: float
):
    spec = _make_spec()
    config = _make_config(TrainerLayout(dp=4), dtype, distributed_optimizer=distributed)
    first = _table(config, spec)[0]
    states = first.weights + first.gradients + first.optimizer
    assert states == pytest.approx(bytes_each * _num_parameters(spec), rel=1e-6)


def test_tensor_and_pipeline_ranks_together_hold_each_matrix_once():
    spec = _make_spec()
    config = _make_config(TrainerLayout(tp=2, pp=2, sequence_parallel=True))
    norms = sum(prod(tensor.shape) for tensor in canonical_tensors(spec) if len(tensor.shape) == 1)
    trainers = [one for one in _table(config, spec) if one.executor == "trainer"]
    assert sum(one.weights for one in trainers) == 2 * (_num_parameters(spec) + norms)


def test_expert_states_are_divided_over_expert_replicas_alone():
    config = _make_config(
        TrainerLayout(tp=2, dp=4, ep=4, sequence_parallel=True), distributed_optimizer=True
    )
    # 8 ranks hold the stage; with ep 4, etp 1 an expert is on two of them, dense weights on dp = 4.
    assert optimizer_bytes(config, 4000, 0) == 12 * 1000
    assert optimizer_bytes(config, 0, 4000) == 12 * 2000


def test_experts_count_as_such():
    spec, config = _make_moe(), _make_config(TrainerLayout(dp=2, ep=2), distributed_optimizer=True)
    experts = spec.num_layers * spec.num_experts * 3 * spec.hidden_size * spec.moe_ffn_size
    dense = _num_parameters(spec) - experts
    first = _table(config, spec)[0]
    assert first.gradients == 4 * (dense + experts // 2)
    assert first.optimizer == 12 * (dense // 2 + experts // 2)


def test_a_kl_term_holds_the_starting_model_too():
    config = replace(_make_config(), algorithm=AlgorithmConfig(kl_loss_coef=0.1))
    first, without = _table(config, _make_spec())[0], _table(_make_config(), _make_spec())[0]
    assert first.reference == first.weights > 0
    assert first.total == without.total + first.weights


# A layer of 256 with 8 heads of 32, 4 of keys and values, and 512 gate features, in bf16: four
# residual widths, queries and outputs, keys and values, gate + up + product, one float32 a head.
def test_activations_of_a_layer_are_those_counted_by_hand():
    spec = _make_spec()
    whole = 2 * (4 * 256 + 2 * 256 + 2 * 128 + 3 * 512) + 4 * 8
    assert layer_bytes(spec, TrainerLayout(), 0, 2) == whole
    assert layer_bytes(spec, TrainerLayout(tp=4, sequence_parallel=True), 0, 2) == whole / 4
    unsplit = 2 * 4 * 256  # without sequence parallelism every rank keeps the residuals
    assert layer_bytes(spec, TrainerLayout(tp=4), 0, 2) == (whole - unsplit) / 4 + unsplit


def test_a_token_takes_its_experts_activations():
    spec = _make_moe()
    dense = layer_bytes(_make_spec(ffn_size=0), TrainerLayout(), 0, 2)
    assert layer_bytes(spec, TrainerLayout(), 0, 2) == dense + 2 * 2 * (2 * 256 + 3 * 128)


def _simulate(layout: TrainerLayout, stage: int, num_micro_batches: int) -> int:
    """The most chunks in flight, from the order of passes that Megatron's schedules have."""
    total = num_micro_batches * layout.vpp
    if layout.vpp == 1:
        warm_up = layout.pp - stage - 1
    else:
        warm_up = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp
    warm_up = min(warm_up, total)
    held = most = warm_up
    for _ in range(total - warm_up):  # one forward, one backward
        held += 1
        most = max(most, held)
        held -= 1
    return most


@pytest.mark.parametrize("num_micro_batches", [4, 8, 32])
@pytest.mark.parametrize("layout", [TrainerLayout(pp=4), TrainerLayout(pp=4, vpp=2)])
def test_chunks_in_flight_are_those_of_one_forward_one_backward(
    layout: TrainerLayout, num_micro_batches: int
):
    for stage in range(layout.pp):
        expected = _simulate(layout, stage, num_micro_batches)
        assert chunks_in_flight(layout, stage, num_micro_batches) == expected


def test_recomputation_keeps_the_inputs_of_layers_and_one_layer_whole():
    spec = _make_spec()
    plain, config = _make_config(), _make_config(recompute=True)
    tokens, layer = (
        config.trainer.max_tokens_per_micro_batch,
        layer_bytes(spec, TrainerLayout(), 0, 2),
    )
    saved = stage_bytes(plain, spec, 0) - stage_bytes(config, spec, 0)
    assert saved == tokens * (3 * layer - 4 * 2 * 256)


def test_micro_batches_hold_as_many_longest_sequences_as_fit():
    config = _make_config(TrainerLayout(dp=2))
    # 64 prompts x 4 samples over 2 ranks, four sequences of 256 + 768 tokens in 4096.
    assert num_micro_batches(config) == 64 * 4 / 2 / 4


def test_keys_and_values_are_whole_heads_of_a_rank():
    spec, config = _make_spec(), _make_config()
    assert (
        kv_bytes_per_token(config, spec) == 2 * 2 * 2 * 32 * 4
    )  # bf16, K and V, 2 heads, 4 layers
    many = GeneratorConfig(layout=GeneratorLayout(tp=8, replicas=2))
    assert kv_bytes_per_token(replace(config, generator=many), spec) == 2 * 2 * 1 * 32 * 4


def test_what_does_not_fit_is_refused_with_its_parts():
    spec, config = _make_spec(), _make_config()
    table = _table(config, spec)
    check_memory(config, spec, table, DEVICE)
    small = replace(DEVICE, memory_gib=1.0)
    with pytest.raises(ConfigError, match=r"rank 1 \(generator\).*kv_cache 1\.0.* has 1\.0: 0\.\d"):
        check_memory(config, spec, table, small)
    exact = replace(DEVICE, memory_gib=max(one.total for one in table) / GIB)
    check_memory(config, spec, table, exact)


def test_a_cache_that_cannot_hold_one_sequence_is_refused():
    spec, config = _make_spec(), _make_config()
    tiny = replace(config, generator=replace(config.generator, kv_cache_gib=0.0001))
    with pytest.raises(ConfigError, match=r"kv_cache_gib is 0\.0001, .* of 1024 tokens"):
        check_memory(tiny, spec, _table(tiny, spec), DEVICE)
