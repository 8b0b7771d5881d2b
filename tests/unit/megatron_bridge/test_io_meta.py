"""Original Llama checkpoints: converted, transformers computes what the first code computes."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from megarl.convert import main
from megatron_bridge.convert import Conversion, Converter
from megatron_bridge.errors import ConversionError
from megatron_bridge.io.companions import meta_companions
from megatron_bridge.io.hf_store import hf_target
from megatron_bridge.io.meta import open_meta
from megatron_bridge.io.store import Form, Stored
from megatron_bridge.models.families import canonical_tensors
from tests.unit.megatron_bridge.original_llama import (
    PARAMS,
    VOCAB,
    Tensors,
    logits,
    make_tensors,
    write,
)


def _convert(stored: Stored, release: str, folder: Path) -> None:
    form = Form(dtypes={tensor.name: "float32" for tensor in canonical_tensors(stored.spec)})
    beside = meta_companions(stored.folder, stored.spec, release=release, dtype="float32")
    target = hf_target(stored.spec, form, beside)
    Converter(Conversion(source=stored, target=target, folder=folder)).run(lambda _: None)


def _check_logits(folder: Path, tensors: Tensors) -> None:
    tokens = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model(tokens[None]).logits[0]
    torch.testing.assert_close(found, logits(tensors, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("count", "axis", "release"), [(1, 1, "2"), (2, 1, "2"), (2, 0, "3"), (1, 0, "3")]
)
def test_a_converted_checkpoint_gives_the_logits_of_the_first_code(
    tmp_path: Path, count: int, axis: int, release: str
) -> None:
    tensors = make_tensors()
    write(tmp_path / "meta", tensors, count=count, embedding_axis=axis)
    stored = open_meta(tmp_path / "meta", release=release)
    _convert(stored, release, tmp_path / "hf")
    _check_logits(tmp_path / "hf", tensors)
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == b"tokens"
    norms = [name for name in stored.dropped if "norm" in name]
    assert len(norms) == (count - 1) * 5
    assert sum("rope.freqs" in name for name in stored.dropped) == count
    assert len(stored.dropped) == len(norms) + count


def test_a_tied_model_writes_one_tensor(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["output.weight"] = tensors["tok_embeddings.weight"]
    params = {**PARAMS, "use_scaled_rope": True}
    write(tmp_path / "meta", tensors, count=2, embedding_axis=0, params=params)
    stored = open_meta(tmp_path / "meta", release="3.2")
    assert stored.dropped["output.weight of consolidated.01.pth"].startswith("tied to")
    _convert(stored, "3.2", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert "lm_head.weight" not in found
    assert torch.equal(found["model.embed_tokens.weight"], tensors["tok_embeddings.weight"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(model.lm_head.weight, tensors["output.weight"])
    assert model.config.rope_parameters["factor"] == 32.0


def test_the_commands_convert_compare_and_show_an_original_llama(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "meta", make_tensors(), count=2)
    words = ("meta-to-hf", tmp_path / "meta", tmp_path / "hf", "--llama", "2")
    assert _command(*words)[0] == 0
    _check_logits(tmp_path / "hf", make_tensors())
    both = (tmp_path / "meta", tmp_path / "hf")
    assert _command("verify", *both)[0] == 2
    assert "--llama must say which" in capsys.readouterr().err
    code, said = _command("verify", *both, "--llama", "2")
    assert code == 0, said
    assert "21 of 21 tensors agree" in said
    code, said = _command("inspect", tmp_path / "meta", "--llama", "2")
    assert code == 0
    assert "layers.1.attention.wq.weight" in said


def _command(*words: object) -> tuple[int, str]:
    said = io.StringIO()
    code = main([str(word) for word in words], Console(file=said, width=200))
    return code, said.getvalue()


def test_sizes_that_the_first_releases_leave_out_are_those_of_the_tensors(tmp_path: Path) -> None:
    params = {key: value for key, value in PARAMS.items() if key != "n_kv_heads"}
    tensors = make_tensors()
    for name in [name for name in tensors if name.endswith(("wk.weight", "wv.weight"))]:
        tensors[name] = torch.randn(48, 48)
    write(tmp_path, tensors, count=2, params={**params, "vocab_size": -1})
    spec = open_meta(tmp_path, release="1").spec
    assert (spec.num_kv_heads, spec.vocab_size, spec.max_positions) == (6, VOCAB, 2048)


def test_an_instruct_models_turns_end_its_answers(tmp_path: Path) -> None:
    write(tmp_path, make_tensors(), params={**PARAMS, "use_scaled_rope": True})
    spec = open_meta(tmp_path, release="3.1").spec
    for instruct, expected in ((False, 128001), (True, [128001, 128008, 128009])):
        files = meta_companions(tmp_path, spec, release="3.1", dtype="bfloat16", instruct=instruct)
        folder = tmp_path / str(instruct)
        folder.mkdir()
        (folder / "generation_config.json").write_bytes(files["generation_config.json"])
        assert GenerationConfig.from_pretrained(folder).eos_token_id == expected


def _damage(folder: Path, tensors: Tensors, fault: str) -> None:
    """Write a checkpoint of two files with one fault."""
    params: dict[str, Any] = {
        "field": {**PARAMS, "vision_num_layers": 4},
        "sizes": {**PARAMS, "dim": None},
        "release": {**PARAMS, "use_scaled_rope": True},
        "rows": {**PARAMS, "vocab_size": 97},
        "ffn": {**PARAMS, "ffn_dim_multiplier": 1.5},
    }
    if fault == "absent":
        del tensors["layers.1.attention.wo.weight"]
    if fault == "unknown":
        tensors["layers.0.attention.inner.weight"] = torch.ones(4)
    write(folder, tensors, count=2, params=params.get(fault))
    last = folder / "consolidated.01.pth"
    if fault == "file":
        last.rename(folder / "consolidated.02.pth")
    if fault == "truncated":
        last.write_bytes(last.read_bytes()[:5000])
    if fault == "code":
        torch.save({"a": _Code()}, last)
    if fault in ("norm", "strided"):
        content = torch.load(last)
        if fault == "norm":
            content["norm.weight"] += 1
        else:
            content["layers.0.attention.wq.weight"] = torch.randn(48, 24).T
        torch.save(content, last)


class _Code:
    """Pickles as a call that must never be made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('a pickle ran code')",))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("file", "lacks consolidated.01.pth"),
        ("truncated", r"consolidated\.01\.pth is not an archive"),
        ("code", r"consolidated\.01\.pth lacks tok_embeddings"),
        ("absent", r"lacks layers\.1\.attention\.wo\.weight"),
        ("unknown", r"holds layers\.0\.attention\.inner\.weight, which params\.json"),
        ("field", r"vision_num_layers = 4 is not supported"),
        ("sizes", "dim is None"),
        ("release", "use_scaled_rope = True, expected False"),
        ("rows", "vocab_size = 97, but 96 are stored"),
        ("ffn", r"layers\.0\.feed_forward\.w1\.weight .*\(64, 48\), expected .*\(96, 48\)"),
        ("norm", "norm.weight differs in"),
        ("strided", "is not contiguous"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, fault: str, words: str) -> None:
    _damage(tmp_path, make_tensors(), fault)
    with pytest.raises(ConversionError, match=words):
        open_meta(tmp_path, release="2")


def test_a_head_that_is_not_the_embedding_is_refused_where_the_release_ties_them(
    tmp_path: Path,
) -> None:
    write(tmp_path, make_tensors(), params={**PARAMS, "use_scaled_rope": True})
    with pytest.raises(ConversionError, match="the release ties them"):
        open_meta(tmp_path, release="3.2")


def test_other_releases_and_folders_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", make_tensors())
    with pytest.raises(ConversionError, match=r"Llama '4' is unknown, expected one of 1, 2"):
        open_meta(tmp_path / "a", release="4")
    with pytest.raises(ConversionError, match="does not exist"):
        open_meta(tmp_path / "b", release="2")
    (tmp_path / "b").mkdir()
    with pytest.raises(ConversionError, match=r"has no consolidated\.00\.pth"):
        open_meta(tmp_path / "b", release="2")
