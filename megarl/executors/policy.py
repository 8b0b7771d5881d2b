"""The model that learns: Megatron, its optimizer, and its way from and to disk.

Held by the two executors that train (`trainer`, `sft`); every rank of their world has one and
enters all methods together.
"""

from __future__ import annotations

import logging
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl import checkpoint
from megarl.checkpoint import RunState, StartPoint
from megarl.config import RunConfig
from megarl.ddma.export import HfExport, export_hf
from megarl.weights import run_spec
from megarl.world import Group, Wait
from megatron_bridge.io.hf import load_hf
from megatron_bridge.layouts.megatron import megatron_manifest, megatron_side
from megatron_bridge.runtime import checkpoint as runtime_checkpoint
from megatron_bridge.runtime import setup
from megatron_bridge.runtime.model import MegatronModel, ModelSettings
from megatron_bridge.runtime.train import MegatronTrainer, OptimizerSettings

logger = logging.getLogger(__name__)

HF_FOLDER = "hf"  # of the run folder: the exported model


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    """Return the bridge's view of the trainer's configuration."""
    trainer = config.trainer
    return OptimizerSettings(
        lr=trainer.lr,
        min_lr_ratio=trainer.min_lr_ratio,
        lr_decay_style=trainer.lr_decay_style,
        lr_warmup_steps=trainer.lr_warmup_steps,
        lr_decay_steps=config.max_steps * trainer.updates_per_batch,
        weight_decay=trainer.weight_decay,
        adam_beta1=trainer.adam_beta1,
        adam_beta2=trainer.adam_beta2,
        adam_eps=trainer.adam_eps,
        clip_grad=trainer.clip_grad,
        distributed_optimizer=trainer.distributed_optimizer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLink:
    """Over what the trainer's ranks send their shards to the one that writes."""

    group: Group | None  # of the trainer's ranks; None: there is one
    wait: Wait


class Policy:
    """One rank's part of the policy, from the HF folder or from a checkpoint."""

    def __init__(self, config: RunConfig, start: StartPoint, rank: int):
        """Build on executor-world rank ``rank``; the executor world exists."""
        layout = config.trainer.layout
        setup.initialize(layout, config.seed, config.fault.timeout_seconds)
        self._config, self._rank = config, rank
        self._source = Path(config.model.path)
        self.spec = run_spec(config)
        self._settings = ModelSettings(
            dtype=config.model.dtype,
            recompute=config.trainer.recompute,
            distributed_optimizer=config.trainer.distributed_optimizer,
        )
        self.model = self._load(trainable=True)
        self.trainer = MegatronTrainer(self.model, optimizer_settings(config))
        if start.trainer_folder is not None:
            runtime_checkpoint.load(start.trainer_folder, self.trainer)
            # Where updates_per_batch was another, the same share of the schedule is over.
            self.trainer.apply_schedule(start.step * config.trainer.updates_per_batch)
        self.version = self._last_saved = start.step

    def _load(self, *, trainable: bool) -> MegatronModel:
        layout = self._config.trainer.layout
        model = MegatronModel(self.spec, layout, self._settings, trainable=trainable)
        manifest = megatron_manifest(self.spec, layout, self._rank, te=model.fused_norms)
        load_hf(self._source, manifest, model.parameters())
        return model

    def reference(self) -> MegatronModel:
        """Return a frozen copy of the starting model."""
        return self._load(trainable=False)

    def save_due(self, *, stopping: bool) -> bool:
        """Whether this version must be saved: each save_freq-th, the last, and before a stop."""
        return checkpoint.save_due(self._config, self.version, self._last_saved, stopping=stopping)

    def save(self, *, commit: bool) -> None:
        """Write this version's part of a checkpoint; ``commit``: there is no other part."""
        config = self._config
        if self._rank == 0:
            checkpoint.begin(config.folder, self.version)
        setup.barrier()
        folder = checkpoint.begun_folder(config.folder, self.version)
        runtime_checkpoint.save(folder / "trainer", self.trainer)
        setup.barrier()
        if commit and self._rank == 0:
            consumed = self.version * config.data.train_batch_size
            state = RunState(step=self.version, consumed_prompts=consumed, seed=config.seed)
            logger.info("saved %s", checkpoint.commit(config.folder, state))
        self._last_saved = self.version

    def export(self, link: ExportLink) -> None:
        """Write the model as a Hugging Face folder into the run folder."""
        layout = self._config.trainer.layout
        export = HfExport(
            spec=self.spec,
            side=megatron_side(self.spec, layout, te=self.model.fused_norms),
            dtype=getattr(torch, self._config.model.dtype),
            source_folder=self._source,
            target_folder=self._config.folder / HF_FOLDER,
        )
        if self._rank == 0:
            # Of an earlier end of this run, which now went further; its checkpoint is still there.
            shutil.rmtree(export.target_folder, ignore_errors=True)
        export_hf(export, self.model.parameters(), link.group, link.wait)


def peak_memory_gib() -> float:
    """Return this rank's peak memory: of the device, or of the process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
