"""The start-up contract: what must hold before the first sample and the first optimizer step.

* The engine's live parameters are those of the manifest, as they lie (`require_manifest`).
* Poisoned (`poison`) and filled by one transfer, they hold the checkpoint bit for bit, or what
  quantising it gives, padding zero (`first_difference`).
* Trainer and generators give the tokens of the first batch the same log-probabilities, within a
  bound (`token_errors` on each trainer rank, `merge_errors` and `require_agreement` on all).

Called by the executors at their start, in `megarl train` and `megarl doctor` alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.config import RunConfig
from megarl.errors import ContractError, WeightSyncError
from megarl.types import TrainBatch
from megatron_bridge.io.hf import stream_params
from megatron_bridge.parallel import Quantization
from megatron_bridge.quantize import quantize_blockwise, quantize_per_tensor
from megatron_bridge.spec import LocalParam, RankManifest

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Seen between equal engines of the built-in task's model: float32 9e-6 and 2e-7, bfloat16 .18 and
# 4e-3; in float32 a norm's epsilon ten times too large gives .014 and 2e-3. bfloat16 would hide it
# and large models have rarer tokens, so there only what is plainly wrong is refused.
# FP8 weights alone give .3 and .06 there before training: the policy gradient corrects for them.
_BOUNDS = {"float32": (1e-3, 1e-4), "bfloat16": (4.0, 0.05), "fp8": (4.0, 0.25)}  # largest, mean


def _dtype(param: LocalParam, side: torch.dtype) -> torch.dtype:
    return getattr(torch, param.dtype) if param.dtype else side


def compare_manifest(
    manifest: RankManifest,
    live: Mapping[str, Tensor],
    dtype: torch.dtype,
    transforms: Mapping[str, str],
) -> list[str]:
    """Return a line for each difference between live parameters and a manifest.

    Args:
        dtype: of the parameters for which the manifest names none.
        transforms: layer -> what the engine made of its weights after loading, where it does not
            compute with them as they lie.
    """
    expected = {param.name: param for param in manifest.params}
    lines = [
        f"missing: {name}, expected {param.shape} {_dtype(param, dtype)}"
        for name, param in expected.items()
        if name not in live
    ]
    for name, tensor in live.items():
        if name not in expected:
            lines.append(f"unexpected: {name}, {tuple(tensor.shape)} {tensor.dtype}")
            continue
        lines += _differences(expected[name], tensor, _dtype(expected[name], dtype))
    return lines + [
        f"transformed: {layer} by {what}, expected to compute with its weights as they lie"
        for layer, what in transforms.items()
    ]


def _differences(param: LocalParam, live: Tensor, dtype: torch.dtype) -> Iterator[str]:
    if tuple(live.shape) != param.shape:
        yield f"wrong shape: {param.name} is {tuple(live.shape)}, expected {param.shape}"
    elif not live.is_contiguous():
        strides = torch.empty(param.shape, device="meta").stride()
        yield f"transformed: {param.name} has strides {live.stride()}, expected {strides}"
    if live.dtype != dtype:
        yield f"wrong dtype: {param.name} is {live.dtype}, expected {dtype}"


def require_manifest(
    manifest: RankManifest,
    live: Mapping[str, Tensor],
    dtype: torch.dtype,
    transforms: Mapping[str, str],
) -> None:
    """Raise WeightSyncError with every difference between live parameters and the manifest."""
    lines = compare_manifest(manifest, live, dtype, transforms)
    if lines:
        listed = "".join(f"\n  {line}" for line in lines)
        raise WeightSyncError(
            f"the engine of rank {manifest.rank} does not hold the parameters of its manifest; "
            f"differences ({len(lines)}):{listed}"
        )


@torch.no_grad()
def poison(params: Mapping[str, Tensor]) -> None:
    """Fill every floating-point parameter with NaN: what a transfer passes over cannot hide."""
    for tensor in params.values():
        if tensor.is_floating_point():
            tensor.fill_(math.nan)


def first_difference(
    folder: Path, manifest: RankManifest, live: Mapping[str, Tensor], dtype: torch.dtype
) -> str | None:
    """Compare live parameters with a checkpoint bit for bit, one parameter in memory at a time.

    Those that the manifest has quantized are compared with what quantising the checkpoint's gives.

    Args:
        dtype: of the trainer, through which the checkpoint's values went.

    Returns:
        None where all are equal; else what differs first: canonical tensor, parameter, index and
        both values.
    """
    named = {param.name: param for param in manifest.params}
    plain = tuple(param for param in manifest.params if not param.derived)
    wanted = RankManifest(rank=manifest.rank, params=plain)
    for param, values in stream_params(
        folder, wanted, lambda param: dtype if param.quantization else _dtype(param, dtype)
    ):
        found = live[param.name]
        values = values.to(found.device)
        if param.quantization:
            elements, scales = _quantized(param, values, live[param.scales])
            line = _difference(param, found, elements, folder) or _difference(
                named[param.scales], live[param.scales], scales, folder
            )
        else:
            line = _difference(param, found, values.to(found.dtype), folder)
        if line:
            return line
    return None


def _quantized(param: LocalParam, values: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the FP8 elements and the scales of a whole parameter."""
    elements, scales = torch.empty_like(values, dtype=torch.float8_e4m3fn), torch.empty_like(like)
    quantize = quantize_blockwise if param.quantization == "block" else quantize_per_tensor
    quantize(values, elements, scales)
    return elements, scales


