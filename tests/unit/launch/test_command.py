"""``megarl launch --dry-run``: what it says of real configurations, and what it refuses."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from launch.command import main
from megarl.errors import ConfigError

ROOT = Path(__file__).parents[3]
DGX = "configs/clusters/dgx_h100.yaml"
BIG = "configs/llama3_405b_1024gpu.yaml"
EIGHT = (
    "configs/qwen3_8b_8gpu.yaml",
    "model.architecture=configs/models/qwen3_8b.yaml",
)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def _figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--dry-run", "--json"], Console()) == 0
    return json.loads(capsys.readouterr().out)


def test_1024_gpus_are_placed_sized_planned_and_rendered(capsys: pytest.CaptureFixture[str]):
    began = time.process_time()
    found = _figures(capsys, BIG, "--cluster", DGX)
    assert time.process_time() - began < 30
    assert found["fits"] is True
    assert (found["num_hosts"], found["num_ranks"], found["hosts_per_replica"]) == (128, 1025, 2)
    assert found["rail_aligned"] is True
    generator = found["memory_gib"][-1]
    assert generator["ranks"] == [512, 1023]
    assert generator["weights"] == pytest.approx(51.27e9 / 2**30, abs=0.01)  # see test_plan_reshard
    assert found["memory_gib_max"] == generator["total"] < 79.6
    # 126 layers of 3.2e9 parameters on 8 of 16 stages' ranks: 2 bytes of weights, 4 of gradients.
    middle = found["memory_gib"][1]
    assert middle["weights"] == pytest.approx(2 * 8 * 3.188e9 / 8 / 2**30, rel=0.01)
    assert middle["gradients"] == pytest.approx(2 * middle["weights"], rel=1e-3)
    assert middle["optimizer"] == pytest.approx(12 / 4 / 2 * middle["weights"], rel=1e-3)
    assert found["sync_floor_seconds"] < found["predicted_sync_seconds"] <= 1.30
    step = found["prediction"]
    slower = max(step["train_seconds"], step["prefill_seconds"] + step["decode_seconds"])
    assert found["predicted_step_seconds"] == pytest.approx(slower + step["sync_seconds"])
    script = found["sbatch"]
    assert "#SBATCH --nodes=128\n" in script
    assert "WORLD_SIZE=1025\n" in script
    assert found["submit"].startswith("sbatch ")


def test_training_takes_the_arithmetic_of_six_operations_a_parameter(
    capsys: pytest.CaptureFixture[str],
):
    lengths = ("--prompt-length", "100", "--response-length", "900")
    found = _figures(capsys, BIG, "--cluster", DGX, *lengths)
    # 8 with recomputation, 405.85e9 parameters, 2048 sequences; attention adds a percent.
    work = 8 * 405.85e9 * 2048 * 1000 / (512 * 989e12 * 0.4)
    seconds = found["prediction"]["train_seconds"] / found["prediction"]["bubble"]
    assert work < seconds < 1.02 * work


def test_one_host_of_eight(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    picture = tmp_path / "placement.png"
    found = _figures(capsys, *EIGHT, "--cluster", DGX, "--plot", str(picture))
    assert (found["num_hosts"], found["num_ranks"]) == (1, 9)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_seeds_become_an_array(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    given: dict[Path, str] = {}
    monkeypatch.setattr("launch.command.submit", lambda job, configs, _: given.update(configs))
    monkeypatch.setattr("launch.command.check_run", lambda command, config: None)
    arguments = [*EIGHT, f"run_dir={tmp_path}", "name=a", "--cluster", DGX, "--json"]
    assert main([*arguments, "--seeds", "3,7", "--no-preflight"], Console()) == 0
    script = json.loads(capsys.readouterr().out)["sbatch"]
    assert "#SBATCH --array=3,7\n" in script
    assert "\npreflight\n" not in script
    configs = {folder: yaml.safe_load(text) for folder, text in given.items()}
    expected = {tmp_path / f"a-seed{seed}": (f"a-seed{seed}", seed) for seed in (3, 7)}
    assert {folder: (one["name"], one["seed"]) for folder, one in configs.items()} == expected
    with pytest.raises(SystemExit):
        main([*arguments, "--seeds", "3,b"], Console())
    assert "'3,b' is not of the form 1,2,3" in capsys.readouterr().err


def test_a_person_reads_it_all(capsys: pytest.CaptureFixture[str]):
    assert main([*EIGHT, "--cluster", DGX, "--dry-run"], Console(width=80)) == 0
    text = capsys.readouterr().out
    for words in (
        "max_tokens_per_micro_batch: 16384",
        "host    0 | 0-3 trainer stage 0 dp 0 | 4 generator 0 | 5 generator 1",
        "GiB a rank, of 79.6",
        "note: fault.max_restarts is 0: the job ends when a rank fails",
        "weights: 0.",
        "step: ",
        "#SBATCH --nodes=1",
        "submit: sbatch --parsable ",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("trainer.layout.tp=1", "trainer.layout.sequence_parallel=false"),
            "rank 0 (trainer) needs",
        ),
        (("generator.kv_cache_gib=70",), "rank 4 (generator) needs"),
        (
            ("--response-length", "4000"),
            "--response-length is 4000, expected above 0 and at most 2048",
        ),
        (("--prompt-length", "0"), "--prompt-length is 0, expected above 0 and at most 512"),
        (("generator.kv_cache_gib=0.01",), "a sequence of 2560 tokens must fit"),
        (("trainer.layout.tp=2", "trainer.layout.dp=1", "generator.layout.tp=4"), "2 hosts of 8"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], words: str):
    with pytest.raises(ConfigError) as caught:
        main([*EIGHT, *overrides, "--cluster", DGX, "--dry-run"], Console())
    assert words in str(caught.value)


def test_another_division_of_1024_gpus_fits_too(capsys: pytest.CaptureFixture[str]):
    layouts = ("trainer.layout.dp=2", "generator.layout.replicas=48")
    found = _figures(capsys, BIG, *layouts, "--cluster", DGX)
    assert (found["fits"], found["num_hosts"]) == (True, 128)
    assert 0 < found["predicted_sync_seconds"] < found["predicted_step_seconds"]


def test_what_does_not_fit_is_also_said_as_json(capsys: pytest.CaptureFixture[str]):
    arguments = [*EIGHT, "generator.kv_cache_gib=70", "--cluster", DGX, "--dry-run", "--json"]
    with pytest.raises(ConfigError) as caught:
        main(arguments, Console())
    assert json.loads(capsys.readouterr().out) == {"fits": False, "why": str(caught.value)}


def test_the_command_line_refuses_in_one_sentence_and_without_torch():
    code = (
        "import sys; sys.argv[1:] = sys.argv[2:]\n"
        "from megarl.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    arguments = ["launch", *EIGHT, "generator.kv_cache_gib=70", "--cluster", DGX, "--dry-run"]
    result = subprocess.run(
        [sys.executable, "-c", code, "", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == "False\n"
    assert result.stderr.startswith("megarl: rank 4 (generator) needs 9")
    assert "Traceback" not in result.stderr
