"""Whether a parallel layout fits a model, before any engine starts; called by `megarl.train`.

Trainer rules are those of Megatron-Core 0.16.1 (`TransformerConfig.__post_init__`, `Attention`,
`VocabParallelEmbedding`), generator rules those of vLLM (`QKVParallelLinear`).
"""

from __future__ import annotations

from megatron_bridge.errors import PlanError
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.spec import ModelSpec


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise PlanError(sentence)


def _check_heads(spec: ModelSpec, tp: int, who: str) -> None:
    _require(
        spec.num_heads % tp == 0,
        f"{who} tp {tp} does not divide the model's {spec.num_heads} attention heads",
    )
    _require(
        spec.num_kv_heads % tp == 0 or tp % spec.num_kv_heads == 0,
        f"{who} tp {tp} is neither a divisor nor a multiple of the model's "
        f"{spec.num_kv_heads} key/value heads",
    )


def _check_ffn(spec: ModelSpec, tp: int, who: str) -> None:
    what, size = ("expert ", spec.moe_ffn_size) if spec.num_experts else ("", spec.ffn_size)
    _require(size % tp == 0, f"{who} {tp} does not divide the model's {what}ffn size {size}")


def _check_experts(spec: ModelSpec, layout: TrainerLayout) -> None:
    _check_ffn(spec, layout.etp, "trainer etp")
    _require(
        layout.etp in (1, layout.tp),
        f"trainer etp {layout.etp} is neither 1 nor trainer tp {layout.tp}",
    )
    ranks = layout.dp * layout.cp
    _require(
        spec.num_experts % layout.ep == 0 and ranks % layout.ep == 0,
        f"trainer ep {layout.ep} does not divide the model's {spec.num_experts} experts and "
        f"dp x cp = {ranks} ranks",
    )
    _require(
        layout.tp == 1 or layout.sequence_parallel,
        f"a mixture of experts with trainer tp {layout.tp} needs sequence_parallel",
    )


def check_layout(spec: ModelSpec, layout: TrainerLayout) -> None:
    """Refuse a trainer layout that Megatron cannot run or that would cut a layer unevenly.

    Raises:
        PlanError: a sentence that names the size and what it must divide.
    """
    _check_heads(spec, layout.tp, "trainer")
    # With fewer key/value groups than tp ranks Megatron splits the fused rows inside a group.
    rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    _require(
        rows % layout.tp == 0,
        f"trainer tp {layout.tp} does not divide the {rows} fused query/key/value rows",
    )
    if spec.num_experts:
        _check_experts(spec, layout)
    else:
        _check_ffn(spec, layout.tp, "trainer tp")
        _require(
            layout.ep == 1 and layout.etp == 1,
            f"trainer ep {layout.ep} / etp {layout.etp}: a {spec.family} model has no experts",
        )
    _require(
        layout.tp > 1 or not layout.sequence_parallel, "sequence parallelism needs trainer tp > 1"
    )
    stage_sizes(spec, layout)


def check_generator_layout(spec: ModelSpec, layout: GeneratorLayout) -> None:
    """Refuse a generator layout that vLLM cannot run.

    Raises:
        PlanError: a sentence that names the size and what it must divide.
    """
    _check_heads(spec, layout.tp, "generator")
    _check_ffn(spec, layout.tp, "generator tp")
    rows = vllm_vocab_size(spec)
    _require(
        rows % layout.tp == 0,
        f"generator tp {layout.tp} does not divide vLLM's padded vocabulary of {rows} rows",
    )


def vllm_vocab_size(spec: ModelSpec) -> int:
    """Return the rows of the vocabulary as vLLM pads it (`DEFAULT_VOCAB_PADDING_SIZE`)."""
    return -(-spec.vocab_size // 64) * 64


def stage_sizes(spec: ModelSpec, layout: TrainerLayout) -> tuple[int, ...]:
    """Return the number of transformer layers on each pipeline rank.

    Raises:
        PlanError: the layers do not divide as Megatron requires.
    """
    first, last = layout.num_layers_in_first_stage, layout.num_layers_in_last_stage
    for name, value in (("first", first), ("last", last)):
        _require(
            value is None or (value >= 1 and layout.pp > 1),
            f"num_layers_in_{name}_stage {value} needs pp > 1 (got {layout.pp}) and a layer",
        )
    middle_stages = layout.pp - (first is not None) - (last is not None)
    middle_layers = spec.num_layers - (first or 0) - (last or 0)
    fits = middle_layers == 0 if middle_stages == 0 else middle_layers >= middle_stages
    _require(
        fits and middle_layers % max(middle_stages, 1) == 0,
        f"{spec.num_layers} layers with {first} in the first and {last} in the last stage leave "
        f"{middle_layers} layers, which do not divide over {middle_stages} remaining stages "
        f"(pp {layout.pp})",
    )
    size = middle_layers // max(middle_stages, 1)
    sizes = [size] * layout.pp
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    _require(layout.vpp == 1 or layout.pp > 1, f"vpp {layout.vpp} needs pp > 1")
    for stage, count in enumerate(sizes):
        _require(
            count % layout.vpp == 0,
            f"vpp {layout.vpp} does not divide the {count} layers of pipeline stage {stage}",
        )
    return tuple(sizes)


def layers_of_stage(spec: ModelSpec, layout: TrainerLayout, pp: int) -> tuple[int, ...]:
    """Return the global indices of the layers on pipeline rank ``pp``, model chunk by chunk.

    With vpp > 1 chunk v of every stage comes before chunk v + 1 of any
    (`get_transformer_layer_offset`).
    """
    chunks = [size // layout.vpp for size in stage_sizes(spec, layout)]
    starts = [v * sum(chunks) + sum(chunks[:pp]) for v in range(layout.vpp)]
    return tuple(layer for start in starts for layer in range(start, start + chunks[pp]))
