"""Step time against closed forms: arithmetic over a peak, bytes over a rate."""

from dataclasses import replace

import pytest

from launch.memory import Held, kv_bytes_per_token
from launch.predict import MeanLengths, predict_step
from launch.site import GIB, Device
from megarl.config import (
    DataConfig,
    GeneratorConfig,
    ModelConfig,
    PartialKv,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from megatron_bridge.models.flops import training_flops
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.spec import ModelSpec

SPEC = ModelSpec(
    family="llama",
    vocab_size=1024,
    hidden_size=256,
    ffn_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    norm_eps=1e-5,
    rope_theta=1e4,
    max_positions=4096,
    tied_embeddings=False,
)
DEVICE = Device(
    memory_gib=80.0,
    peak_tflops=1.0,
    train_efficiency=0.5,
    memory_bytes_per_second=1e9,
    decode_efficiency=0.25,
)
LENGTHS = MeanLengths(prompt=100, response=300)
HELD = Held(nbytes=5_000_000, dense=2_500_000)


def _make_config(max_staleness: int = 1, **layout: int) -> RunConfig:
    return RunConfig(
        max_staleness=max_staleness,
        model=ModelConfig(dtype="bfloat16"),
        trainer=TrainerConfig(layout=TrainerLayout(**layout), max_tokens_per_micro_batch=800),
        generator=GeneratorConfig(
            layout=GeneratorLayout(replicas=2), kv_cache_gib=1.0, max_running_sequences=10
        ),
        rollout=RolloutConfig(n=4, max_response_length=900, partial_kv=PartialKv.KEEP),
        data=DataConfig(train_batch_size=20, max_prompt_length=200),
    )


def _predict(config: RunConfig, device: Device = DEVICE, sync_seconds: float = 0.5):
    return predict_step(config, SPEC, device, HELD, LENGTHS).with_sync(sync_seconds)


def test_training_is_arithmetic_over_the_reached_peak_of_all_ranks():
    alone = 80 * training_flops(SPEC, [400]) / 0.5e12
    assert _predict(_make_config()).train_seconds == pytest.approx(alone)
    assert _predict(_make_config(tp=2, dp=2)).train_seconds == pytest.approx(alone / 4)


def test_a_pipeline_waits_to_fill_and_to_drain():
    # 80 sequences of 400 tokens are 40 micro-batches of 800; with 4 stages 3 more pass by.
    assert _predict(_make_config(pp=4)).bubble == pytest.approx(43 / 40)
    assert _predict(_make_config(pp=4, vpp=2)).bubble == pytest.approx(1 + 3 / 80)


def test_recomputation_costs_a_third_more():
    config = _make_config()
    again = replace(config, trainer=replace(config.trainer, recompute=True))
    ratio = _predict(again).train_seconds / _predict(config).train_seconds
    assert ratio == pytest.approx(4 / 3)


def test_decoding_reads_weights_once_and_the_cache_of_each_sequence():
    found = _predict(_make_config())
    assert found.running_sequences == 10
    read = 5_000_000 + 10 * 250 * kv_bytes_per_token(_make_config(), SPEC)
    assert found.decode_step_seconds == pytest.approx(read / 0.25e9)
    # 40 sequences a replica, ten at a time, 300 steps each.
    assert found.decode_seconds == pytest.approx(4 * 300 * read / 0.25e9)
    assert found.prefill_seconds == pytest.approx(10 * training_flops(SPEC, [100]) / 3 / 0.5e12)


def test_the_cache_bounds_how_many_decode_together():
    config = _make_config()
    three = 3.5 * 400 * kv_bytes_per_token(config, SPEC) / GIB
    small = replace(config, generator=replace(config.generator, kv_cache_gib=three))
    assert _predict(small).running_sequences == 3


def test_of_the_experts_only_those_of_running_sequences_are_read():
    spec = replace(SPEC, family="mixtral", num_experts=8, experts_per_token=2, moe_ffn_size=128)
    held = Held(nbytes=10_000_000, dense=1_000_000, experts=4_000_000)
    config = _make_config()
    one = replace(config, generator=replace(config.generator, max_running_sequences=1))
    found = predict_step(one, spec, DEVICE, held, LENGTHS)
    # One token goes through a quarter of the experts: 1 + 4 / 4 million parameters of 2 bytes.
    read = 4_000_000 + 250 * kv_bytes_per_token(config, spec)
    assert found.decode_step == pytest.approx(read / 0.25e9)


def test_small_all_reduces_add_up():
    config = _make_config()
    two = replace(config.generator, layout=GeneratorLayout(tp=2, replicas=2))
    slow = replace(DEVICE, allreduce_seconds=1e-3)
    config = replace(config, generator=two)
    more = _predict(config, slow).decode_step_seconds - _predict(config).decode_step_seconds
    assert more == pytest.approx(2 * 4 * 1e-3)


def test_side_by_side_the_slower_side_counts_and_in_turns_both():
    together, turns = _predict(_make_config()), _predict(_make_config(max_staleness=0))
    slower = max(together.train_seconds, together.generate_seconds)
    assert together.step_seconds == pytest.approx(slower + 0.5)
    both = turns.train_seconds + turns.generate_seconds
    assert turns.step_seconds == pytest.approx(both + 0.5)
    assert turns.idle_ratios[0] == pytest.approx(1 - turns.train_seconds / turns.step_seconds)


def test_without_staleness_the_longest_response_is_waited_for():
    config = _make_config(max_staleness=0)
    wide = replace(config, generator=replace(config.generator, max_running_sequences=100))
    found = _predict(wide)
    assert found.running_sequences == 40  # all of a replica: 300 steps on average, 900 at most
    assert found.decode_seconds == pytest.approx(900 * found.decode_step_seconds)


def test_a_transfer_every_few_batches_costs_its_share():
    config = _make_config()
    rare = replace(config, weights=replace(config.weights, sync_every=4))
    saved = _predict(config).step_seconds - _predict(rare).step_seconds
    assert saved == pytest.approx(0.5 * 3 / 4)
