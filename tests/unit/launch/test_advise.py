"""The advisor against exhaustive search, closed forms and the simulator."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launch.advise import (
    Setting,
    advise,
    asynchronous_frontier,
    best_synchronous,
    layouts_of,
    stage_layers,
)
from launch.advise_report import PAPER, main
from launch.decoding import Replica, Response, seconds_to_empty
from launch.engine_costs import (
    GeneratorPlan,
    TrainerPlan,
    Workload,
    decode_seconds,
    generator_bytes,
    train_seconds,
    trainer_bytes,
)
from launch.lengths import Lengths
from launch.simulate import Pipeline, simulate, steady
from launch.site import load_site
from megarl.errors import ConfigError
from megatron_bridge.models.released import load_released

ROOT = Path(__file__).parents[3]
_SITE = load_site(ROOT / "configs/clusters/dgx_h100.yaml")


def _make_setting(model: str = "llama3.1_8b", num_gpus: int = 32, **changes) -> Setting:
    lengths = Lengths(mean=300, spread=0.6, longest=1024)
    base = Setting(
        model=model,
        spec=load_released(ROOT / f"configs/models/{model}.yaml").spec,
        num_gpus=num_gpus,
        site=_SITE,
        workload=Workload(prompts=64, samples=4, lengths=lengths),
    )
    return replace(base, **changes)


@pytest.mark.parametrize("model", ["llama3.1_8b", "llama3.1_70b", "llama3.1_405b"])
def test_sizes_are_those_of_the_published_models(model: str):
    released = load_released(ROOT / f"configs/models/{model}.yaml")
    assert _make_setting(model).sizes.parameters == released.parameters


def test_a_trainers_bytes_are_eighteen_a_parameter_without_replicas_and_fewer_with():
    setting = _make_setting()
    parameters = setting.sizes.parameters
    alone = TrainerPlan(tp=1, pp=1, dp=1, micro_batch=0)
    assert trainer_bytes(setting.sizes, setting.workload, alone) == pytest.approx(18 * parameters)
    many = replace(alone, dp=12)
    assert trainer_bytes(setting.sizes, setting.workload, many) == pytest.approx(7 * parameters)


def test_decoding_one_sequence_reads_all_weights_once():
    setting = _make_setting()
    device = replace(_SITE.device, decode_efficiency=1.0, allreduce_seconds=0.0)
    for pp in (1, 4):
        plan = GeneratorPlan(tp=2, pp=pp, replicas=1, slots=1)
        seconds = decode_seconds(setting.sizes, plan, device)(1, 0)
        reading = 2 * setting.sizes.parameters / (2 * 3.35e12)
        assert seconds == pytest.approx(reading + 32 * 1e-5)


def test_training_takes_the_arithmetic_the_launches_and_the_bubble():
    setting = _make_setting()
    plan = TrainerPlan(tp=2, pp=4, dp=2, micro_batch=8)
    work = setting.sizes.train_flops * 8 * 4 / 3 / (8 * 989e12 * 0.4)
    expected = (256 / (2 * 8) + 3) * (work + 32 / 4 * 3e-4)
    found = train_seconds(setting.sizes, setting.workload, plan, _SITE.device)
    assert found == pytest.approx(expected)


def test_everything_proposed_fits_and_uses_all_gpus():
    setting = _make_setting("llama3.1_70b", num_gpus=64)
    for point in asynchronous_frontier(setting):
        assert point.trainer.ranks + point.generator.ranks == 64
        both = (
            trainer_bytes(setting.sizes, setting.workload, point.trainer),
            generator_bytes(setting.sizes, setting.workload, point.generator),
        )
        assert max(both) <= setting.gpu_bytes
    base = best_synchronous(setting)
    assert (base.trainer.tp, base.trainer.pp) == (base.generator.tp, base.generator.pp)
    assert base.trainer.nbytes + base.generator.nbytes <= setting.gpu_bytes


def test_the_405b_model_needs_64_gpus_with_both_engines_as_in_the_paper():
    setting = _make_setting("llama3.1_405b", num_gpus=1024, workload=Workload())
    base = best_synchronous(setting)
    assert base.trainer.tp * base.trainer.pp == 64
    assert 126 % base.trainer.pp == 0 or stage_layers(126, base.trainer.pp) is not None


def test_asynchronous_training_is_faster_than_the_baseline_and_fp8_no_slower():
    setting = _make_setting("llama3.1_70b", num_gpus=64, max_staleness=2)
    with_fp8, without = advise(setting), advise(replace(setting, fp8=False))
    assert with_fp8.speedup > 1.2
    assert with_fp8.proposals[0].layout.step_seconds <= without.proposals[0].layout.step_seconds
    assert without.best.layout.generator.weight_bytes == 2
    assert with_fp8.theorem_speedup > 1


def test_formula_and_simulation_agree_where_lengths_are_equal():
    lengths = Lengths(mean=300, spread=0.0)
    setting = _make_setting(workload=Workload(prompts=64, samples=4, lengths=lengths))
    best = advise(setting).best
    assert best.simulated.step_seconds == pytest.approx(best.layout.step_seconds, rel=0.15)


def test_the_baselines_generation_is_that_of_an_on_policy_simulation():
    setting = _make_setting()
    generator = best_synchronous(setting).generator
    pipeline = Pipeline(
        batch_groups=64,
        group_size=4,
        max_staleness=0,
        replicas=generator.replicas,
        slots=generator.slots,
        lengths=setting.workload.lengths,
        step_seconds=decode_seconds(setting.sizes, generator, _SITE.device),
        train_seconds=lambda lengths: 1.0,
        prompt_length=200,
    )
    found = steady(simulate(pipeline, 16)).wait_seconds
    assert generator.seconds == pytest.approx(found, rel=0.2)


def test_a_replica_empties_in_the_sum_of_its_steps():
    replica = Replica(2, lambda running, held: 0.1 * running)
    replica.add([Response(group=0, length=length) for length in (10, 4, 3)])
    # Two run for 4 steps, two for 3 more, then the longest alone for 3.
    assert seconds_to_empty(replica) == pytest.approx(4 * 0.2 + 3 * 0.2 + 3 * 0.1)


@pytest.mark.parametrize("layers", [32, 80, 126])
def test_uneven_stages_hold_all_layers(layers: int):
    for pp in (1, 2, 4, 8, 16):
        found = stage_layers(layers, pp)
        if found and found != (0, 0):
            middle = -(-layers // pp)
            assert sum(found) + middle * (pp - 2) == layers
            assert max(found) <= middle


def test_layouts_are_those_of_a_configuration():
    best = advise(_make_setting()).best.layout
    trainer, generator = layouts_of(_make_setting(), best)
    assert trainer.world_size + generator.world_size == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": 12}, "two or more whole hosts of 8"),
        ({"model": "llama3.1_405b", "num_gpus": 16}, "does not fit on 16 GPUs"),
        ({"model": "qwen3_30b_a3b"}, "advisor plans dense models, got 128 experts"),
        ({"max_staleness": 0}, "max_staleness is 0, expected at least 1"),
    ],
)
def test_what_cannot_be_advised_on_is_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        advise(_make_setting(**changes))


def test_the_command_prints_the_papers_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(ROOT)
    assert main(["--json", "--plot", str(tmp_path / "frontier.png")], Console()) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["model"], row["paper_speedup"]) for row in rows] == [
        (asked.model.stem, asked.paper_speedup) for asked in PAPER
    ]
    assert all(row["predicted_speedup"] > 1 for row in rows)
    assert all(len(row["asynchronous"]) == 3 for row in rows)
    assert (tmp_path / "frontier.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match="--model and --gpus go together"):
        main(["--gpus", "8"], Console())
