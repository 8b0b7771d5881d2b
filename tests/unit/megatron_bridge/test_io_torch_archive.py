"""Where tensors lie in files of torch.save, and blank ones to fill."""

import io
import os
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from megatron_bridge.errors import ConversionError
from megatron_bridge.io.torch_archive import Inert, Located, blank_archive, read_archive


def _value(path: Path, tensor: Located) -> torch.Tensor:
    content = path.read_bytes()
    dtype = getattr(torch, tensor.dtype)
    size = torch.Size(tensor.shape).numel() * dtype.itemsize
    piece = bytearray(content[tensor.offset : tensor.offset + size])
    return torch.frombuffer(piece, dtype=dtype).view(tensor.shape)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]
)
def test_tensors_are_found_where_torch_wrote_them(tmp_path: Path, dtype: torch.dtype) -> None:
    buffer = torch.arange(40).to(dtype)
    saved = OrderedDict(whole=buffer, view=buffer[7:19].view(3, 4), scalar=buffer[5])
    saved["parameter"] = torch.nn.Parameter(torch.arange(6).view(2, 3).to(dtype), False)
    path = tmp_path / "saved.pt"
    torch.save({"model": saved, "iteration": 3}, path)
    found = read_archive(path)
    assert found["iteration"] == 3
    for name, tensor in saved.items():
        at = found["model"][name]
        assert (at.dtype, at.shape) == (str(dtype)[6:], tuple(tensor.shape))
        assert at.contiguous
        assert torch.equal(_value(path, at).float(), tensor.float()), name


def test_a_transposed_tensor_is_no_region_of_its_file(tmp_path: Path) -> None:
    torch.save([torch.zeros(3, 4).t(), torch.zeros(1, 4).t()], tmp_path / "saved.pt")
    assert [t.contiguous for t in read_archive(tmp_path / "saved.pt")] == [False, True]


class _Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil",))


def test_code_in_a_pickle_is_not_run_and_other_objects_keep_their_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "saved.pt"
    torch.save({"args": Namespace(tp=2), "evil": _Evil(), "t": torch.ones(2)}, path)
    found = read_archive(path)
    assert isinstance(found["args"], Inert)
    assert found["args"].state == {"tp": 2}
    assert not Path("evil").exists()
    assert torch.equal(_value(path, found["t"]), torch.ones(2))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 5), "bfloat16"),
        ((7,), "float32"),
        ((1, 1, 64, 33), "float16"),
        ((2, 9), "float8_e4m3fn"),
    ],
)
def test_a_filled_blank_is_what_torch_loads(shape: tuple[int, ...], dtype: str) -> None:
    tensor = torch.randn(shape).to(getattr(torch, dtype))
    blank = blank_archive(shape, dtype)
    content = bytearray(blank.size)
    for offset, piece in (*blank.fixed, (blank.data, tensor.view(torch.uint8).numpy().tobytes())):
        content[offset : offset + len(piece)] = piece
    loaded = torch.load(io.BytesIO(bytes(content)), weights_only=True)
    assert loaded.dtype == tensor.dtype
    assert torch.equal(loaded.float(), tensor.float())
    assert blank.data % 64 == 0


def test_a_large_blank_takes_no_memory() -> None:
    blank = blank_archive((1 << 20, 1 << 12), "bfloat16")
    assert blank.size > 8 << 30
    assert sum(len(piece) for _, piece in blank.fixed) < 4096


def test_files_that_are_no_archives_are_named(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    with pytest.raises(ConversionError, match=r"saved\.pt is missing"):
        read_archive(path)
    torch.save(torch.zeros(1000), path)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(ConversionError, match=r"saved\.pt is not an archive"):
        read_archive(path)
    with pytest.raises(ConversionError, match="truncated: it has"):
        read_archive(path, 100, len(content))
    torch.save(torch.zeros(10), path, _use_new_zipfile_serialization=False)
    with pytest.raises(ConversionError, match=r"saved\.pt is not an archive"):
        read_archive(path)