def _difference(param: LocalParam, found: Tensor, values: Tensor, folder: Path) -> str | None:
    bits = _BITS[found.dtype.itemsize]
    differs = found.contiguous().view(bits) != values.view(bits)
    count = int(differs.sum())
    if not count:
        return None
    first = differs.flatten().byte().argmax()
    index = tuple(int(place) for place in torch.unravel_index(first, differs.shape))
    return (
        f"{_place(param, index)} is {found[index].item()!r} in the engine and "
        f"{values[index].item()!r} in {folder} (as {found.dtype}); of the parameter's "
        f"{values.numel()} elements {count} differ"
    )


def _place(param: LocalParam, index: tuple[int, ...]) -> str:
    """Return the canonical name of an element, and its place in the parameter."""
    here = f"{param.name}[{', '.join(map(str, index))}]"
    for shard in param.shards:
        at = zip(index, shard.local.start, shard.local.stop, shard.box.start, strict=True)
        offsets = [place - low + origin for place, low, high, origin in at if low <= place < high]
        if len(offsets) == len(index):
            return f"{shard.tensor}[{', '.join(map(str, offsets))}] (in {here})"
    if param.derived:
        return f"the scale {here}"
    return f"padding (in {here})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far trainer and generators are apart on a batch; the same on all trainer ranks."""

    largest: float  # |log pi - log mu|
    mean: float
    num_tokens: int
    worst: str  # which token, and both values


def error_bounds(config: RunConfig) -> tuple[float, float]:
    """Return the largest and the mean |log pi - log mu| that a run may start with."""
    fault = config.fault
    kind = "bfloat16" if "bfloat16" in (config.model.dtype, config.generator_dtype) else "float32"
    if config.generator.layout.quantization is not Quantization.NONE:
        kind = "fp8"
    largest, mean = _BOUNDS[kind]
    return fault.max_logprob_error or largest, fault.mean_logprob_error or mean


def token_errors(batch: TrainBatch, logprobs: Sequence[Tensor] | None) -> Tensor:
    """Return this rank's row for `merge_errors` [8] float64.

    Args:
        logprobs: of each micro-batch [T]; None where this rank holds none (an earlier pipeline
            stage).
    """
    row = torch.zeros(8, dtype=torch.float64)
    row[0] = -1.0
    if logprobs is None:
        return row
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    for number, found in enumerate(logprobs):
        rows = torch.nonzero(batch.micro_batches == number).flatten().tolist()
        columns = found.double().cpu().split(batch.lengths[rows].tolist()) if rows else ()
        for sequence, log_pi in zip(rows, columns, strict=True):
            span = slice(starts[sequence], starts[sequence] + len(log_pi))
            log_mu = batch.logprobs[span].double()
            errors = torch.nan_to_num((log_pi - log_mu).abs(), nan=math.inf, posinf=math.inf)
            errors = torch.where(batch.loss_mask[span] > 0, errors, 0.0)
            at = int(errors.argmax())
            if errors[at] > row[0]:
                ids = (batch.prompt_ids[sequence], batch.sample_ids[sequence], at)
                row[0] = errors[at]
                row[3:] = torch.tensor([*map(int, ids), log_pi[at], log_mu[at]])
            row[1] += errors.sum()
    row[2] = (batch.loss_mask > 0).sum()
    return row


def merge_errors(rows: Tensor, copies: int) -> Agreement:
    """Return what ``rows: [ranks, 8]`` of all trainer ranks say together.

    Args:
        copies: how many ranks bring the same tokens.
    """
    largest, *_, prompt, sample, position, log_pi, log_mu = rows[rows[:, 0].argmax()].tolist()
    total, count = rows[:, 1:3].sum(0).tolist()
    return Agreement(
        largest=largest,
        mean=total / max(count, 1.0),
        num_tokens=int(count) // copies,
        worst=f"token {int(position)} of sample {int(sample)} of prompt {int(prompt)}: log-"
        f"probability {log_pi:.6f} in the trainer, {log_mu:.6f} in the generator",
    )


def require_agreement(found: Agreement, bounds: tuple[float, float]) -> None:
    """Raise ContractError where ``bounds`` (largest, mean) are exceeded."""
    for what, value, bound, key in (
        ("largest", found.largest, bounds[0], "max"),
        ("mean", found.mean, bounds[1], "mean"),
    ):
        if not value <= bound:
            raise ContractError(
                f"trainer and generators do not compute the same: the {what} difference of "
                f"log-probabilities over {found.num_tokens} tokens is {value:.3g}, above "
                f"fault.{key}_logprob_error {bound:.3g}; the worst is {found.worst}"
            )
