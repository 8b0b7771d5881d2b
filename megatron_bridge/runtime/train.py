"""Training steps of a `MegatronModel`: schedule, optimizer, learning rate, reduced results.

Called by the trainer executor, which brings micro-batches and a loss function. Losses are summed
per token and divided by the number of loss tokens of the whole batch, so neither loss nor gradient
depends on the layout or on how a batch is cut into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_bridge.errors import LayoutError, TrainingError
from megatron_bridge.runtime.batch import MicroBatch, TokenOutputs
from megatron_bridge.runtime.model import MegatronModel, Pass
from megatron_bridge.runtime.setup import device


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """A loss function's result for one micro-batch; all but ``loss_sum`` are detached scalars."""

    loss_sum: Tensor  # sum over the loss tokens of this micro-batch
    num_tokens: Tensor  # number of them
    sums: dict[str, Tensor] = field(default_factory=dict)  # metrics to add up
    maxima: dict[str, Tensor] = field(default_factory=dict)  # metrics to take the largest of


LossFunction = Callable[[TokenOutputs, MicroBatch], LossOutputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning rate.

    Step k (from 1) of a warm-up of n steps trains with k/n of ``lr``; a linear or cosine decay
    ends with ``min_lr_ratio * lr`` at step ``lr_decay_steps``. "constant" stays at ``lr``.
    """

    lr: float
    min_lr_ratio: float = 1.0
    lr_decay_style: str = "constant"  # constant, linear or cosine
    lr_warmup_steps: int = 0
    lr_decay_steps: int = 1  # last step of the decay; unused by "constant"
    weight_decay: float = 0.0  # of matrices only, as is usual
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0  # largest gradient norm; 0: no limit
    distributed_optimizer: bool = False  # as the model's settings say

    def __post_init__(self) -> None:
        if self.lr_decay_style not in ("constant", "linear", "cosine"):
            raise ValueError(f"lr_decay_style {self.lr_decay_style!r}: constant, linear or cosine")
        if self.lr_decay_style != "constant" and self.lr_decay_steps <= self.lr_warmup_steps:
            raise ValueError(
                f"lr_decay_steps {self.lr_decay_steps} must be above lr_warmup_steps "
                f"{self.lr_warmup_steps} for lr_decay_style {self.lr_decay_style}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step, reduced over micro-batches and data-parallel ranks; equal on all ranks."""

    loss: float  # sum of losses / num_tokens
    grad_norm: float  # before clipping
    lr: float
    num_tokens: int  # loss tokens of the whole batch
    sums: dict[str, float]
    maxima: dict[str, float]


class NonFiniteGradients(TrainingError):
    """Gradients held inf or nan; the weights were not touched. ``result`` shows the step."""

    def __init__(self, result: StepResult) -> None:
        super().__init__(
            f"gradient norm is {result.grad_norm}, loss {result.loss} over {result.num_tokens} "
            "tokens: the optimizer step was not taken; look at the losses and inputs of this batch"
        )
        self.result = result


class MegatronTrainer:
    """Owns optimizer and learning-rate schedule of a trainable `MegatronModel`.

    All ranks of the executor world call each method together. After weights have been written into
    ``model.parameters()`` from outside, call `reload_master_weights` before the next step.

    Raises:
        LayoutError: model and optimizer disagree about the distributed optimizer.
    """

    def __init__(self, model: MegatronModel, optimizer: OptimizerSettings) -> None:
        if model.settings.distributed_optimizer != optimizer.distributed_optimizer:
            raise LayoutError(
                "distributed_optimizer is "
                f"{model.settings.distributed_optimizer} in the model's settings and "
                f"{optimizer.distributed_optimizer} in the optimizer's"
            )
        self.model, self.settings = model, optimizer
        model.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = _make_optimizer(model, optimizer)
        self.scheduler = _make_scheduler(self.optimizer, optimizer)

    def reload_master_weights(self) -> None:
        """Take the optimizer's float32 copies anew from the model's weights."""
        self.optimizer.reload_model_params()

    def apply_schedule(self, num_steps: int | None = None) -> None:
        """Set the learning rate by the present settings; after a checkpoint brought its own.

        Args:
            num_steps: of the schedule that are over; None: those taken so far.
        """
        if num_steps is not None:
            self.scheduler.num_steps = num_steps
        for group in self.optimizer.param_groups:
            group["max_lr"] = self.settings.lr
            group["min_lr"] = self.settings.lr * self.settings.min_lr_ratio
        self.scheduler.step(0)

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossFunction,
        *,
        temperature: float,
        entropy: bool,
        before_update: Callable[[], None] | None = None,
    ) -> StepResult:
        """Take one optimizer step on this data-parallel rank's micro-batches.

        Args:
            micro_batches: equally many on each rank; those of one data-parallel index are equal.
            loss: is called on the last pipeline stage only, with equal metric names each time.
            temperature: logits are divided by it.
            entropy: whether the loss function wants `TokenOutputs.entropy`.
            before_update: is called when the gradients are there and the weights still as they were.

        Raises:
            NonFiniteGradients: on all ranks; weights and optimizer state are as before.
        """
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()  # pyright: ignore
        self.optimizer.zero_grad()

        def consume(outputs: TokenOutputs, batch: MicroBatch) -> tuple[Tensor, Tensor, LossOutputs]:
            found = loss(outputs, batch)
            # Megatron adds token counts over context-parallel ranks too, which all see all tokens
            counts = self.model.groups.cp.rank() == 0
            return found.loss_sum, (found.num_tokens * counts).to(torch.int), found

        plan = Pass(temperature=temperature, entropy=entropy)
        found: list[LossOutputs] = self.model.run(micro_batches, consume, plan)
        totals = _reduce(found, self.model.groups)

        self.optimizer.prepare_grads()
        grad_norm = self.optimizer.get_grad_norm()
        finite = math.isfinite(grad_norm)
        if before_update is not None:
            before_update()
        if finite:
            self.scheduler.step(1)
            self._clip(grad_norm)
            self.optimizer.step_with_ready_grads()
            self.model.finish_param_sync()
        result = StepResult(
            loss=totals.loss_sum / max(totals.num_tokens, 1),
            grad_norm=grad_norm,
            lr=self._lr(),
            num_tokens=totals.num_tokens,
            sums=totals.sums,
            maxima=totals.maxima,
        )
        if not finite:
            raise NonFiniteGradients(result)
        return result

    def _clip(self, grad_norm: float) -> None:
        if not self.settings.clip_grad:
            return
        for optimizer in self.optimizer.chained_optimizers:
            megatron_optimizer.clip_grad_by_total_norm_fp32(  # as substituted on CPUs
                list(optimizer.get_parameters()), self.settings.clip_grad, grad_norm
            )

    def _lr(self) -> float:
        return self.scheduler.get_lr({})


