"""The planning command: its figures against published and closed-form ones, its refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.plan_reshard import main

ROOT = Path(__file__).parents[3]
BF16 = "configs/llama3_405b_1024gpu.yaml"
FP8 = "configs/llama3_405b_1024gpu_fp8.yaml"
KEYS = {
    *("coverage_exact", "plan_seconds", "rank_plan_seconds_max", "imbalance", "imbalance_floor"),
    *("predicted_seconds", "floor_seconds", "floors", "bytes_total", "num_operations"),
    *("num_messages", "staging_bytes_max", "forwarding", "model_parameters"),
}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def _figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# Parameters: 126 layers, embedding and head of the published architecture. Bytes: what one rank of
# the generator holds, counted by hand from its shards (key/value heads twice with tp 16).
@pytest.mark.parametrize(
    ("arguments", "gigabytes", "most_seconds"),
    [
        ((BF16,), 51.27, 1.30),
        ((FP8,), 51.28, 1.30),
        ((FP8, "generator.layout.tp=16", "generator.layout.replicas=32"), 25.91, 0.65),
    ],
)
def test_a_405b_transfer_is_planned_exactly_and_near_its_floor(
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    gigabytes: float,
    most_seconds: float,
) -> None:
    found = _figures(capsys, *arguments)
    assert found.keys() >= KEYS
    assert found["coverage_exact"] is True
    assert found["model_parameters"] == 405_853_388_800
    received = found["bytes"]["generator_received"]
    assert received["max"] == received["min"] == pytest.approx(gigabytes * 1e9, abs=5e6)
    assert found["bytes_total"] == 512 * received["max"]
    assert found["floors"]["receiver"] == pytest.approx(gigabytes / 50, rel=1e-3)
    assert found["floors"]["sender_unicast"] == pytest.approx(gigabytes / 50, rel=1e-3)
    assert found["floor_seconds"] < found["predicted_seconds"] <= most_seconds
    assert found["imbalance"] <= 1.05 * found["imbalance_floor"]
    assert found["forwarding"] == "none"
    assert found["plan_process_seconds"] < 3


def test_generators_that_outnumber_trainers_pass_weights_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    split = ("trainer.layout.dp=2", "generator.layout.replicas=48")
    found = _figures(capsys, BF16, *split)
    assert found["forwarding"] != "none"
    assert found["predicted_seconds"] <= 1.30
    assert found["floors"]["sender_unicast"] == pytest.approx(3 * 51.27 / 50, rel=1e-3)
    assert found["forwarding_seconds"]["none"] > 3.07
    # Trainers send one copy of 811 GB and, to each rank, the norms.
    assert found["bytes"]["trainer_sent"]["mean"] == pytest.approx(821e9 / 256, rel=0.03)


SMALL = (
    "configs/quickstart.yaml",
    "model.path=nowhere",
    "model.architecture=configs/models/llama3.1_405b.yaml",
    "weights.cluster=configs/clusters/cpu_machine.yaml",
    "generator.layout.tp=2",
    "generator.layout.replicas=2",
    "weights.message_mib=4096",
)


def test_all_messages_of_a_small_run_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = _figures(capsys, *SMALL)
    # A layout of tp 2 on both sides: a generator's messages all come from its own trainer rank,
    # except for norms, so that both replicas' are half of all that there are.
    per_generator = [found["rank_messages"][rank] for rank in ("2", "3", "4", "5")]
    assert found["num_messages"] == sum(per_generator)
    assert found["num_operations"] >= found["num_messages"]


def test_ranks_that_give_themselves_alone_send_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "configs/quickstart.yaml",
        "model.architecture=configs/models/qwen3_8b.yaml",
        "weights.cluster=configs/clusters/cpu_machine.yaml",
        *("placement=colocated", "mode=sync", "trainer.layout.tp=1", "generator.layout.tp=1"),
    ]
    found = _figures(capsys, *arguments)
    assert (found["bytes_total"], found["imbalance"]) == (0, 1)
    assert main(arguments) == 0


def test_the_report_and_the_picture_are_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    assert main([FP8, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    for words in ("405.85 billion", "proven", "floor: busiest receiver", "spread", "Busiest ranks"):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((BF16, "trainer.layout.tp=3"), "tp 3 does not divide"),
        ((BF16, "trainer.layout.num_layers_in_last_stage=8"), "do not divide over"),
        ((BF16, "generator.layout.tp=24"), "tp 24 does not divide"),
        ((BF16, "weights.cluster="), "weights.cluster is empty"),
        ((BF16, "weights.cluster=nowhere.yaml"), "nowhere.yaml does not exist"),
        ((BF16, "weights.cluster=configs/quickstart.yaml"), "cluster file"),
        ((BF16, "trainer.layot.tp=8"), "did you mean"),
        (("nowhere.yaml",), "nowhere.yaml does not exist"),
        ((BF16, "model.architecture=nowhere.json"), "nowhere.json"),
        (
            (BF16, "generator.layout.quantization=fp8_tensor", "weights.forwarding=ring"),
            "cannot pass on",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main([*arguments, "--json"]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert words in caught.err
    assert caught.err.count("\n") == 1


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from tools.plan_reshard import main; "
        f"main([{FP8!r}, '--json']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr or "torch was imported"
    assert json.loads(done.stdout)["coverage_exact"] is True
