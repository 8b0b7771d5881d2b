"""Divisions of ranks at measured rates: what shares cores, and which division is the fastest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launch.advise_measured import divide, divisions
from launch.advise_report import main
from launch.curves import Curves, DecodeCase, Rates, TrainCase, measured_pipeline, write_curves
from launch.simulate import Pipeline, simulate, steady
from megarl.errors import ConfigError
from tools import plan_layout

ROOT = Path(__file__).parents[3]
_CPU = ROOT / "configs/clusters/cpu_machine.yaml"
_TOKEN_SECONDS = 0.01
_BATCH, _LENGTH = 16, 50  # responses of a batch, tokens of each


def _make_curves(train_seconds: float) -> Curves:
    """Return curves of engines whose batch of 16 x 50 tokens takes ``train_seconds``; a decoding step
    takes 0.01 s for up to four sequences."""
    tokens = _BATCH * _LENGTH
    train = tuple(
        TrainCase(
            sequences=_BATCH // part,
            tokens=tokens // part,
            squares=tokens * _LENGTH // part,
            seconds=train_seconds / part,
            steps=1,
        )
        for part in (1, 2, 4)
    )
    decode = tuple(
        DecodeCase(running=running, held=100.0, seconds=_TOKEN_SECONDS, steps=1)
        for running in (1, 4)
    )
    return Curves(
        provenance={},
        alone=Rates(decode=decode, train=train),
        train_beside=train,
        dp=1,
        replicas=1,
        trainer_ranks=1,
        generator_ranks=1,
        sampling_seconds=0.0,
        tick_seconds=0.0,
        reward_sample_seconds=0.0,
        prompt_length=0.0,
        group_size=4,
        lengths=(_LENGTH,),
    )


def _make_run(curves: Curves) -> Pipeline:
    return replace(measured_pipeline(curves), batch_groups=4, max_staleness=2)


@pytest.mark.parametrize(
    ("dp", "replicas", "cores", "expected"),
    [
        (1, 1, 2, 2.0),  # decoding: sixteen responses, four at a time
        (1, 2, 3, 1.0),
        (1, 2, 2, 1.5),  # three ranks with two cores, of which each does a third
        (1, 4, 5, 1.0),  # training, which is on one rank
        (2, 4, 6, 0.5),
        (2, 2, 2, 1.5),
    ],
)
def test_a_step_takes_as_long_as_the_slower_side_and_the_cores_allow(
    dp: int, replicas: int, cores: int, expected: float
):
    curves = _make_curves(train_seconds=1.0)
    found = steady(
        simulate(divide(curves, _make_run(curves), dp, replicas, cores), 24), last=3, first=8
    )
    assert found.step_seconds == pytest.approx(expected, rel=0.02)


def test_training_gets_more_ranks_where_it_is_most_of_the_work():
    for train_seconds, theta in ((6.0, 0.75), (2.0, 0.5), (0.6, 0.25)):
        curves = _make_curves(train_seconds)
        best = divisions(curves, _make_run(curves), max_ranks=4, cores=4)[0]
        assert best.trainer_share == theta, train_seconds
        assert best.overrides == (
            f"trainer.layout.dp={round(4 * theta)}",
            f"generator.layout.replicas={round(4 - 4 * theta)}",
        )


def test_engines_that_were_slower_beside_one_another_are_so_in_every_division():
    alone = _make_curves(1.0)
    slower = replace(
        alone,
        train_beside=tuple(replace(c, seconds=1.3 * c.seconds) for c in alone.train_beside),
        sampling_seconds=1e-9,
        sampling_beside_seconds=1.5e-9,
        lengths=(_LENGTH,) * alone.group_size,
    )
    pair = [divide(curves, _make_run(curves), 1, 1, 2) for curves in (alone, slower)]
    assert [run.beside for run in pair] == [
        pytest.approx((1.0, 1.0)),
        pytest.approx((1.3, 1.5)),
    ]


def test_curves_of_several_copies_and_too_few_ranks_are_refused():
    curves = _make_curves(1.0)
    with pytest.raises(ConfigError, match="dp 2, replicas 1, expected one copy"):
        divisions(replace(curves, dp=2), _make_run(curves), 4, 4)
    with pytest.raises(ConfigError, match="needs 2 ranks, got 1"):
        divisions(curves, _make_run(curves), 1, 1)


def test_the_commands_print_the_divisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "curves.json"
    write_curves(_make_curves(0.6), file)
    measured = ["--curves", str(file), "--cluster", str(_CPU), "--json"]
    sizes = ["--prompts", "4", "--samples", "4"]
    assert main(["--gpus", "3", *measured, *sizes], Console()) == 0
    by_advise = json.loads(capsys.readouterr().out)["rows"]
    config = [str(ROOT / "configs/quickstart.yaml"), "trainer.layout.tp=1", "max_staleness=2"]
    own = ["data.train_batch_size=4", "rollout.n=4", "generator.max_running_sequences=4"]
    keep = ["rollout.partial_kv=keep"]
    assert plan_layout.main([*config, *own, *keep, "--ranks", "3", *measured]) == 0
    by_tool = json.loads(capsys.readouterr().out)["rows"]
    assert by_tool == by_advise
    assert {tuple(row["overrides"]) for row in by_tool} == {
        (f"trainer.layout.dp={dp}", f"generator.layout.replicas={replicas}")
        for dp, replicas in ((1, 1), (1, 2), (2, 1))
    }
    with pytest.raises(ConfigError, match="--curves goes with --gpus"):
        main(["--curves", str(file)], Console())


def test_a_plan_without_curves_is_the_advisors_as_overrides_that_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    config = "configs/qwen3_8b_8gpu.yaml"
    cluster = "configs/clusters/dgx_h100.yaml"
    architecture = "model.architecture=configs/models/qwen3_8b.yaml"
    assert (
        plan_layout.main([config, architecture, "--cluster", cluster, "--ranks", "32", "--json"])
        == 0
    )
    best = json.loads(capsys.readouterr().out)["rows"][0]
    loaded = plan_layout.load_config(Path(config), (architecture, *best["overrides"]))
    assert loaded.num_engine_ranks == 32
    assert loaded.trainer.layout.world_size == best["trainer_share"] * 32
