"""Llama as its paper and its first code have it: made-up checkpoints, and their logits.

The rotary embedding turns neighbouring features of a head as complex numbers. Tests compare it with
what transformers computes from converted files.
"""

import json
import math
from pathlib import Path

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
SIZES = {"dim": 48, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "multiple_of": 16}
HEAD, FFN, VOCAB = 8, 128, 96  # 8 * 48 / 3 rounded up to a multiple of 16
EPS, THETA = 1e-5, 500000.0
PARAMS = {**SIZES, "norm_eps": EPS, "rope_theta": THETA, "vocab_size": VOCAB}
# The axis along which model-parallel files divide a tensor; others are whole in each.
AXES = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}


def make_tensors(seed: int = 0) -> Tensors:
    """Return the weights of a whole model."""
    generator = torch.Generator().manual_seed(seed)
    dim, kv = SIZES["dim"], SIZES["n_kv_heads"] * HEAD
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCAB, dim)}
    for layer in range(SIZES["n_layers"]):
        at = f"layers.{layer}."
        shapes |= {
            f"{at}attention.wq.weight": (dim, dim),
            f"{at}attention.wk.weight": (kv, dim),
            f"{at}attention.wv.weight": (kv, dim),
            f"{at}attention.wo.weight": (dim, dim),
            f"{at}feed_forward.w1.weight": (FFN, dim),
            f"{at}feed_forward.w2.weight": (dim, FFN),
            f"{at}feed_forward.w3.weight": (FFN, dim),
            f"{at}attention_norm.weight": (dim,),
            f"{at}ffn_norm.weight": (dim,),
        }
    shapes |= {"norm.weight": (dim,), "output.weight": (VOCAB, dim)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: 1 + tensor / 10 if tensor.dim() == 1 else tensor / math.sqrt(tensor.shape[1])
        for name, tensor in tensors.items()
    }


def write(
    folder: Path,
    tensors: Tensors,
    *,
    count: int = 1,
    embedding_axis: int = 1,
    params: dict[str, object] | None = None,
) -> None:
    """Write a checkpoint as ``count`` model-parallel ranks save it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params or PARAMS))
    (folder / "tokenizer.model").write_bytes(b"tokens")
    for rank in range(count):
        parts = {}
        for name, tensor in tensors.items():
            kind = name.split(".")[-2]
            axis = embedding_axis if kind == "tok_embeddings" else AXES.get(kind)
            part = tensor if axis is None else tensor.chunk(count, axis)[rank]
            parts[name] = part.clone(memory_format=torch.contiguous_format)
        parts["rope.freqs"] = _frequencies(THETA)
        torch.save(parts, folder / f"consolidated.{rank:02d}.pth")


def _frequencies(theta: float) -> Tensor:
    return theta ** (-torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _rotate(x: Tensor) -> Tensor:
    """Turn neighbouring features of x [T, heads, HEAD] by position."""
    angles = torch.outer(torch.arange(len(x), dtype=torch.float32), _frequencies(THETA))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2)


def logits(tensors: Tensors, tokens: Tensor) -> Tensor:
    """Return logits [T, V] of one sequence."""
    x = tensors["tok_embeddings.weight"][tokens]
    length, heads, groups = len(tokens), SIZES["n_heads"], SIZES["n_kv_heads"]
    mask = torch.full((length, length), -torch.inf).triu(1)
    for layer in range(SIZES["n_layers"]):
        weight = {
            name.split(".")[-2]: tensor
            for name, tensor in tensors.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed = _norm(x, weight["attention_norm"])
        query = _rotate((normed @ weight["wq"].T).view(length, heads, HEAD))
        key = _rotate((normed @ weight["wk"].T).view(length, groups, HEAD))
        value = (normed @ weight["wv"].T).view(length, groups, HEAD)
        key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(HEAD) + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        x = x + mixed.reshape(length, -1) @ weight["wo"].T
        normed = _norm(x, weight["ffn_norm"])
        gate = torch.nn.functional.silu(normed @ weight["w1"].T)
        x = x + (gate * (normed @ weight["w3"].T)) @ weight["w2"].T
    return _norm(x, tensors["norm.weight"]) @ tensors["output.weight"].T
