"""A Megatron-Core GPT model built from a `ModelSpec`: its chunks, its weights, its passes.

The trainer executor builds one for training and, frozen, one as the reference of a KL term.
Weights are zero after building: another module writes them in place through `parameters`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.runtime.architecture import (
    build_chunk,
    inverse_frequencies,
    transformer_config,
    uses_te,
)
from megatron_bridge.runtime.attention import PackedSequences, pack
from megatron_bridge.runtime.batch import MicroBatch, TokenOutputs
from megatron_bridge.runtime.context import TokenLayout, lay_out, share
from megatron_bridge.runtime.logprobs import token_logprobs_and_entropy
from megatron_bridge.runtime.setup import device
from megatron_bridge.spec import ModelSpec

_SENT_BUFFERS = ("router.expert_bias",)  # no gradient, but part of the checkpoint
_LOCAL_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How a model computes; what it is says its `ModelSpec`."""

    dtype: str  # "float32" or "bfloat16"
    recompute: bool = False  # recompute each layer's activations in the backward pass
    distributed_optimizer: bool = False  # gradients are reduce-scattered, weights gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a pass over micro-batches computes of each token."""

    temperature: float
    entropy: bool = False
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """A micro-batch as the model takes it: shared, or padded and divided; on the device."""

    tokens: Tensor  # [1, P] int64
    layout: TokenLayout
    packed: PackedSequences
    micro_batch: MicroBatch | None  # None: fills an interleaved schedule, has no loss
    targets: Tensor  # [R] int64, a token to be judged by the logits of each row
    rows: Tensor | None  # [R] int64, place before each; None: all P in order, divided over ranks
    judged: Tensor | None  # [R] int64, where in the micro-batch each of them is


