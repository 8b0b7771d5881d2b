"""The table of model families, and reading one from a Hugging Face ``config.json``.

A family is a row of `FAMILIES`, not code: what it adds to the plain transformer and which values of
its configuration this project cannot honour. Layouts, the runtime and converters call this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from megatron_bridge.errors import ConversionError
from megatron_bridge.spec import CanonicalTensor, ModelSpec, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """How a family's checkpoint names a layer's experts, and its configuration their sizes."""

    block: str  # of the layer: holds "gate" and "experts"
    gate: str
    up: str
    down: str
    ffn_key: str
    norm_topk: bool | None = None  # None: as "norm_topk_prob" says


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row: ``required`` maps a configuration key to the values that we can honour.

    A key that the configuration lacks is honoured: Hugging Face's default is then meant.
    """

    name: str  # `ModelSpec.family`
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # default where the configuration has none
    rope_theta: float = 1e4  # likewise
    experts: ExpertNames | None = None  # None: a dense model
    required: tuple[tuple[str, tuple[object, ...]], ...] = ()


_NO_BIAS = (("attention_bias", (False, None)), ("mlp_bias", (False, None)))

FAMILIES: dict[str, Family] = {
    "llama": Family(name="llama", required=_NO_BIAS),
    "mistral": Family(name="llama", required=_NO_BIAS),
    "qwen2": Family(name="qwen2", qkv_bias=True),
    "qwen3": Family(name="qwen3", qk_norm=True, head_dim=128, required=_NO_BIAS),
    "qwen3_moe": Family(
        name="qwen3_moe",
        qk_norm=True,
        experts=ExpertNames(
            block="mlp",
            gate="gate_proj",
            up="up_proj",
            down="down_proj",
            ffn_key="moe_intermediate_size",
        ),
        required=(
            *_NO_BIAS,
            ("decoder_sparse_step", (1, None)),
            ("mlp_only_layers", ([], None)),
        ),
    ),
    "mixtral": Family(
        name="mixtral",
        rope_theta=1e6,
        experts=ExpertNames(
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            ffn_key="intermediate_size",
            norm_topk=True,
        ),
        required=(("router_jitter_noise", (0.0, None)),),
    ),
}
_REQUIRED = (
    ("hidden_act", ("silu", None)),
    ("quantization_config", (None,)),
    ("partial_rotary_factor", (1, 1.0, None)),
)
_LLAMA3_ROPE_KEYS = (
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
)

Number = TypeVar("Number", int, float)


def _number(
    config: Mapping[str, object], key: str, kind: type[Number], default: Number | None = None
) -> Number:
    value = config.get(key)
    if value is None:
        value = default
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
        raise ConversionError(f"config.json: {key} is {value!r}, expected a positive number")
    return kind(value)


def _refuse(config: Mapping[str, object], family: Family) -> None:
    for key, allowed in (*_REQUIRED, *family.required):
        if config.get(key) not in allowed:
            raise ConversionError(
                f"config.json: {key} = {config[key]!r} of {config['model_type']!r} is not "
                f"supported, expected {allowed[0]!r}"
            )
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", True) and isinstance(window, int)
    if (
        used
        and isinstance(window, int)
        and window < _number(config, "max_position_embeddings", int)
    ):
        raise ConversionError(
            f"config.json: sliding_window = {window} is not supported, expected null"
        )
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - {"full_attention"}:
        raise ConversionError(
            f"config.json: layer_types {sorted(set(kinds))} are not supported, "
            "expected 'full_attention' only"
        )


