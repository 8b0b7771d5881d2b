"""Whether a parallel layout fits a model, before any engine starts; called by `megarl.train`.

Trainer rules are those of Megatron-Core 0.16.1 (`TransformerConfig.__post_init__`, `Attention`,
`VocabParallelEmbedding`), generator rules those of vLLM (`QKVParallelLinear`).
"""

from __future__ import annotations

import re

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
        spec.mla is not None or spec.num_kv_heads % tp == 0 or tp % spec.num_kv_heads == 0,
        f"{who} tp {tp} is neither a divisor nor a multiple of the model's "
        f"{spec.num_kv_heads} key/value heads",
    )


def _check_ffn(spec: ModelSpec, tp: int, who: str) -> None:
    """Check what the ranks of dense layers divide."""
    dense = not spec.num_experts or spec.first_dense_layers
    for what, size in (
        ("", spec.ffn_size if dense else 0),
        ("shared expert ", spec.shared_ffn_size),
    ):
        _require(size % tp == 0, f"{who} {tp} does not divide the model's {what}ffn size {size}")


def _check_expert_ffn(spec: ModelSpec, tp: int, who: str) -> None:
    size = spec.moe_ffn_size
    _require(size % tp == 0, f"{who} {tp} does not divide the model's expert ffn size {size}")


def _check_experts(spec: ModelSpec, layout: TrainerLayout) -> None:
    _check_expert_ffn(spec, layout.etp, "trainer etp")
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
        spec.mla is not None or rows % layout.tp == 0,
        f"trainer tp {layout.tp} does not divide the {rows} fused query/key/value rows",
    )
    _check_ffn(spec, layout.tp, "trainer tp")
    _require(
        not spec.num_mtp_layers or spec.hidden_size % layout.tp == 0,
        f"trainer tp {layout.tp} does not divide the hidden size {spec.hidden_size}, which the "
        "projection of layers that predict further tokens needs",
    )
    if spec.num_experts:
        _check_experts(spec, layout)
    else:
        _require(
            layout.ep == 1 and layout.etp == 1,
            f"trainer ep {layout.ep} / etp {layout.etp}: a {spec.family} model has no experts",
        )
    _require(
        spec.mla is None or layout.tp == 1 or layout.sequence_parallel,
        f"latent attention with trainer tp {layout.tp} needs sequence_parallel",
    )
    _require(
        layout.tp > 1 or not layout.sequence_parallel, "sequence parallelism needs trainer tp > 1"
    )
    chunk_sizes(spec, layout)


def check_generator_layout(spec: ModelSpec, layout: GeneratorLayout) -> None:
    """Refuse a generator layout that vLLM cannot run.

    Raises:
        PlanError: a sentence that names the size and what it must divide.
    """
    _check_heads(spec, layout.tp, "generator")
    if layout.ep:
        _require(
            spec.num_experts > 0 and spec.num_experts % layout.tp == 0,
            f"generator ep over tp {layout.tp} does not divide the model's {spec.num_experts} experts",
        )
    elif spec.num_experts:
        _check_expert_ffn(spec, layout.tp, "generator tp")
    _check_ffn(spec, layout.tp, "generator tp")
    _require(
        1 <= layout.pp <= spec.num_layers,
        f"generator pp {layout.pp} has more stages than the model's {spec.num_layers} layers",
    )
    rows = vllm_vocab_size(spec)
    _require(
        rows % layout.tp == 0,
        f"generator tp {layout.tp} does not divide vLLM's padded vocabulary of {rows} rows",
    )