class MegatronModel:
    """This rank's part of a model; `setup.initialize` comes first.

    Every rank of the executor world builds it and enters each pass with as many micro-batches.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: TrainerLayout,
        settings: ModelSettings,
        *,
        trainable: bool = True,
    ) -> None:
        self.spec, self.layout, self.settings = spec, layout, settings
        self.fused_norms = uses_te()
        self.config = transformer_config(spec, layout, settings.dtype, settings.recompute)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self._inverse_frequencies = inverse_frequencies(spec).to(device())
        self.chunks: list[torch.nn.Module] = []
        self._rows: Tensor | None = None  # of the pass that runs
        for stage in range(layout.vpp):
            chunk = build_chunk(spec, layout, self.config, stage).to(device())
            if chunk.post_process:
                chunk.output_layer.register_forward_pre_hook(self._keep_rows)
            for name, parameter in chunk.named_parameters():
                parameter.data.zero_()
                parameter.requires_grad_(trainable)
                if ".experts." in name:
                    # At ep 1 Megatron takes experts for dense weights: it would not add up their
                    # gradients over tp, and its checkpoints would not load at another ep.
                    parameter.allreduce = False  # pyright: ignore
            self.chunks.append(self._with_reduction(chunk, stage) if trainable else chunk)

    def _with_reduction(self, chunk: torch.nn.Module, stage: int) -> DistributedDataParallel:
        reduction = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.settings.distributed_optimizer,
        )
        return DistributedDataParallel(self.config, reduction, chunk, disable_bucketing=stage > 0)

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's live parameters, their layers numbered over the whole model.

        The router's bias is among them: a buffer, without a gradient, always float32.
        Names are those of Megatron's layer spec: the local one, or with `fused_norms` Transformer
        Engine's. On a pipeline the last stage's copy of a tied embedding is "output_layer.weight".
        """
        found: dict[str, Tensor] = {}
        for chunk in self.chunks:
            module: Any = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
            buffers = (item for item in module.named_buffers() if item[0].endswith(_SENT_BUFFERS))
            for name, parameter in itertools.chain(module.named_parameters(), buffers):
                layer = _LOCAL_LAYER.match(name)
                if layer:
                    number = module.decoder.layers[int(layer[1])].layer_number - 1
                    name = f"decoder.layers.{number}.{layer[2]}"
                found[name] = parameter
        return found

    def finish_param_sync(self) -> None:
        """Make every weight whole; all ranks enter.

        With ``overlap_param_gather`` a distributed optimizer leaves each rank with its own part and
        the next forward pass gathers the rest, which is too late for whoever sends the weights.
        """
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @torch.no_grad()
    def logprobs(
        self, micro_batches: Sequence[MicroBatch], temperature: float
    ) -> list[Tensor] | None:
        """Return per micro-batch the log-probability [T] of each token given those before it.

        The first token of a sequence has 0. None on ranks outside the last pipeline stage.
        """
        plan = Pass(temperature=temperature, forward_only=True)
        found = self.run(micro_batches, lambda outputs, _: outputs.logprobs, plan)
        return found if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        consume: Callable[[TokenOutputs, MicroBatch], Any],
        plan: Pass,
    ) -> list[Any]:
        """Run Megatron's schedule; on the last stage return ``consume``'s results in order.

        When training, ``consume`` returns what Megatron wants of a loss function: the summed loss,
        the number of its tokens and a result.
        """
        inputs = [self._prepare(micro_batch, plan) for micro_batch in micro_batches]
        if self.layout.vpp > 1:  # the interleaved schedule works in groups of pp micro-batches
            inputs += [self._prepare(None, plan)] * (-len(inputs) % self.layout.pp)
        results = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, consume, plan),
            data_iterator=[iter(inputs) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(inputs),
            seq_length=max(item.tokens.shape[1] for item in inputs),
            micro_batch_size=1,
            forward_only=plan.forward_only,
            collect_non_loss_data=plan.forward_only,
        )
        return results[: len(micro_batches)]

    def _prepare(self, micro_batch: MicroBatch | None, plan: Pass) -> _Input:
        if micro_batch is None:
            lengths, tokens = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        else:
            lengths, tokens = micro_batch.lengths.cpu(), micro_batch.tokens.cpu()
        divided = self.layout.sequence_parallel or self.layout.cp > 1
        # Transformer Engine's attention and latent attention's rotary embedding go by bounds.
        if divided or uses_te() or self.spec.mla:
            token_layout, places = lay_out(lengths, self.layout, self.groups.cp.rank()), None
        else:
            token_layout = share(lengths, tokens)
            places = token_layout.places
        held, targets = token_layout.spread(tokens)
        rows = judged = None
        if not divided:  # else the head's own gathering needs all tokens
            judged = self._judged(micro_batch, token_layout, plan)
            rows = token_layout.places[(judged - 1).clamp(min=0)].to(device())
            targets, judged = tokens[judged], judged.to(device())
        frequencies, dtype = self._inverse_frequencies, self.config.params_dtype
        return _Input(
            tokens=held[None].to(device()),
            layout=token_layout,
            packed=pack(token_layout.lengths, frequencies, dtype, places),
            micro_batch=micro_batch,
            targets=targets.to(device()),
            rows=rows,
            judged=judged,
        )

    @staticmethod
    def _judged(micro_batch: MicroBatch | None, layout: TokenLayout, plan: Pass) -> Tensor:
        """Return which tokens [R] get a log-probability, one at least.

        In training a prompt's do not: the head and the softmax are much of a small model.
        """
        wanted = ~layout.first
        if micro_batch is not None and not plan.forward_only:
            mask = micro_batch.columns.get("loss_mask")
            wanted = wanted if mask is None else wanted & (mask.cpu() > 0)
        (judged,) = wanted.nonzero(as_tuple=True)
        return judged if len(judged) else judged.new_zeros(1)

    def _keep_rows(self, head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Hand the head [R, 1, H] of its [P, 1, H]."""
        hidden, *others = inputs
        return (hidden if self._rows is None else hidden.index_select(0, self._rows), *others)

    def _forward_step(
        self, consume: Callable[..., Any], plan: Pass, inputs: Any, chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        item: _Input = next(inputs)
        self._rows = item.rows
        output = chunk(
            input_ids=item.tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=item.packed,
        )
        return output, partial(self._consume, consume, plan, item)

    def _consume(
        self,
        consume: Callable[..., Any],
        plan: Pass,
        item: _Input,
        logits: Tensor,
        non_loss_data: bool = False,
    ) -> Any:
        outputs = self._token_outputs(logits[0], item, plan)
        if item.micro_batch is not None:
            return consume(outputs, item.micro_batch.to(device()))
        no_tokens = torch.zeros([], dtype=torch.int, device=logits.device)
        return None if non_loss_data else (outputs.logprobs.sum() * 0, no_tokens, None)

    def _token_outputs(self, logits: Tensor, item: _Input, plan: Pass) -> TokenOutputs:
        groups, judged = self.groups, item.judged
        logprobs, entropy = token_logprobs_and_entropy(
            logits, item.targets, plan.temperature, groups.tp, self.spec.vocab_size
        )

        def of_tokens(values: Tensor) -> Tensor:
            if judged is None:
                return item.layout.of_tokens(values, groups.cp)
            first = item.layout.first.to(values.device)
            return values.new_zeros(len(first)).index_copy(0, judged, values).masked_fill(first, 0)

        return TokenOutputs(
            logprobs=of_tokens(logprobs), entropy=of_tokens(entropy) if plan.entropy else None
        )
