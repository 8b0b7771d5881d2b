"""Conversions that are killed and started again, and what stands under which name meanwhile."""

import fcntl
import json
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_bridge.conversions import Options, hf_to_hf, hf_to_megatron
from megatron_bridge.convert import Conversion, Converter
from megatron_bridge.errors import ConversionError
from tests.unit.megatron_bridge.checkpoints import make_mixture
from tests.unit.megatron_bridge.folders import content, random_tensors, start_conversion, write_hf

KILLS = 20
SPEC = make_mixture(hidden_size=64, vocab_size=1000, moe_ffn_size=96, num_heads=16)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("model") / "in", SPEC, random_tensors(SPEC))


@pytest.fixture
def conversion(source: Path, tmp_path: Path) -> Conversion:
    """Many files of small windows: it takes long enough to be killed in the middle."""
    options = Options(dtype="float32", max_file_bytes=100_000)
    made = hf_to_megatron(source, tmp_path / "out", options)
    assert len(made.target.files) > 20
    return replace(made, window_bytes=1000)


def _unbroken(conversion: Conversion) -> dict[str, bytes]:
    folder = conversion.folder.with_name("unbroken")
    Converter(replace(conversion, folder=folder)).run(lambda _: None)
    return content(folder)


def _finished(folder: Path) -> dict[str, bytes]:
    """What stands under its final name in the folder of an unfinished conversion."""
    found = content(folder.with_name("out.partial") / "files")
    return {name: file for name, file in found.items() if not name.endswith(".unfinished")}


def test_killed_at_any_moment_it_ends_with_the_same_bytes(conversion: Conversion) -> None:
    wanted = _unbroken(conversion)
    for name in ("first", "timed"):  # the first one also starts what starts the others
        start = time.monotonic()
        start_conversion(replace(conversion, folder=conversion.folder.with_name(name))).join(60)
        seconds = time.monotonic() - start
    draw = random.Random(0)
    in_the_middle = 0
    for _ in range(KILLS):
        process = start_conversion(conversion)
        process.join(draw.uniform(0.05, 1) * seconds)
        process.kill()
        process.join()
        if not conversion.folder.exists():
            finished = _finished(conversion.folder)
            assert all(wanted[name] == file for name, file in finished.items())
            in_the_middle += 0 < len(finished) < len(wanted)
            Converter(conversion).run(lambda _: None)
        assert content(conversion.folder) == wanted
        assert not conversion.folder.with_name("out.partial").exists()
        shutil.rmtree(conversion.folder)
    assert in_the_middle >= KILLS // 4


class _Stops:
    """Fails as a full disk would, after so many windows."""

    def __init__(self, after: int):
        self.left = after

    def __call__(self, _: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(28, "No space left on device")


def _break_off(conversion: Conversion) -> dict[str, bytes]:
    with pytest.raises(OSError, match="No space left"):
        Converter(replace(conversion, workers=1)).run(_Stops(after=1500))
    assert not conversion.folder.exists()
    finished = _finished(conversion.folder)
    assert 1 < len(finished) < len(conversion.target.files)
    return finished


def _identities(folder: Path, names: dict[str, bytes]) -> dict[str, int]:
    return {name: (folder / name).stat().st_ino for name in names}


def test_files_that_are_done_are_not_written_again(conversion: Conversion) -> None:
    finished = _break_off(conversion)
    before = _identities(conversion.folder.with_name("out.partial") / "files", finished)
    said: list[int] = []
    Converter(conversion).run(said.append)
    assert _identities(conversion.folder, finished) == before
    sizes = {file.name: file.size for file in conversion.target.files}
    assert sum(said) >= sum(sizes[name] for name in finished)
    assert content(conversion.folder) == _unbroken(conversion)


def test_a_file_that_was_damaged_meanwhile_is_written_again(conversion: Conversion) -> None:
    first, second, *_ = _break_off(conversion)
    folder = conversion.folder.with_name("out.partial") / "files"
    for name, place in ((first, -1), (second, 0)):  # in a tensor, in the bytes around
        damaged = bytearray((folder / name).read_bytes())
        damaged[place] ^= 1
        (folder / name).write_bytes(damaged)
    Converter(conversion).run(lambda _: None)
    assert content(conversion.folder) == _unbroken(conversion)


def test_a_torn_journal_is_read_up_to_its_last_whole_line(conversion: Conversion) -> None:
    _break_off(conversion)
    journal = conversion.folder.with_name("out.partial") / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    Converter(conversion).run(lambda _: None)
    assert content(conversion.folder) == _unbroken(conversion)


def test_another_conversion_does_not_go_on_with_these_files(
    conversion: Conversion, source: Path
) -> None:
    finished = _break_off(conversion)
    other = hf_to_megatron(source, conversion.folder, Options(max_file_bytes=100_000))
    with pytest.raises(ConversionError, match=r"out\.partial belongs to another conversion"):
        Converter(other).run(lambda _: None)
    status = (source / "model-00001-of-00002.safetensors").stat()
    os.utime(source / "model-00001-of-00002.safetensors", ns=(status.st_atime_ns, 1))
    with pytest.raises(ConversionError, match="its source has changed"):
        Converter(conversion).run(lambda _: None)
    assert _finished(conversion.folder) == finished  # a mistake costs nothing
    os.utime(
        source / "model-00001-of-00002.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns)
    )
    Converter(conversion).run(lambda _: None)


def test_two_processes_do_not_write_one_checkpoint(conversion: Conversion) -> None:
    finished = _break_off(conversion)
    journal = conversion.folder.with_name("out.partial") / "journal.jsonl"
    with journal.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConversionError, match="another process is writing"):
            Converter(conversion).run(lambda _: None)
    assert _finished(conversion.folder) == finished


def test_a_name_taken_meanwhile_is_left_alone(conversion: Conversion) -> None:
    def take(_: int) -> None:
        conversion.folder.mkdir(exist_ok=True)

    with pytest.raises(ConversionError, match="exists already"):
        Converter(conversion).run(take)
    assert content(conversion.folder) == {}
    conversion.folder.rmdir()
    said: list[int] = []
    Converter(conversion).run(said.append)
    assert len(said) == len(conversion.target.files)  # all were done, and found in their place


def test_a_value_found_late_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    tensors["model.norm.weight"][0] = torch.finfo(torch.bfloat16).max
    damaged = write_hf(tmp_path / "in", SPEC, tensors)
    options = Options(dtype="float16", max_file_bytes=100_000)
    with pytest.raises(ConversionError, match="float16 cannot hold"):
        Converter(hf_to_hf(damaged, tmp_path / "out", options)).run(lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_journal_names_files_in_the_order_of_their_ends(conversion: Conversion) -> None:
    finished = _break_off(conversion)
    journal = conversion.folder.with_name("out.partial") / "journal.jsonl"
    first, *lines = map(json.loads, journal.read_text().splitlines())
    assert first.keys() == {"fingerprint"}
    assert {line["file"] for line in lines} == finished.keys()
