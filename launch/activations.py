"""Bytes of activations that a trainer's rank keeps for the backward pass; pure.

Called by `launch.memory`. Counted per packed token from what Transformer Engine's layers and flash
attention save (as in Korthikanti et al. 2022, section 4, for gated feed-forward layers without
dropout), times the micro-batches that Megatron's schedules have in flight. Tokens are taken to
spread evenly over experts.
"""

from __future__ import annotations

from megarl.config import RunConfig
from megatron_bridge.models.checks import layers_of_stage
from megatron_bridge.operations import ITEMSIZE
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.spec import ModelSpec

_FLOAT32_BYTES = 4
_LOGITS_COPIES = 3  # in float32, of the split softmax: scaled logits, probabilities, their gradient


def layer_bytes(spec: ModelSpec, layout: TrainerLayout, layer: int, itemsize: int) -> float:
    """Return the bytes that one layer saves of one token.

    Four times the residual's width (both norms' inputs and outputs), queries, keys and values,
    attention's output with a float32 number per head, and the feed-forward layer's.
    """
    tp, spread = layout.tp, _spread(layout)
    if spec.mla:
        values = spec.num_heads * spec.mla.v_head_dim
        latent = (spec.mla.q_lora_rank or 0) + spec.mla.kv_lora_rank + spec.mla.rope_head_dim
        attention = (2 * spec.num_heads * spec.head_dim + 2 * values) / tp + 2 * latent / spread
    else:
        attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim / tp
    saved = 4 * spec.hidden_size / spread + attention + _feed_forward(spec, layout, layer)
    return itemsize * saved + _FLOAT32_BYTES * spec.num_heads / tp


def _spread(layout: TrainerLayout) -> int:
    """Return over how many ranks norms and residuals are split."""
    return layout.tp if layout.sequence_parallel else 1


def _feed_forward(spec: ModelSpec, layout: TrainerLayout, layer: int) -> float:
    """Return elements: gate, up and their product; of experts also what goes in and comes out."""
    if not spec.has_experts(layer):
        return 3 * spec.ffn_size / layout.tp
    copies = spec.experts_per_token * layout.etp / _spread(layout)
    routed = copies * (2 * spec.hidden_size + 3 * spec.moe_ffn_size / layout.etp)
    return routed + 3 * spec.shared_ffn_size / layout.tp


def chunks_in_flight(layout: TrainerLayout, stage: int, num_micro_batches: int) -> int:
    """Return how many (micro-batch, model chunk) pairs a stage holds at most.

    Megatron's warm-up plus one: pp - stage - 1 forward passes before the first backward one, and
    with interleaving 2 (pp - stage - 1) + (vpp - 1) pp (``forward_backward_pipelining_...``).
    """
    if layout.pp == 1:
        return 1
    behind = layout.pp - stage - 1
    warm_up = behind if layout.vpp == 1 else 2 * behind + (layout.vpp - 1) * layout.pp
    return min(warm_up + 1, num_micro_batches * layout.vpp)


def num_micro_batches(config: RunConfig) -> int:
    """Return how many a data-parallel rank has in one update where all sequences are longest."""
    sequences = config.data.train_batch_size * config.rollout.n
    each = -(-sequences // (config.trainer.layout.dp * config.trainer.updates_per_batch))
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    together = max(config.trainer.max_tokens_per_micro_batch // longest, 1)
    return -(-each // together)


def stage_bytes(config: RunConfig, spec: ModelSpec, stage: int) -> int:
    """Return the bytes of activations of a rank of pipeline ``stage`` at their most.

    With recomputation a layer keeps its input alone, and one layer at a time has all of its own.
    """
    layout, itemsize = config.trainer.layout, ITEMSIZE[config.model.dtype]
    tokens = config.trainer.max_tokens_per_micro_batch / layout.cp
    layers = layers_of_stage(spec, layout, stage)
    whole = [layer_bytes(spec, layout, layer, itemsize) for layer in layers]
    held = chunks_in_flight(layout, stage, num_micro_batches(config)) / layout.vpp
    if config.trainer.recompute:
        inputs = len(layers) * itemsize * spec.hidden_size / _spread(layout)
        each_token = held * inputs + max(whole, default=0.0)
    else:
        each_token = held * sum(whole)
    if stage == layout.pp - 1:
        columns = spec.vocab_size / layout.tp
        each_token += columns * (itemsize + _LOGITS_COPIES * _FLOAT32_BYTES)
        each_token += 2 * itemsize * spec.hidden_size / _spread(layout)  # the last norm
    return round(tokens * each_token)
