"""What `initialize` and the model refuse before any group or parameter exists."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_bridge.errors import LayoutError, PlanError
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.runtime import setup
from megatron_bridge.runtime.architecture import inverse_frequencies, transformer_config
from tests.dist.dense import hf_model, make_spec
from tests.processes import run_ranks


def _refusals(rank: int, size: int) -> list[str]:
    found = []
    cut_experts = TrainerLayout(dp=2, ep=2, etp=2)
    for layout in (TrainerLayout(cp=2), TrainerLayout(tp=2, dp=2), cut_experts):
        with pytest.raises(LayoutError) as caught:
            setup.initialize(layout, seed=0)
        found.append(str(caught.value))
    setup.initialize(TrainerLayout(dp=2), seed=0)
    setup.destroy()
    return found


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA, context parallelism may run")
def test_layouts_that_cannot_run_here_are_refused_with_the_reason() -> None:
    context_parallel, wrong_size, cut_experts = run_ranks(_refusals, 2)[0]
    assert "needs CUDA and Transformer Engine" in context_parallel
    assert "needs 4 ranks, the executor world has 2" in wrong_size
    assert "gloo cannot gather unequal numbers of tokens" in cut_experts


LAYOUTS = (
    TrainerLayout(tp=2, pp=2, dp=2, ep=2),
    TrainerLayout(tp=2, dp=4, ep=2),
    TrainerLayout(tp=2, dp=4, ep=4, etp=2),
    TrainerLayout(tp=2, cp=2, dp=2, ep=4),
    TrainerLayout(tp=4, pp=2, dp=2, ep=2, etp=4),
    TrainerLayout(tp=2, cp=2, pp=2, dp=2),
)


def _places(rank: int, size: int) -> list[list[tuple[int, ...]]]:
    """Return where Megatron's own groups put each rank of each layout; nothing is sent."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    found = []
    for layout in LAYOUTS:
        found.append([])
        for member in range(layout.world_size):
            dist.init_process_group(
                "fake", store=FakeStore(), rank=member, world_size=layout.world_size
            )
            setup.make_groups(layout)
            found[-1].append(
                (
                    parallel_state.get_tensor_model_parallel_rank(),
                    parallel_state.get_context_parallel_rank(),
                    parallel_state.get_data_parallel_rank(),
                    parallel_state.get_pipeline_model_parallel_rank(),
                    parallel_state.get_expert_tensor_parallel_rank(),
                    parallel_state.get_expert_model_parallel_rank(),
                )
            )
            setup.destroy()
            dist.destroy_process_group()
    return found


@pytest.mark.dist
def test_coordinates_are_those_of_megatrons_groups() -> None:
    (found,) = run_ranks(_places, 1)
    for layout, places in zip(LAYOUTS, found, strict=True):
        for rank, place in enumerate(places):
            at, expert = layout.coordinate(rank), layout.expert_coordinate(rank)
            assert place == (at.tp, at.cp, at.dp, at.pp, expert.etp, expert.ep), (layout, rank)


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
        (TrainerLayout(pp=3), "4 layers do not divide over 3 stages"),
        (TrainerLayout(pp=2, vpp=4), "vpp 4 does not divide the 2 layers"),
        (TrainerLayout(pp=2, num_layers_in_first_stage=5), "leave -1 layers"),
        (TrainerLayout(tp=8), "tp 8 does not divide the model's 4 attention heads"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    layout: TrainerLayout, reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        transformer_config(make_spec("llama"), layout, "float32", recompute=False)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(LayoutError, match="'float16'"):
        transformer_config(make_spec("llama"), TrainerLayout(), "float16", recompute=False)


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # llama's is scaled
def test_rotary_frequencies_are_those_of_transformers(family: str) -> None:
    spec = make_spec(family)
    theirs = hf_model(spec).model.rotary_emb.inv_freq  # pyright: ignore
    torch.testing.assert_close(inverse_frequencies(spec), theirs, atol=1e-7, rtol=1e-6)
