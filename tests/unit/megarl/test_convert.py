"""The command line of conversions: what it prints, its exit codes, and that it is megarl's too."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megarl.convert import main
from tests.unit.megatron_bridge.checkpoints import make_mixture, make_spec
from tests.unit.megatron_bridge.folders import content, random_tensors, write_hf

ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-m", "tools.convert_checkpoint")
SPEC = make_mixture(tied_embeddings=True)


def _run(*arguments: object) -> tuple[int, str]:
    console = Console(record=True, width=200, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    code = main([str(argument) for argument in arguments], console)
    return code, console.export_text()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "in", SPEC, random_tensors(SPEC))


def test_a_dry_run_of_405b_needs_its_config_alone(tmp_path: Path) -> None:
    """Llama-3.1-405B: 405,853,388,800 parameters in bfloat16, as published."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [
            *COMMAND,
            "hf-to-megatron",
            folder,
            tmp_path / "out",
            "--dry-run",
            "--tp",
            "8",
            "--pp",
            "2",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 10  # its own time: others use the machine, too
    assert "405,853,388,800 (405.85e9)" in result.stdout
    assert "811.7" in result.stdout  # GB: two bytes each, and what torch.save puts around
    assert not (tmp_path / "out").exists()


def test_there_and_back_and_verified(source: Path, tmp_path: Path) -> None:
    code, said = _run("hf-to-megatron", source, tmp_path / "megatron", "--tp", 2, "--ep", 2)
    assert code == 0
    assert "done" in said
    code, said = _run("megatron-to-hf", tmp_path / "megatron", tmp_path / "out")
    assert code == 0
    code, said = _run("verify", source, tmp_path / "out")
    assert code == 0
    count = len(random_tensors(SPEC))
    assert f"{count} of {count} tensors agree" in said


def test_json_has_the_figures_of_a_plan_and_of_a_conversion(source: Path, tmp_path: Path) -> None:
    numel = sum(tensor.numel() for tensor in random_tensors(SPEC).values())
    files: list[int] = []
    for more in (["--dry-run"], []):
        code, said = _run("hf-to-hf", source, tmp_path / "out", "--json", *more)
        assert code == 0
        found = json.loads(said)
        assert found["parameters"] == numel
        assert found["tensors"] == len(random_tensors(SPEC))
        assert found["seconds"] > 0
        files.append(found["files"])
        assert (tmp_path / "out").exists() is not bool(more)
    written = [path for path in (tmp_path / "out").iterdir() if "manifest" not in path.name]
    assert files == [len(written)] * 2
    weights = tmp_path / "out" / "model.safetensors"
    assert weights.stat().st_size == found["bytes"]


def test_verify_ends_with_one_where_tensors_differ(source: Path, tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    tensors["model.norm.weight"] += 1
    other = write_hf(tmp_path / "other", SPEC, tensors)
    code, said = _run("verify", source, other)
    assert code == 1
    assert "model.norm.weight differs in 16 of 16 elements" in said


def test_inspect_lists_tensors_layout_and_ties(source: Path, tmp_path: Path) -> None:
    code, said = _run("inspect", source)
    assert code == 0
    for words in ("model.embed_tokens.weight", "[100, 16]", "bfloat16", "3,200", "qwen2_moe"):
        assert words in said
    assert "lm_head = embed_tokens" in said
    assert "none: whole tensors" in said


def test_mistakes_are_one_sentence_and_leave_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(tmp_path)
    for words, *arguments in (
        ("out exists already", "hf-to-hf", source, tmp_path / "out"),
        ("tp 3 does not divide", "hf-to-megatron", source, tmp_path / "new", "--tp", 3),
        ("does not exist", "inspect", tmp_path / "nowhere"),
    ):
        (tmp_path / "out").mkdir(exist_ok=True)
        code, _ = _run(*arguments)
        assert code == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.startswith("convert: ")
        assert len(error.splitlines()) == 1
    assert content(tmp_path) == before


def test_the_fp8_option_and_the_dtype_reach_the_files(source: Path, tmp_path: Path) -> None:
    spec = make_spec(hidden_size=128, ffn_size=128, num_layers=1)
    source = write_hf(tmp_path / "wide", spec, random_tensors(spec))
    assert _run("hf-to-hf", source, tmp_path / "fp8", "--fp8", "--dtype", "float32")[0] == 0
    _, said = _run("inspect", tmp_path / "fp8")
    assert "float8_e4m3fn" in said
    assert "weight_scale_inv" in said
    assert "float32" in said


def test_it_is_a_command_of_megarl(source: Path) -> None:
    for command in (["megarl.cli", "convert"], ["tools.convert_checkpoint"]):
        result = subprocess.run(
            [sys.executable, "-m", *command, "inspect", source],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 0, result.stderr
        assert "qwen2_moe" in result.stdout
