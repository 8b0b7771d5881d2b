"""What `initialize` and the model refuse before any group or parameter exists."""

from __future__ import annotations

import pytest
import torch

from megatron_bridge.errors import LayoutError
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.runtime import setup
from megatron_bridge.runtime.architecture import inverse_frequencies, transformer_config
from tests.dist.dense import hf_model, make_spec
from tests.processes import run_ranks


def _refusals(rank: int, size: int) -> list[str]:
    found = []
    for layout in (TrainerLayout(cp=2), TrainerLayout(tp=2, dp=2)):
        with pytest.raises(LayoutError) as caught:
            setup.initialize(layout, seed=0)
        found.append(str(caught.value))
    setup.initialize(TrainerLayout(dp=2), seed=0)
    setup.destroy()
    return found


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA, context parallelism may run")
def test_layouts_that_cannot_run_here_are_refused_with_the_reason() -> None:
    context_parallel, wrong_size = run_ranks(_refusals, 2)[0]
    assert "needs CUDA and Transformer Engine" in context_parallel
    assert "needs 4 ranks, the executor world has 2" in wrong_size


def test_without_a_process_group_there_is_nothing_to_divide() -> None:
    with pytest.raises(LayoutError, match="default process group must exist"):
        setup.initialize(TrainerLayout(), seed=0)


def test_acceleration_reports_all_four() -> None:
    found = setup.acceleration()
    assert set(found) == {"cuda", "transformer_engine", "apex", "flash_attn"}
    assert found["cuda"] == torch.cuda.is_available()
    assert found["cuda"] or not any(found.values())


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (TrainerLayout(pp=3), "4 of 4 layers do not divide among 3 pipeline stages"),
        (TrainerLayout(pp=2, vpp=4), "of 4 chunks"),
        (TrainerLayout(pp=2, num_layers_in_first_stage=5), "-1 of 4 layers"),
        (TrainerLayout(tp=8), "num_heads 4 of the model is not divisible by tp=8"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    layout: TrainerLayout, reason: str
) -> None:
    with pytest.raises(LayoutError, match=reason):
        transformer_config(make_spec("llama"), layout, "float32", recompute=False)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(LayoutError, match="'float16'"):
        transformer_config(make_spec("llama"), TrainerLayout(), "float16", recompute=False)


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # llama's is scaled
def test_rotary_frequencies_are_those_of_transformers(family: str) -> None:
    spec = make_spec(family)
    theirs = hf_model(spec).model.rotary_emb.inv_freq  # pyright: ignore
    torch.testing.assert_close(inverse_frequencies(spec), theirs, atol=1e-7, rtol=1e-6)
