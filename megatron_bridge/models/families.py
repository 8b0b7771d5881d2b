"""A model's sizes from its Hugging Face ``config.json``, and its tensors from its sizes.

Layouts, the runtime and converters call this module; what families differ in is in `table`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from megatron_bridge.errors import ConversionError
from megatron_bridge.models.fields import (
    Config,
    count,
    latent_attention,
    mixture,
    number,
    refuse,
    rope,
)
from megatron_bridge.models.table import FAMILIES
from megatron_bridge.spec import CanonicalTensor, LatentAttention, ModelSpec, Part


def spec_from_hf(config: Config) -> ModelSpec:
    """Return the sizes of the model that a parsed ``config.json`` describes.

    Raises:
        ConversionError: an unknown architecture, or a field whose value cannot be honoured.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConversionError(
            f"config.json: model_type {model_type!r} is not supported, "
            f"expected one of {', '.join(FAMILIES)}"
        )
    refuse(config, family)
    theta, scaling = rope(config, family)
    hidden_size = number(config, "hidden_size", int)
    num_heads = number(config, "num_attention_heads", int)
    num_kv_heads = number(config, "num_key_value_heads", int, num_heads)
    if num_heads % num_kv_heads:
        raise ConversionError(
            f"config.json: num_key_value_heads {num_kv_heads} does not divide "
            f"num_attention_heads {num_heads}"
        )
    mla = latent_attention(config) if family.mla else None
    if mla:  # what such a configuration calls head_dim is that of the rotary part
        head_dim = mla.nope_head_dim + mla.rope_head_dim
    else:
        head_dim = number(config, "head_dim", int, family.head_dim or hidden_size // num_heads)
    spec = ModelSpec(
        family=family.name,
        vocab_size=number(config, "vocab_size", int),
        hidden_size=hidden_size,
        ffn_size=number(config, "intermediate_size", int),
        num_layers=number(config, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=number(config, "rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        max_positions=number(config, "max_position_embeddings", int),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_scaling=scaling,
        initializer_range=number(config, "initializer_range", float, 0.02),
        mla=mla,
        num_mtp_layers=count(config, "num_nextn_predict_layers"),
        **(mixture(config, family.experts) if family.experts else {}),
    )
    if spec.num_experts and spec.first_dense_layers >= spec.num_layers:
        raise ConversionError(
            f"config.json: first_k_dense_replace = {spec.first_dense_layers} leaves none of "
            f"{spec.num_layers} layers to experts"
        )
    return spec


def read_config(folder: Path) -> Config:
    """Return the parsed ``config.json`` of the Hugging Face model in ``folder``.

    Raises:
        ConversionError: the folder or the file is missing or malformed.
    """
    if not folder.is_dir():
        raise ConversionError(f"model folder {folder} does not exist")
    file = folder / "config.json"
    if not file.is_file():
        raise ConversionError(f"model folder {folder} has no config.json")
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ConversionError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConversionError(f"{file} holds a {type(config).__name__}, expected an object")
    return config


def load_spec(folder: Path) -> ModelSpec:
    """Return the spec of the Hugging Face model in ``folder``.

    Raises:
        ConversionError: the folder or its ``config.json`` is missing, malformed or unsupported.
    """
    config = read_config(folder)
    try:
        return spec_from_hf(config)
    except ConversionError as error:
        raise ConversionError(f"{folder}: {error}") from error


_Row = tuple[str, Part, tuple[int, ...]]  # suffix, part, shape


def _mlp_rows(
    at: str, names: tuple[str, str, str], parts: str, shape: tuple[int, int]
) -> list[_Row]:
    """Return gate, up and down of an MLP; ``shape`` is (its size, hidden size)."""
    return [
        (f"{at}{names[0]}.weight", Part(f"{parts}gate"), shape),
        (f"{at}{names[1]}.weight", Part(f"{parts}up"), shape),
        (f"{at}{names[2]}.weight", Part(f"{parts}down"), shape[::-1]),
    ]


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _dense_rows(spec: ModelSpec) -> list[_Row]:
    return _mlp_rows("mlp.", _PROJECTIONS, "", (spec.ffn_size, spec.hidden_size))


def _router_rows(spec: ModelSpec) -> list[_Row]:
    """Return the rows of a layer's router and shared expert."""
    hidden, experts = spec.hidden_size, FAMILIES[spec.family].experts
    assert experts is not None, "a spec with experts comes from a family with experts"
    block = experts.block
    rows: list[_Row] = [(f"{block}.gate.weight", Part.ROUTER, (spec.num_experts, hidden))]
    if spec.router_bias:
        bias = f"{block}.gate.e_score_correction_bias"
        rows.append((bias, Part.ROUTER_BIAS, (spec.num_experts,)))
    if experts.shared:
        shared, size = experts.shared, (spec.shared_ffn_size, hidden)
        rows += _mlp_rows(f"{block}.{shared.block}.", _PROJECTIONS, "shared_", size)
        if shared.switch:
            rows.append((f"{block}.{shared.switch}.weight", Part.SHARED_SWITCH, (1, hidden)))
    return rows


def _expert_rows(spec: ModelSpec, expert: int) -> list[_Row]:
    experts = FAMILIES[spec.family].experts
    assert experts is not None, "a spec with experts comes from a family with experts"
    names = (experts.gate, experts.up, experts.down)
    size = (spec.moe_ffn_size, spec.hidden_size)
    return _mlp_rows(f"{experts.block}.experts.{expert}.", names, "expert_", size)


def _attention_rows(spec: ModelSpec) -> list[_Row]:
    hidden, head = spec.hidden_size, spec.head_dim
    query, key = spec.num_heads * head, spec.num_kv_heads * head
    rows: list[_Row] = [
        ("self_attn.q_proj.weight", Part.Q, (query, hidden)),
        ("self_attn.k_proj.weight", Part.K, (key, hidden)),
        ("self_attn.v_proj.weight", Part.V, (key, hidden)),
    ]
    if spec.qkv_bias:
        rows += [
            ("self_attn.q_proj.bias", Part.Q_BIAS, (query,)),
            ("self_attn.k_proj.bias", Part.K_BIAS, (key,)),
            ("self_attn.v_proj.bias", Part.V_BIAS, (key,)),
        ]
    if spec.qk_norm:
        rows += [
            ("self_attn.q_norm.weight", Part.Q_NORM, (head,)),
            ("self_attn.k_norm.weight", Part.K_NORM, (head,)),
        ]
    return [*rows, ("self_attn.o_proj.weight", Part.O, (hidden, query))]


def _latent_rows(spec: ModelSpec, mla: LatentAttention) -> list[_Row]:
    hidden, heads, q_rank, kv_rank = (
        spec.hidden_size,
        spec.num_heads,
        mla.q_lora_rank,
        mla.kv_lora_rank,
    )
    query = heads * spec.head_dim
    rows: list[_Row] = [("self_attn.q_proj.weight", Part.MLA_Q, (query, hidden))]
    if q_rank is not None:
        rows = [
            ("self_attn.q_a_proj.weight", Part.MLA_Q_DOWN, (q_rank, hidden)),
            ("self_attn.q_a_layernorm.weight", Part.MLA_Q_NORM, (q_rank,)),
            ("self_attn.q_b_proj.weight", Part.MLA_Q_UP, (query, q_rank)),
        ]
    key_value = heads * (mla.nope_head_dim + mla.v_head_dim)
    return [
        *rows,
        (
            "self_attn.kv_a_proj_with_mqa.weight",
            Part.MLA_KV_DOWN,
            (kv_rank + mla.rope_head_dim, hidden),
        ),
        ("self_attn.kv_a_layernorm.weight", Part.MLA_KV_NORM, (kv_rank,)),
        ("self_attn.kv_b_proj.weight", Part.MLA_KV_UP, (key_value, kv_rank)),
        ("self_attn.o_proj.weight", Part.O, (hidden, heads * mla.v_head_dim)),
    ]


def _mtp_rows(spec: ModelSpec) -> list[_Row]:
    """Return what a multi-token-prediction layer has beside a transformer layer."""
    hidden = spec.hidden_size
    return [
        ("enorm.weight", Part.MTP_EMBEDDING_NORM, (hidden,)),
        ("hnorm.weight", Part.MTP_HIDDEN_NORM, (hidden,)),
        ("eh_proj.weight", Part.MTP_PROJECTION, (hidden, 2 * hidden)),
        ("shared_head.norm.weight", Part.MTP_FINAL_NORM, (hidden,)),
    ]


def _layer_rows(spec: ModelSpec, layer: int) -> Iterator[tuple[_Row, int | None]]:
    """Yield the rows of one layer's tensors, each with its expert."""
    norm = (spec.hidden_size,)
    rows: list[_Row] = _mtp_rows(spec) if layer >= spec.num_layers else []
    rows.append(("input_layernorm.weight", Part.INPUT_NORM, norm))
    rows += _latent_rows(spec, spec.mla) if spec.mla else _attention_rows(spec)
    rows.append(("post_attention_layernorm.weight", Part.POST_ATTENTION_NORM, norm))
    rows += _router_rows(spec) if spec.has_experts(layer) else _dense_rows(spec)
    yield from ((row, None) for row in rows)
    for expert in range(spec.num_experts) if spec.has_experts(layer) else ():
        yield from ((row, expert) for row in _expert_rows(spec, expert))


def layer_tensors(spec: ModelSpec, layer: int) -> list[CanonicalTensor]:
    """Return the tensors of one layer; those from ``num_layers`` on predict further tokens."""
    return [
        CanonicalTensor(
            name=f"model.layers.{layer}.{suffix}",
            part=part,
            shape=shape,
            layer=layer,
            expert=expert,
            dtype="float32" if part is Part.ROUTER_BIAS else "",
        )
        for (suffix, part, shape), expert in _layer_rows(spec, layer)
    ]


def outer_tensors(spec: ModelSpec) -> list[CanonicalTensor]:
    """Return the tensors outside the layers; a tied model has no head."""
    vocab, norm = (spec.vocab_size, spec.hidden_size), (spec.hidden_size,)
    tensors = [
        CanonicalTensor(name="model.embed_tokens.weight", part=Part.EMBEDDING, shape=vocab),
        CanonicalTensor(name="model.norm.weight", part=Part.FINAL_NORM, shape=norm),
    ]
    if not spec.tied_embeddings:
        tensors.append(CanonicalTensor(name="lm_head.weight", part=Part.HEAD, shape=vocab))
    return tensors


@lru_cache(maxsize=8)
def canonical_tensors(spec: ModelSpec) -> tuple[CanonicalTensor, ...]:
    """Return every tensor of the model's checkpoint, in a fixed order.

    What a checkpoint holds twice (`mtp_aliases`) is there once.
    """
    embedding, *rest = outer_tensors(spec)
    layers = range(spec.num_layers + spec.num_mtp_layers)
    return (embedding, *(t for layer in layers for t in layer_tensors(spec, layer)), *rest)


def mtp_aliases(spec: ModelSpec) -> dict[str, str]:
    """Return names under which multi-token-prediction layers repeat the embedding and the head."""
    head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
    aliases: dict[str, str] = {}
    for layer in range(spec.num_layers, spec.num_layers + spec.num_mtp_layers):
        aliases[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        aliases[f"model.layers.{layer}.shared_head.head.weight"] = head
    return aliases
