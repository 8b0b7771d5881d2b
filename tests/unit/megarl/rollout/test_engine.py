"""The values of the engine contract, and that nothing here imports vLLM."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megarl.errors import ConfigError
from megarl.rollout.engine import Sample, SampleRequest
from megarl.rollout.vllm_engine import EngineSettings


def _make_request(**changes: Any) -> SampleRequest:
    values: dict[str, Any] = {
        "request_id": 3,
        "prompt": (5, 6),
        "max_tokens": 4,
        "temperature": 1.0,
        "seed": 0,
        "eos_token_id": 1,
    }
    return SampleRequest(**values | changes)


def _make_settings(**changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model_path": "model",
        "dtype": "float32",
        "tp": 1,
        "max_model_len": 64,
        "max_running_sequences": 8,
        "kv_cache_bytes": 1 << 20,
        "seed": 0,
        "enforce_eager": True,
        "prefix_caching": True,
        "job": "replica-0",
    }
    return EngineSettings(**values | changes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", (), "prompt is empty"),
        ("max_tokens", 0, "max_tokens is 0"),
        ("temperature", -1.0, "temperature is -1.0"),
        ("temperature", 0.001, "temperature is 0.001"),
        ("temperature", float("nan"), "temperature is nan"),
    ],
)
def test_a_request_that_cannot_be_sampled_is_refused(
    field: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=f"request 3: .*{message}"):
        _make_request(**{field: value})


def test_temperature_zero_is_accepted_as_greedy() -> None:
    assert _make_request(temperature=0).temperature == 0


def test_a_request_may_bring_the_first_tokens_of_its_response() -> None:
    request = _make_request(generated=(7, 8, 9), logprobs=(-1.0,) * 3, versions=(2, 2, 3))
    assert request.generated == (7, 8, 9)


@pytest.mark.parametrize(
    ("generated", "logprobs", "versions", "message"),
    [
        ((7, 8), (-1.0,), (2, 2), "1 logprobs and 2 versions for 2 tokens"),
        ((7, 8), (-1.0, -1.0), (2,), "2 logprobs and 1 versions for 2 tokens"),
        ((7,) * 4, (-1.0,) * 4, (2,) * 4, "4 tokens are generated, .* max_tokens 4"),
        ((7, 1), (-1.0,) * 2, (2,) * 2, "2 tokens are generated, .* without EOS"),
    ],
)
def test_a_response_that_cannot_be_continued_is_refused(
    generated: tuple[int, ...],
    logprobs: tuple[float, ...],
    versions: tuple[int, ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=f"request 3: {message}"):
        _make_request(generated=generated, logprobs=logprobs, versions=versions)


@pytest.mark.parametrize(("logprobs", "versions"), [((-0.5,), (0, 0)), ((-0.5, -0.5), (0,))])
def test_a_sample_has_a_logprob_and_a_version_a_token(
    logprobs: tuple[float, ...], versions: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="for 2 tokens, expected one each"):
        Sample(request_id=0, tokens=(2, 1), logprobs=logprobs, versions=versions, finished=True)


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "float16"), ("tp", 0), ("kv_cache_bytes", 0)]
)
def test_settings_that_no_engine_honours_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"engine {field} is {value!r}"):
        _make_settings(**{field: value})


def test_importing_the_engine_module_does_not_import_vllm() -> None:
    code = "import sys, megarl.rollout.vllm_engine; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
