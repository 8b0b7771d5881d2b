"""Where weights lie in Megatron-Core's distributed checkpoints, which know no parallel layout.

Each tensor is whole: fused rows as one tensor-parallel rank holds them, hence all gate rows above
all up rows, and the vocabulary with its padding. Layers are numbered in the names or, where all are
alike, may be stacked; the experts of a layer are. `ShardedTensor` keys of Megatron-Core 0.16.1.
Called by `megatron_bridge.io.torch_dist`, which addresses stacks as `io.store` says.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_bridge.errors import ConversionError
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.side import Block, Side, Variant
from megatron_bridge.spec import LocalParam, ModelSpec

_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.)weight(\d+)$")
_INDEX = re.compile(r"\[(\d+)\]")
_WITHOUT_STATE = ("embedding.", "output_layer.", "router.", "gate_weight", ".layer_norm_weight")

Stack = dict[tuple[int, ...], LocalParam]  # by index in the leading axes of one tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDistLayout:
    """What differs between such checkpoints of one model."""

    stacked_layers: bool  # the layers of the decoder are one tensor of each kind
    local_spec: bool = False  # named as Megatron's local layer spec does, not Transformer Engine's
    vocab_rows: int  # of the padded vocabulary


def default_layout(spec: ModelSpec, vocab_divisor: int = 128) -> TorchDistLayout:
    """Return how Megatron-Core saves a model by itself: it stacks the layers of dense models.

    Mixtures whose layers are listed one by one (``moe_layer_freq``) are not stacked.
    """
    rows = -(-spec.vocab_size // vocab_divisor) * vocab_divisor
    return TorchDistLayout(stacked_layers=spec.num_experts == 0, vocab_rows=rows)


def key_of(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the tensor that holds a parameter, and the parameter's index in its leading axes."""
    return _INDEX.sub("", name), tuple(map(int, _INDEX.findall(name)))


def stacks_of(side: Side) -> dict[str, Stack]:
    """Return the parameters of each tensor."""
    stacks: dict[str, Stack] = defaultdict(dict)
    for param in side.manifest(0).params:
        key, index = key_of(param.name)
        stacks[key][index] = param
    return stacks


def shape_of(stack: Stack) -> tuple[int, ...]:
    """Return the shape of the tensor that holds these parameters."""
    last = max(stack)
    return (*(place + 1 for place in last), *stack[last].shape)


def extra_states(stacks: Mapping[str, Stack]) -> Iterator[str]:
    """Yield the names of the objects that Megatron's modules save beside their weights, each once.

    Which modules do depends on the layer spec and on versions: all are named, and a loader ignores
    those that it has no use for.
    """
    found: dict[str, None] = {}
    for key, stack in stacks.items():
        if any(part in key for part in _WITHOUT_STATE):
            continue
        modules = [key.rpartition(".")[0]]
        if modules[0].endswith("self_attention.linear_proj"):
            modules.append(modules[0].replace("linear_proj", "core_attention"))
        sizes = ".".join(map(str, shape_of(stack)[: len(next(iter(stack)))])) or "1"
        for index in stack:
            place = ".".join(map(str, index)) or "0"
            found |= dict.fromkeys(f"{name}._extra_state/shard_{place}_{sizes}" for name in modules)
    yield from found


def local_names(spec: ModelSpec, keys: Iterable[str]) -> dict[str, str]:
    """Return what Megatron's local layer spec calls tensors that it names differently."""
    names = {key: _renamed_norm(key, _local_norms(spec)) for key in keys}
    return {key: name for key, name in names.items() if name != key}


def _local_norms(spec: ModelSpec) -> dict[str, str]:
    """Return what Megatron's local spec calls norms differently from Transformer Engine's."""
    if spec.mla is None:  # its keys map names every layer's norm as a dense layer's
        return {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
    return {
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    }


def _renamed_norm(name: str, norms: dict[str, str]) -> str:
    for old, new in norms.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _renamed(param: LocalParam, norms: dict[str, str]) -> LocalParam:
    name = _EXPERT.sub(r"mlp.experts.experts[\2].\1weight", param.name)
    name = _renamed_norm(name, norms)
    shards = tuple(replace(shard, param=name) for shard in param.shards)
    return replace(param, name=name, shards=shards)


def torch_dist_side(spec: ModelSpec, layout: TorchDistLayout) -> Side:
    """Return the side of a checkpoint, of one rank (0).

    Raises:
        ConversionError: layers of several kinds cannot be stacked, the vocabulary exceeds its rows.
    """
    if layout.vocab_rows < spec.vocab_size:
        raise ConversionError(
            f"a vocabulary of {layout.vocab_rows} rows cannot hold the model's {spec.vocab_size}"
        )
    if layout.stacked_layers and spec.num_experts and spec.first_dense_layers:
        raise ConversionError(
            f"layers cannot be stacked: the first {spec.first_dense_layers} have no experts"
        )
    whole = megatron_side(spec, TrainerLayout(vocab_divisor=layout.vocab_rows), te=True)
    norms = _local_norms(spec) if layout.local_spec else {}
    known: dict[int, tuple[Variant, ...]] = {}
    blocks: list[Block] = []
    for block in whole.blocks:
        if id(block.variants) not in known:
            known[id(block.variants)] = tuple(
                tuple(_renamed(param, norms) for param in variant) for variant in block.variants
            )
        local = block.local
        if layout.stacked_layers:
            local = re.sub(r"^decoder\.layers\.(\d+)\.", r"decoder.layers[\1].", local)
        blocks.append(replace(block, local=local, variants=known[id(block.variants)]))
    return Side(tuple(blocks))
