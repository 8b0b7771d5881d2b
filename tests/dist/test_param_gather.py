"""Weights are whole after a step, also where Megatron would gather them in the next forward pass."""

import functools

import pytest

from megatron_bridge.parallel import TrainerLayout
from tests.dist.dense import make_case, train_dense
from tests.dist.test_runtime import SMALL_VOCAB, Trial, _Session
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

TRIAL = Trial(TrainerLayout(dp=2, **SMALL_VOCAB), distributed_optimizer=True)


def _step_with_late_gathering(rank: int, size: int) -> list[bool]:
    """Return whether the weights were right after each of two steps, and without our part in it."""
    from megatron_bridge.runtime import model

    late = functools.partial(model.DistributedDataParallelConfig, overlap_param_gather=True)
    model.DistributedDataParallelConfig = late  # type: ignore[misc]
    case = make_case("llama", num_layers=2)
    steps = train_dense(case, 2)
    found: list[bool] = []
    for is_finished in (True, False):
        session = _Session(TRIAL, case, rank)
        assert session.model.chunks[0].ddp_config.overlap_param_gather
        session.write_weights()
        if not is_finished:
            session.model.finish_param_sync = lambda: None
        for expected in steps[: 1 + is_finished]:
            session.check_step(expected)
            try:
                session.check_weights(expected.weights)
                found.append(True)
            except AssertionError:
                found.append(False)
        session.close()
    return found


def test_weights_are_whole_after_a_step_where_megatron_gathers_them_late() -> None:
    assert run_ranks(_step_with_late_gathering, 2) == [[True, True, False]] * 2
