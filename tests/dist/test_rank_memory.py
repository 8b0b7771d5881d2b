"""The memory table's bytes beside those of the tensors that Megatron-Core and vLLM's layout hold."""

import pytest
import torch

from launch.memory import memory_table
from launch.site import Device
from megarl.config import (
    DataConfig,
    GeneratorConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from megarl.weights import run_sides
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from tests.dist.dense import make_case, micro_batch
from tests.processes import run_ranks

pytestmark = pytest.mark.dist

LAYOUTS = {
    "llama": TrainerLayout(tp=2, vocab_divisor=8, sequence_parallel=True),
    "qwen2": TrainerLayout(dp=2, vocab_divisor=8),
    "mixtral": TrainerLayout(dp=2, ep=2, vocab_divisor=8),
}


def _held(rank: int, size: int, family: str, dtype: str, sharded: bool) -> dict[str, int]:
    """Take a step, then count the bytes of all that a rank's model and optimizer keep."""
    from megatron_bridge.runtime import setup
    from megatron_bridge.runtime.model import MegatronModel, ModelSettings
    from megatron_bridge.runtime.train import LossOutputs, MegatronTrainer, OptimizerSettings

    case, layout = make_case(family, num_layers=2), LAYOUTS[family]
    setup.initialize(layout, seed=1)
    model = MegatronModel(
        case.spec, layout, ModelSettings(dtype=dtype, distributed_optimizer=sharded)
    )
    trainer = MegatronTrainer(model, OptimizerSettings(lr=1e-3, distributed_optimizer=sharded))
    for parameter in model.parameters().values():
        torch.nn.init.normal_(parameter.data, std=0.02)
    trainer.reload_master_weights()

    def loss(outputs, batch):
        mask = batch.columns["loss_mask"]
        return LossOutputs(
            loss_sum=-(outputs.logprobs * mask).sum(), num_tokens=mask.sum(), sums={}, maxima={}
        )

    members = list(range(layout.coordinate(rank).dp, 8, layout.dp))
    trainer.train_step([micro_batch(case, members)], loss, temperature=1.0, entropy=False)
    gradients = [
        buffer.grad_data
        for chunk in model.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    weights = list(model.parameters().values())
    storages = {tensor.untyped_storage().data_ptr() for tensor in weights}
    states = [
        tensor
        for each in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
        for group in each.optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter, *each.optimizer.state[parameter].values())
        if isinstance(tensor, torch.Tensor)
        and tensor.numel() > 1  # a step's number is no state of a parameter
        and tensor.untyped_storage().data_ptr() not in storages
    ]
    return {
        "weights": sum(tensor.nbytes for tensor in weights),
        "gradients": sum(tensor.nbytes for tensor in gradients),
        "optimizer": sum(tensor.nbytes for tensor in states),
    }


@pytest.mark.parametrize(
    ("family", "dtype", "sharded"),
    [
        ("llama", "bfloat16", False),
        ("qwen2", "bfloat16", True),
        ("qwen2", "float32", True),
        ("mixtral", "bfloat16", True),
    ],
)
def test_the_table_says_what_megatron_holds(family: str, dtype: str, sharded: bool) -> None:
    spec = make_case(family, num_layers=2).spec
    config = RunConfig(
        model=ModelConfig(dtype=dtype),
        trainer=TrainerConfig(layout=LAYOUTS[family], distributed_optimizer=sharded),
        generator=GeneratorConfig(layout=GeneratorLayout()),
        rollout=RolloutConfig(max_response_length=16),
        data=DataConfig(max_prompt_length=16),
    )
    table = memory_table(config, spec, run_sides(config, spec, te=False), Device())
    for rank, held in enumerate(run_ranks(_held, 2, family, dtype, sharded)):
        said = dict(table[rank].amounts())
        assert held["weights"] == said["weights"]
        # Megatron pads its buffers, and each parameter in them, to whole blocks.
        assert said["gradients"] <= held["gradients"] <= 1.05 * said["gradients"]
        assert held["optimizer"] == pytest.approx(said["optimizer"], rel=0.05)