def _make_optimizer(model: MegatronModel, settings: OptimizerSettings) -> ChainedOptimizer:
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=model.settings.dtype == "bfloat16",
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=settings.distributed_optimizer,
    )
    chunks: Any = model.chunks
    made = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    assert isinstance(made, ChainedOptimizer), type(made)
    for chained in made.chained_optimizers:
        if isinstance(chained.optimizer, torch.optim.AdamW):
            _ready_torch_adam(chained.optimizer)
    return made


def _ready_torch_adam(adam: torch.optim.AdamW) -> None:
    """Make Megatron's fallback (no Transformer Engine, no Apex) use torch's fused kernel.

    Its state is allocated here because checkpoints of the distributed optimizer read and write it
    also before the first step.
    """
    for group in adam.param_groups:
        group["fused"] = True
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _make_scheduler(
    optimizer: ChainedOptimizer, settings: OptimizerSettings
) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        lr_warmup_steps=settings.lr_warmup_steps,
        # "constant" looks at no decay step, but the scheduler wants one past the warm-up
        lr_decay_steps=max(settings.lr_decay_steps, settings.lr_warmup_steps + 1),
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # of a checkpoint only the number of steps counts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    loss_sum: float
    num_tokens: int
    sums: dict[str, float]
    maxima: dict[str, float]


def _reduce(found: list[LossOutputs], groups: ProcessGroupCollection) -> _Totals:
    """Reduce over micro-batches and data-parallel ranks, then tell the other pipeline stages."""
    totals = _reduce_on_last_stage(found, groups.dp) if found else None
    if groups.pp.size() > 1:
        box = [totals]
        last = dist.get_global_rank(groups.pp, groups.pp.size() - 1)
        dist.broadcast_object_list(box, src=last, group=groups.pp, device=device())
        totals = box[0]
    assert totals is not None, "the last pipeline stage consumed every micro-batch"
    return totals


def _reduce_on_last_stage(found: list[LossOutputs], group: dist.ProcessGroup) -> _Totals:
    sum_names, max_names = sorted(found[0].sums), sorted(found[0].maxima)
    for outputs in found:
        if sorted(outputs.sums) != sum_names or sorted(outputs.maxima) != max_names:
            raise ValueError(
                f"a loss function returned metrics {sorted(outputs.sums)}, "
                f"{sorted(outputs.maxima)} after {sum_names}, {max_names}: expected the same names"
            )
    rows = [
        [outputs.loss_sum.detach(), outputs.num_tokens, *(outputs.sums[n] for n in sum_names)]
        for outputs in found
    ]
    sums = torch.stack([torch.stack([v.double() for v in row]) for row in rows]).sum(0)
    alone = group.size() == 1  # gloo takes a thread switch even then
    if not alone:
        dist.all_reduce(sums, group=group)
    loss_sum, num_tokens, *metrics = sums.tolist()
    maxima: list[float] = []
    if max_names:
        rows = [[outputs.maxima[n].double() for n in max_names] for outputs in found]
        largest = torch.stack([torch.stack(row) for row in rows]).amax(0)
        if not alone:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        maxima = largest.tolist()
    return _Totals(
        loss_sum=loss_sum,
        num_tokens=round(num_tokens),
        sums=dict(zip(sum_names, metrics, strict=True)),
        maxima=dict(zip(max_names, maxima, strict=True)),
    )