def generator_layers_of_stage(spec: ModelSpec, layout: GeneratorLayout, pp: int) -> range:
    """Return the layers of a generator's pipeline stage (vLLM's `get_pp_indices`).

    What does not divide goes to the stages before the last, from the back.
    """
    sizes = [spec.num_layers // layout.pp] * layout.pp
    for index in range(2, spec.num_layers % layout.pp + 2):
        sizes[-index] += 1
    return range(sum(sizes[:pp]), sum(sizes[: pp + 1]))


def vllm_vocab_size(spec: ModelSpec) -> int:
    """Return the rows of the vocabulary as vLLM pads it (`DEFAULT_VOCAB_PADDING_SIZE`)."""
    return -(-spec.vocab_size // 64) * 64


def _stages_of_string(spec: ModelSpec, layout: TrainerLayout) -> list[list[int]]:
    """Return the layers of each chunk, [pp][vpp], that ``pipeline_layout`` says."""
    text = layout.pipeline_layout
    flat = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), text.replace(",", ""))
    flat = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), flat)
    rows = flat.split("|")
    _require(
        not set(flat) - set("EtmL|") and rows[0].startswith("E") and rows[-1].endswith("L"),
        f"pipeline_layout {text!r}: expected chunks of t, m between | with E first and L last",
    )
    _require(
        len(rows) == layout.pp * layout.vpp,
        f"pipeline_layout {text!r} has {len(rows)} chunks, expected pp {layout.pp} x vpp {layout.vpp}",
    )
    _require(
        flat.count("t") == spec.num_layers,
        f"pipeline_layout {text!r} has {flat.count('t')} layers, the model has {spec.num_layers}",
    )
    return [
        [rows[v * layout.pp + p].count("t") for v in range(layout.vpp)] for p in range(layout.pp)
    ]


def _even_size(spec: ModelSpec, layout: TrainerLayout) -> int:
    """Return the layers of a stage; the embedding or the head may count as one."""
    extra = layout.account_for_embedding + layout.account_for_loss
    counted = f" and {extra} of embedding and loss" if extra else ""
    _require(
        (spec.num_layers + extra) % layout.pp == 0,
        f"{spec.num_layers} layers{counted} do not divide over {layout.pp} stages (pp {layout.pp})",
    )
    return (spec.num_layers + extra) // layout.pp


def _uneven_sizes(spec: ModelSpec, layout: TrainerLayout) -> list[int]:
    """Return the layers of each stage where the first or the last has a number of its own."""
    first, last = layout.num_layers_in_first_stage, layout.num_layers_in_last_stage
    for name, value in (("first", first), ("last", last)):
        _require(
            value is None or (value >= 1 and layout.pp > 1),
            f"num_layers_in_{name}_stage {value} needs pp > 1 (got {layout.pp}) and a layer",
        )
    _require(
        not layout.account_for_embedding and not layout.account_for_loss,
        "num_layers_in_first/last_stage and account_for_embedding/loss exclude each other",
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
    sizes = [middle_layers // max(middle_stages, 1)] * layout.pp
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    return sizes


def chunk_sizes(spec: ModelSpec, layout: TrainerLayout) -> list[list[int]]:
    """Return the number of transformer layers of each model chunk, [pp][vpp].

    Raises:
        PlanError: the layers do not divide as Megatron requires.
    """
    _require(layout.vpp == 1 or layout.pp > 1, f"vpp {layout.vpp} needs pp > 1")
    uneven = (layout.num_layers_in_first_stage, layout.num_layers_in_last_stage) != (None, None)
    if layout.pipeline_layout:
        _require(
            not (uneven or layout.account_for_embedding or layout.account_for_loss),
            "pipeline_layout excludes num_layers_in_first/last_stage and account_for_...",
        )
        return _stages_of_string(spec, layout)
    sizes = _uneven_sizes(spec, layout) if uneven else [_even_size(spec, layout)] * layout.pp
    for stage, count in enumerate(sizes):
        _require(
            count % layout.vpp == 0,
            f"vpp {layout.vpp} does not divide the {count} layers of pipeline stage {stage}",
        )
    chunks = [[size // layout.vpp] * layout.vpp for size in sizes]
    chunks[0][0] -= layout.account_for_embedding
    chunks[-1][-1] -= layout.account_for_loss
    return chunks


def layers_of_stage(spec: ModelSpec, layout: TrainerLayout, pp: int) -> tuple[int, ...]:
    """Return the global indices of the layers on pipeline rank ``pp``, model chunk by chunk.

    With vpp > 1 chunk v of every stage comes before chunk v + 1 of any
    (`get_transformer_layer_offset`).
    """
    chunks = chunk_sizes(spec, layout)
    layers: list[int] = []
    for v in range(layout.vpp):
        start = sum(sum(row[:v]) for row in chunks) + sum(row[v] for row in chunks[:pp])
        layers += range(start, start + chunks[pp][v])
    return tuple(layers)
