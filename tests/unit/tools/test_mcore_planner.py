"""Megatron-Core's own planner on small layouts: what its rules say it does, and what it refuses."""

import pytest

from megarl.config import GeneratorConfig, RunConfig, TrainerConfig
from megarl.errors import ConfigError
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from tests.unit.megatron_bridge.oracle import make_spec
from tools.mcore_planner import peer_figures

SPEC = make_spec(vocab_size=128, num_layers=2)


def _make_config(replicas: int, generator_tp: int = 1, **layout: int) -> RunConfig:
    trainer = TrainerLayout(**{"vocab_divisor": 16, **layout})
    return RunConfig(
        trainer=TrainerConfig(layout=trainer),
        generator=GeneratorConfig(layout=GeneratorLayout(tp=generator_tp, replicas=replicas)),
    )


def test_its_first_replica_sends_all_that_is_sharded() -> None:
    found = peer_figures(SPEC, _make_config(4, tp=2, dp=2))
    assert not found.refused
    # Two of four trainers share the load, as in its rule: the first of each group of replicas.
    assert found.imbalance == pytest.approx(2, rel=0.02)
    assert found.loop_seconds > 0


def test_vocabularies_padded_to_other_sizes_are_refused() -> None:
    odd = make_spec(vocab_size=100, num_layers=2)  # 144 rows with tp 2, 192 with tp 4
    found = peer_figures(odd, _make_config(2, 4, tp=2, vocab_divisor=24))
    assert "Cannot build TP descriptor" in found.refused
    assert "embedding" in found.refused


def test_what_is_no_comparison_is_refused() -> None:
    config = RunConfig(generator=GeneratorConfig(layout=GeneratorLayout(pp=2)))
    with pytest.raises(ConfigError, match="without pipeline stages"):
        peer_figures(SPEC, config)
