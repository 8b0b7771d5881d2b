"""The benchmark of conversion, on a model of no size."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_bridge.models.released import parameter_count
from tools.bench_convert import main, spec_of_bytes, write_checkpoint


def test_its_figures_are_those_of_a_conversion_and_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--json", "--gigabytes", "0.06", "--repeats", "1", "--folder", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == pytest.approx(0.06e9, rel=0.1)
    assert found["largest_tensor_bytes"] == 2 * 16032 * 512
    assert found["ratio_to_copy"] == pytest.approx(found["copy_seconds"] / found["convert_seconds"])
    assert 0 < found["convert_seconds"] < found["command_seconds"]
    assert 100e6 < found["peak_rss_bytes"] < found["peak_rss_bound_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_its_checkpoint_has_the_size_that_was_asked_for_and_no_holes(tmp_path: Path) -> None:
    eight = spec_of_bytes(8e9)
    assert 2 * parameter_count(eight) == pytest.approx(8e9, rel=0.03)
    spec = spec_of_bytes(0.05e9)
    assert write_checkpoint(spec, tmp_path / "source") == pytest.approx(0.05e9, rel=0.1)
    (file,) = (tmp_path / "source").glob("*.safetensors")
    status = file.stat()
    assert status.st_blocks * 512 >= status.st_size
    tensors = load_file(file)
    assert sum(tensor.numel() for tensor in tensors.values()) == parameter_count(spec)
    assert all(bool(tensor.isfinite().all()) and bool(tensor.any()) for tensor in tensors.values())
