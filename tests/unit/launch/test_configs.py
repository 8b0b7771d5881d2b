"""Every run of `configs/` on the machines it is for: it loads, is placed, fits, is planned and rendered."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from launch.command import main
from megarl.config import PolicyLoss
from megarl.config_file import load_config

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
BLOCK = 128 * 128  # weights that share a float32 scale in FP8
# The quick start's model is made by `megarl data`; its sizes are those of megarl/data/starting_model.py.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration, what it should be given, and counts made by hand."""

    name: str
    cluster: str = "dgx_h100"
    model: str = ""  # of configs/models, where the configuration names none
    hosts: int
    trainers: int
    generators: int
    states_gib: float  # weights, gradients and optimizer of the fullest trainer rank
    weights_gib: float  # of a generator rank


def dense(parameters: float, ranks: int, dp: int) -> float:
    """GiB of a bf16 parameter's 2 + 4 + 12 / dp bytes on one of the instance's ranks."""
    return parameters / ranks * (6 + 12 / dp) / 2**30


def llama(layers: int, width: int, ffn: int, tp: int) -> float:
    """GiB of an FP8 rank: layers' matrices in bytes and scales; embedding and head in bf16."""
    heads = 2 * width + 2 * 1024  # queries and outputs, keys and values of 8 heads of 128
    matrices = layers * width * (heads + 3 * ffn) * (1 + 4 / BLOCK)
    return (matrices + 2 * 2 * 128256 * width) / tp / 2**30


CASES = [
    Case(
        name="llama3_8b_256gpu",
        hosts=32,
        trainers=160,
        generators=96,
        states_gib=dense(8.030e9, 1, 160),
        weights_gib=llama(32, 4096, 14336, 8),
    ),
    Case(
        name="llama3_70b_256gpu",
        hosts=32,
        trainers=192,
        generators=64,
        states_gib=dense(70.554e9, 8, 24),
        weights_gib=llama(80, 8192, 28672, 8),
    ),
    # Seven of 126 layers and the embedding are less than eight of a middle stage; of eight heads of keys and
    # values each is on two of 16 ranks.
    Case(
        name="llama3_405b_1024gpu",
        hosts=128,
        trainers=512,
        generators=512,
        states_gib=dense(8 * 3.188e9, 8, 4),
        weights_gib=(405.85e9 + 126 * 2 * 1024 * 16384) * 2 / 16 / 2**30,
    ),
    Case(
        name="llama3_405b_1024gpu_fp8",
        hosts=128,
        trainers=512,
        generators=512,
        states_gib=dense(8 * 3.188e9, 8, 4),
        weights_gib=llama(126, 16384, 53248, 8),
    ),
    Case(  # 29.0e9 of experts, an eighth on a rank and on two of them; tp 2 and dp 8 share the rest
        name="qwen3_30b_a3b_4node",
        hosts=4,
        trainers=16,
        generators=16,
        states_gib=dense(28.991e9, 8, 2) + dense(1.541e9, 2, 8),
        weights_gib=30.532e9 * 2 / 4 / 2**30,
    ),
    Case(
        name="llama3_8b_1node",
        cluster="one_node",
        hosts=1,
        trainers=6,
        generators=2,
        states_gib=dense(8.030e9, 2, 3),
        weights_gib=8.030e9 * 2 / 2**30,
    ),
    Case(
        name="qwen3_8b_8gpu",
        cluster="one_node",
        model="qwen3_8b",
        hosts=1,
        trainers=4,
        generators=4,
        states_gib=dense(8.191e9, 4, 1),
        weights_gib=8.191e9 * 2 / 2**30,
    ),
    Case(  # float32 without a distributed optimizer: 16 bytes each; 2 layers of 64 x (384 + 3 x 192)
        name="quickstart",
        cluster="cpu_machine",
        hosts=1,
        trainers=2,
        generators=1,
        states_gib=16 * (2 * 64 * (384 + 576) + 32 * 64) / 2 / 2**30,
        weights_gib=4 * (2 * 64 * (384 + 576) + 64 * 64) / 2**30,
    ),
]


def test_every_run_is_among_the_cases():
    runs = {file.stem for file in CONFIGS.glob("*.yaml") if not file.stem.endswith("_sft")}
    assert runs == {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_placed_fits_is_planned_and_rendered(
    case: Case, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    overrides = [f"model.architecture=configs/models/{case.model}.yaml"] if case.model else []
    if case.name == "quickstart":
        (tmp_path / "config.json").write_text(json.dumps(TINY))
        overrides = [f"model.architecture={tmp_path / 'config.json'}"]
    arguments = [f"configs/{case.name}.yaml", *overrides, "--dry-run", "--json"]
    began = time.process_time()
    assert main([*arguments, f"--cluster=configs/clusters/{case.cluster}.yaml"], Console()) == 0
    assert time.process_time() - began < 30
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["num_hosts"] == case.hosts
    assert found["num_ranks"] == case.trainers + case.generators + 1
    rows = found["memory_gib"]
    trainers = [row for row in rows if row["executor"] == "trainer"]
    generators = [row for row in rows if row["executor"] == "generator"]
    assert trainers[-1]["ranks"][1] == case.trainers - 1
    assert generators[-1]["ranks"] == [case.trainers, case.trainers + case.generators - 1]
    states = max(row["weights"] + row["gradients"] + row["optimizer"] for row in trainers)
    assert states == pytest.approx(case.states_gib, rel=0.01)
    assert generators[-1]["weights"] == pytest.approx(case.weights_gib, rel=0.01)
    assert 0 < found["predicted_sync_seconds"] < found["predicted_step_seconds"]
    assert f"#SBATCH --nodes={case.hosts}\n" in found["sbatch"]


@pytest.mark.parametrize(
    ("name", "num_gpus"),
    [("llama3_8b_256gpu", 256), ("llama3_70b_256gpu", 256), ("llama3_405b_1024gpu", 1024)],
)
def test_the_papers_runs_are_the_papers(name: str, num_gpus: int):
    """Section 8 of the LlamaRL paper."""
    config = load_config(CONFIGS / f"{name}.yaml", ())
    assert config.num_engine_ranks == num_gpus
    assert (config.data.train_batch_size, config.rollout.n) == (512, 4)
    assert config.trainer.lr == 2e-7
    assert config.algorithm.policy_loss is PolicyLoss.AIPO
    assert config.data.train_path == "data/math/train.jsonl"
