"""Trainer state on disk in Megatron's torch_dist format; called by the trainer executor.

Weights, optimizer and learning-rate schedule of all ranks go into one folder, which loads at any
other tensor, pipeline and data-parallel layout. The caller makes the folder visible by a rename.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from megatron_bridge.errors import ConversionError
from megatron_bridge.runtime.train import MegatronTrainer


class _InProcessSave(torch_strategies.TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by torch's own writer in this process.

    Megatron's writer starts a manager process and one more per file on every rank: seconds for
    even a tiny model, and a script that is imported anew by each of them.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        renamed, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_distributed(
            torch_strategies.mcore_to_pyt_state_dict(renamed, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=self.thread_count),
            planner=torch_strategies.MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def save(folder: Path, trainer: MegatronTrainer) -> None:
    """Write the trainer's state into ``folder`` (made if missing); all ranks enter."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    strategy = _InProcessSave("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(_sharded_state(trainer, loading=False), str(folder), strategy)


def load(folder: Path, trainer: MegatronTrainer) -> None:
    """Read what `save` wrote, at this or another layout, in place; all ranks enter.

    The number of steps taken goes on; learning rate and schedule are those of the trainer's own
    settings, so that a resumed run can change them.

    Raises:
        ConversionError: the folder holds no torch_dist checkpoint.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise ConversionError(f"{folder} holds no complete torch_dist checkpoint")
    state: Any = dist_checkpointing.load(_sharded_state(trainer, loading=True), str(folder))
    for key, module in _modules(trainer).items():
        module.load_state_dict(state[key])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.load_state_dict(state["scheduler"])
    trainer.apply_schedule()


def _modules(trainer: MegatronTrainer) -> dict[str, Any]:
    """Return the model chunks under the names that Megatron's optimizers expect."""
    modules = [chunk.module for chunk in trainer.model.chunks]
    if len(modules) == 1:
        return {"model": modules[0]}
    return {f"model{number}": module for number, module in enumerate(modules)}


def _sharded_state(trainer: MegatronTrainer, loading: bool) -> ShardedStateDict:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: ShardedStateDict = {
        key: module.sharded_state_dict(metadata=metadata)
        for key, module in _modules(trainer).items()
    }
    state["optimizer"] = trainer.optimizer.sharded_state_dict(
        dict(state), is_loading=loading, metadata=metadata
    )
    state["scheduler"] = trainer.scheduler.state_dict()
    return state