def _rope(
    config: Mapping[str, object], default: float
) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Return theta and the llama3 scaling; transformers 5 writes both into ``rope_parameters``."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ConversionError(
            f"config.json: rope parameters are {parameters!r}, expected a mapping"
        )
    theta = _number(
        {"rope_theta": config.get("rope_theta"), **parameters}, "rope_theta", float, default
    )
    partial = parameters.get("partial_rotary_factor", 1)
    if partial not in (1, None):
        raise ConversionError(
            f"config.json: partial_rotary_factor = {partial!r} is not supported, expected 1"
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, ()
    if kind != "llama3":
        raise ConversionError(
            f"config.json: rope_type {kind!r} is not supported, expected 'default' or 'llama3'"
        )
    return theta, tuple((key, _number(parameters, key, float)) for key in _LLAMA3_ROPE_KEYS)


def _experts(config: Mapping[str, object], names: ExpertNames | None) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that a dense model leaves alone."""
    if names is None:
        return {}
    key = "num_experts" if "num_experts" in config else "num_local_experts"  # transformers 5
    num_experts = _number(config, key, int)
    chosen = _number(config, "num_experts_per_tok", int)
    norm_topk = names.norm_topk
    if norm_topk is None:
        norm_topk = bool(config.get("norm_topk_prob", False))
    # A single expert of normalized weight has weight 1: its router could not learn.
    if chosen > num_experts or (chosen == 1 and norm_topk):
        raise ConversionError(
            f"config.json: num_experts_per_tok = {chosen} of {num_experts} experts is not "
            f"supported, expected {2 if norm_topk else 1}..{num_experts}"
        )
    return {
        "num_experts": num_experts,
        "experts_per_token": chosen,
        "moe_ffn_size": _number(config, names.ffn_key, int),
        "norm_topk": norm_topk,
    }


def spec_from_hf(config: Mapping[str, object]) -> ModelSpec:
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
    _refuse(config, family)
    theta, scaling = _rope(config, family.rope_theta)
    hidden_size = _number(config, "hidden_size", int)
    num_heads = _number(config, "num_attention_heads", int)
    num_kv_heads = _number(config, "num_key_value_heads", int, num_heads)
    if num_heads % num_kv_heads:
        raise ConversionError(
            f"config.json: num_key_value_heads {num_kv_heads} does not divide "
            f"num_attention_heads {num_heads}"
        )
    return ModelSpec(
        family=family.name,
        vocab_size=_number(config, "vocab_size", int),
        hidden_size=hidden_size,
        ffn_size=_number(config, "intermediate_size", int),
        num_layers=_number(config, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_number(config, "head_dim", int, family.head_dim or hidden_size // num_heads),
        norm_eps=_number(config, "rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        max_positions=_number(config, "max_position_embeddings", int),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_scaling=scaling,
        initializer_range=_number(config, "initializer_range", float, 0.02),
        **_experts(config, family.experts),
    )


def load_spec(folder: Path) -> ModelSpec:
    """Return the spec of the Hugging Face model in ``folder``.

    Raises:
        ConversionError: the folder or its ``config.json`` is missing, malformed or unsupported.
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
    try:
        return spec_from_hf(config)
    except ConversionError as error:
        raise ConversionError(f"{folder}: {error}") from error


_Row = tuple[str, Part, tuple[int, ...], int | None]  # suffix, part, shape, expert


def _mlp_rows(spec: ModelSpec) -> list[_Row]:
    """Return the rows of a dense layer's MLP, or of its router and experts."""
    hidden, names = spec.hidden_size, FAMILIES[spec.family].experts
    if names is None:
        up, down = (spec.ffn_size, hidden), (hidden, spec.ffn_size)
        return [
            ("mlp.gate_proj.weight", Part.GATE, up, None),
            ("mlp.up_proj.weight", Part.UP, up, None),
            ("mlp.down_proj.weight", Part.DOWN, down, None),
        ]
    up, down = (spec.moe_ffn_size, hidden), (hidden, spec.moe_ffn_size)
    rows: list[_Row] = [
        (f"{names.block}.gate.weight", Part.ROUTER, (spec.num_experts, hidden), None)
    ]
    for expert in range(spec.num_experts):
        prefix = f"{names.block}.experts.{expert}."
        rows += [
            (f"{prefix}{names.gate}.weight", Part.EXPERT_GATE, up, expert),
            (f"{prefix}{names.up}.weight", Part.EXPERT_UP, up, expert),
            (f"{prefix}{names.down}.weight", Part.EXPERT_DOWN, down, expert),
        ]
    return rows


def _layer_rows(spec: ModelSpec) -> list[_Row]:
    """Return the rows of one layer's tensors."""
    hidden, head = spec.hidden_size, spec.head_dim
    query, key = spec.num_heads * head, spec.num_kv_heads * head
    rows: list[tuple[str, Part, tuple[int, ...]]] = [
        ("input_layernorm.weight", Part.INPUT_NORM, (hidden,)),
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
    rows += [
        ("self_attn.o_proj.weight", Part.O, (hidden, query)),
        ("post_attention_layernorm.weight", Part.POST_ATTENTION_NORM, (hidden,)),
    ]
    return [*((*row, None) for row in rows), *_mlp_rows(spec)]


@lru_cache(maxsize=8)
def canonical_tensors(spec: ModelSpec) -> tuple[CanonicalTensor, ...]:
    """Return every tensor of the model's checkpoint, in a fixed order; a tied model has no head."""
    vocab = (spec.vocab_size, spec.hidden_size)
    tensors = [CanonicalTensor(name="model.embed_tokens.weight", part=Part.EMBEDDING, shape=vocab)]
    rows = _layer_rows(spec)
    for layer in range(spec.num_layers):
        tensors += [
            CanonicalTensor(
                name=f"model.layers.{layer}.{suffix}",
                part=part,
                shape=shape,
                layer=layer,
                expert=expert,
            )
            for suffix, part, shape, expert in rows
        ]
    norm = (spec.hidden_size,)
    tensors.append(CanonicalTensor(name="model.norm.weight", part=Part.FINAL_NORM, shape=norm))
    if not spec.tied_embeddings:
        tensors.append(CanonicalTensor(name="lm_head.weight", part=Part.HEAD, shape=vocab))
    return tuple(tensors)
