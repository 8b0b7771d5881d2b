"""Two checkpoints of any formats, compared tensor by tensor."""

from pathlib import Path

import pytest
import torch

from megatron_bridge.conversions import Options, hf_to_hf, hf_to_megatron, open_any
from megatron_bridge.convert import Converter
from megatron_bridge.errors import ConversionError
from megatron_bridge.verify import Comparison, verify
from tests.unit.megatron_bridge.checkpoints import Tensors, make_mixture, make_spec
from tests.unit.megatron_bridge.folders import random_tensors, write_hf

SPEC = make_mixture()
NAME = "model.layers.2.mlp.experts.1.up_proj.weight"


@pytest.fixture
def tensors() -> Tensors:
    return random_tensors(SPEC)


@pytest.fixture
def first(tensors: Tensors, tmp_path: Path) -> Path:
    return write_hf(tmp_path / "first", SPEC, tensors)


def _verify(first: Path, second: Path) -> Comparison:
    return verify(open_any(first, None), open_any(second, None), lambda _: None)


def test_a_checkpoint_equals_its_conversion(first: Path, tensors: Tensors, tmp_path: Path) -> None:
    Converter(hf_to_megatron(first, tmp_path / "megatron", Options())).run(lambda _: None)
    counted: list[int] = []
    one, other = open_any(first, None), open_any(tmp_path / "megatron", None)
    found = verify(one, other, counted.append)
    assert found.is_equal
    assert found.dtypes == ()
    assert found.num_tensors == len(tensors)
    numel = sum(tensor.numel() for tensor in tensors.values())
    assert found.num_elements == sum(counted) == numel


def test_the_first_difference_is_named_with_its_place_and_values(
    first: Path, tensors: Tensors, tmp_path: Path
) -> None:
    Converter(hf_to_megatron(first, tmp_path / "megatron", Options())).run(lambda _: None)
    tensors[NAME][5, 7] = 2.5
    tensors[NAME][6, 0] = tensors[NAME][6, 0] + 64
    tensors["lm_head.weight"][99, 15] = -1000
    second = write_hf(tmp_path / "second", SPEC, tensors)
    found = _verify(tmp_path / "megatron", second)
    assert [difference.name for difference in found.differences] == [NAME, "lm_head.weight"]
    what = found.differences[0].what
    assert "2 of 192 elements" in what
    assert "by up to 64" in what
    assert what.endswith(" and 2.5 at [5, 7]")
    assert found.differences[1].what.endswith("and -1000 at [99, 15]")


def test_values_are_compared_in_the_narrower_dtype(
    first: Path, tensors: Tensors, tmp_path: Path
) -> None:
    Converter(hf_to_hf(first, tmp_path / "wide", Options(dtype="float32"))).run(lambda _: None)
    found = _verify(first, tmp_path / "wide")
    assert found.differences == ()
    assert len(found.dtypes) == len(tensors)
    assert found.dtypes[0].what == "is bfloat16 and float32"
    wide = {name: tensor.float() * 1.003 for name, tensor in tensors.items()}
    write_hf(tmp_path / "near", SPEC, wide)
    same = [n for n, t in wide.items() if torch.equal(t.bfloat16(), tensors[n])]
    differing = {difference.name for difference in _verify(first, tmp_path / "near").differences}
    assert differing == tensors.keys() - set(same)
    assert differing


def test_values_that_only_one_of_two_half_precisions_has_differ(tmp_path: Path) -> None:
    spec = make_spec(num_layers=1)
    tensors = random_tensors(spec, torch.float16)
    one = write_hf(tmp_path / "one", spec, tensors)
    other = write_hf(tmp_path / "other", spec, {n: t.bfloat16() for n, t in tensors.items()})
    found = _verify(one, other)
    unequal = {n for n, t in tensors.items() if not torch.equal(t.float(), t.bfloat16().float())}
    assert {difference.name for difference in found.differences} == unequal


def test_a_nan_equals_itself(first: Path, tensors: Tensors, tmp_path: Path) -> None:
    tensors[NAME][0, 0] = float("nan")
    one = write_hf(tmp_path / "one", SPEC, tensors)
    other = write_hf(tmp_path / "other", SPEC, tensors, files=3)
    assert _verify(one, other).differences == ()
    assert [d.name for d in _verify(first, one).differences] == [NAME]


def test_models_that_differ_are_compared_as_far_as_they_agree(tmp_path: Path) -> None:
    specs = make_spec(num_layers=2), make_spec(num_layers=1, vocab_size=90, rope_theta=5e5)
    folders = [
        write_hf(tmp_path / str(index), spec, random_tensors(spec))
        for index, spec in enumerate(specs)
    ]
    comparison = _verify(*folders)
    sizes = {difference.name: difference.what for difference in comparison.sizes}
    assert sizes["rope_theta"] == "is 10000.0 and 500000.0"
    assert sizes.keys() == {"num_layers", "vocab_size", "rope_theta"}
    found = {difference.name: difference.what for difference in comparison.differences}
    assert found["model.embed_tokens.weight"] == "is [100, 16] and [90, 16]"
    assert found["model.layers.1.mlp.up_proj.weight"] == "is [24, 16] and absent"


def test_a_damaged_checkpoint_is_refused(first: Path, tmp_path: Path) -> None:
    Converter(hf_to_megatron(first, tmp_path / "megatron", Options())).run(lambda _: None)
    stored = open_any(tmp_path / "megatron", None)
    path = next((tmp_path / "megatron").glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConversionError, match="truncated"):
        verify(open_any(first, None), stored, lambda _: None)
