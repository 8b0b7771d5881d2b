"""One rank's parameters as operations read and write them, and the wire format of a message.

Held by transports. On the wire an operation is its region's elements in row-major order, in the
wire's dtype; a quantised one is its blocks' scales and then its FP8 elements. Items of one message
follow one another, aligned (`Message.offsets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megarl.ddma.checksums import SampledChecksums, Verify, checksums
from megarl.errors import WeightSyncError
from megatron_bridge.box import Box
from megatron_bridge.errors import QuantizationError
from megatron_bridge.operations import AFTER, BLOCK, SCALE_BYTES, Message, Operation
from megatron_bridge.quantize import FP8, quantize_blockwise, quantize_per_tensor

Quantizer = Callable[[Tensor, Tensor, Tensor], None]  # of a weight: its elements and scales


def _block_box(box: Box) -> tuple[slice, ...]:
    """Return which scales belong to the elements of ``box``."""
    pairs = zip(box.start, box.stop, strict=True)
    return tuple(slice(low // BLOCK, -(-high // BLOCK)) for low, high in pairs)


def _apply(how: Quantizer, weight: Tensor, elements: Tensor, scales: Tensor) -> None:
    """Quantise as ``how`` does.

    Raises:
        WeightSyncError: it refuses the weight.
    """
    try:
        how(weight, elements, scales)
    except QuantizationError as error:
        raise WeightSyncError(str(error)) from error


class Memory:
    """The tensors of one rank by parameter name; regions of them are read and written in place.

    A parameter that its own rank quantises after the transfer is received into a scratch tensor,
    which is freed as soon as its last region has arrived.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        expected: Iterable[Operation] = (),
        verify: Verify = Verify.NONE,
    ):
        """Take the parameters and the operations that one transfer brings them."""
        self.params = {name: tensor.detach() for name, tensor in params.items()}
        self._verify = verify
        self._after: dict[str, int] = {}
        for item in expected:
            if item.quantization in AFTER:
                numel = self._after.get(item.target_param, 0) + item.box.numel
                self._after[item.target_param] = numel
        self._missing: dict[str, int] = {}
        self._scratch: dict[str, Tensor] = {}
        self._sums: dict[tuple[str, Box], Tensor] = {}
        self._sampled: dict[tuple[int, bool], SampledChecksums] = {}
        self._kept: list[Sequence[Operation]] = []

    def begin(self) -> None:
        """Forget what an unfinished transfer left."""
        self._missing = dict(self._after)
        self._scratch.clear()

    def source(self, item: Operation) -> Tensor:
        return self.params[item.source_param][item.source_box.slices]

    def target(self, item: Operation) -> Tensor:
        """Return the region that an operation's elements are written to."""
        return self._whole(item)[item.target_box.slices]

    def _whole(self, item: Operation) -> Tensor:
        name = item.target_param
        if item.quantization not in AFTER:
            return self.params[name]
        if name not in self._scratch:
            param = self.params[name]
            dtype = getattr(torch, item.dtype)
            self._scratch[name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
        return self._scratch[name]

    def is_in_place(self, item: Operation, *, sending: bool) -> bool:
        """Whether the region is on the wire as it lies in memory."""
        if item.quantization == "block":
            return False
        region = self.source(item) if sending else self.target(item)
        return region.is_contiguous() and region.dtype == getattr(torch, item.dtype)

    def pack(self, message: Message, out: Tensor) -> None:
        """Write a message's bytes into ``out``: [nbytes] uint8."""
        for item, start in zip(message.items, message.offsets, strict=True):
            scales, elements = _views(item, out[start : start + item.nbytes])
            source = self.source(item)
            if scales is None:
                elements.copy_(source)
            elif source.dtype == FP8:  # forwarded
                elements.copy_(source)
                scales.copy_(self.params[item.scales][_block_box(item.source_box)])
            else:
                _apply(quantize_blockwise, source, elements, scales)

    def unpack(self, message: Message, staged: Tensor) -> None:
        """Write a message's bytes, [nbytes] uint8, where they belong."""
        for item, start in zip(message.items, message.offsets, strict=True):
            scales, elements = _views(item, staged[start : start + item.nbytes])
            self.target(item).copy_(elements)
            if scales is not None:
                self.params[item.scales][_block_box(item.target_box)].copy_(scales)

    def write(self, item: Operation, remote: Memory) -> None:
        """Write an operation of this rank into another rank's parameters."""
        source, target = self.source(item), remote.target(item)
        if item.quantization != "block":
            target.copy_(source)
            return
        scales = remote.params[item.scales][_block_box(item.target_box)]
        if source.dtype == FP8:  # forwarded
            target.copy_(source)
            scales.copy_(self.params[item.scales][_block_box(item.source_box)])
        else:
            _apply(quantize_blockwise, source, target, scales)

    def arrived(self, message: Message) -> None:
        """Quantise what is now complete; called once for each message."""
        for item in message.items:
            name = item.target_param
            if item.quantization in AFTER:
                if self._verify is not Verify.NONE:
                    dtypes = [getattr(torch, item.dtype)]
                    sums = checksums([self.target(item)], dtypes, self._verify)
                    self._sums[name, item.target_box] = sums
                self._missing[name] -= item.box.numel
                if not self._missing[name]:
                    self._quantize(item, self._scratch.pop(name))

    def _quantize(self, item: Operation, whole: Tensor) -> None:
        blockwise = item.quantization == "after_block"
        quantize = quantize_blockwise if blockwise else quantize_per_tensor
        _apply(quantize, whole, self.params[item.target_param], self.params[item.scales])

    def checksums(self, items: Sequence[Operation], *, sending: bool) -> Tensor:
        """Return checksums of what the targets of ``items`` must hold, or of what they hold.

        An operation has one; one with scales on the wire two, of which only the first blocks are
        read, unless all is to be.
        """
        key = (id(items), sending)
        if key in self._sampled:
            return self._sampled[key].read().cpu()
        regions: list[Tensor] = []
        dtypes: list[torch.dtype] = []
        places: list[int] = []  # of the regions' checksums among all
        found: list[Tensor] = []
        for item in items:
            if item.quantization in AFTER and not sending:  # its region is scratch memory, now free
                found.append(self._sums[item.target_param, item.target_box])
                continue
            if item.quantization == "block":
                images = self._images(item, sending=sending)
                dtypes += [image.dtype for image in images]
            else:
                images = (self.source(item) if sending else self.target(item),)
                dtypes.append(getattr(torch, item.dtype))
            places += range(len(found), len(found) + len(images))
            found += [torch.zeros(1, dtype=torch.int64, device=images[0].device)] * len(images)
            regions += images
        if self._verify is Verify.SAMPLED and not any(item.quantization for item in items):
            self._kept.append(items)  # so that no other list gets its id
            self._sampled[key] = SampledChecksums(regions, dtypes)
            return self._sampled[key].read().cpu()
        sums = torch.cat(found)
        if regions:
            sums[places] = checksums(regions, dtypes, self._verify)
        return sums.cpu()

    def _images(self, item: Operation, *, sending: bool) -> tuple[Tensor, Tensor]:
        """Return what a quantised operation's target holds: elements' bits and scales."""
        region = self.source(item) if sending else self.target(item)
        box = item.source_box if sending else item.target_box
        rows = len(region) if self._verify is Verify.FULL else min(BLOCK, len(region))
        region = region[:rows]
        if region.dtype == FP8:
            scales = self.params[item.scales][_block_box(box)]
            return region.view(torch.int8), scales[: -(-rows // BLOCK)]
        grid = tuple(-(-size // BLOCK) for size in region.shape)
        elements = torch.empty_like(region, dtype=FP8, memory_format=torch.contiguous_format)
        scales = region.new_empty(grid, dtype=torch.float32)
        _apply(quantize_blockwise, region, elements, scales)
        return elements.view(torch.int8), scales


def _views(item: Operation, staged: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return a staged operation's scales (None where it has none) and elements."""
    shape = item.box.shape
    dtype = getattr(torch, item.dtype)
    if item.quantization != "block":
        return None, staged.view(dtype).view(shape)
    grid = tuple(-(-size // BLOCK) for size in shape)
    count = SCALE_BYTES * grid[0] * grid[1]
    return staged[:count].view(torch.float32).view(grid), staged[count:].view(dtype).view(shape)
