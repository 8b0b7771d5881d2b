"""The units of a transfer: an `Operation` copies one region, a `Message` carries some at once.

Called by the planner, which makes them, and by those who execute them; no torch. Both are named
tuples: a rank makes thousands for one plan, and frozen dataclasses take four times as long to make.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_bridge.box import Box

BLOCK = 128  # rows and columns of a weight that share one FP8 scale
SCALE_BYTES = 4
AFTER = ("after_block", "after_tensor")  # plain on the wire, quantised when the whole has arrived
ALIGNMENT = 16  # bytes; where several items share a message


class Operation(NamedTuple):
    """Copy one region of a canonical tensor from a source rank into a target rank.

    The three boxes have one shape: the region itself, and where it lies on each side. A rank that
    forwards what it received has the target's names on both sides.
    """

    source_rank: int
    target_rank: int
    tensor: str
    box: Box
    source_param: str
    source_box: Box
    target_param: str
    target_box: Box
    dtype: str  # of the elements on the wire
    quantization: str = ""  # "block": FP8 and scales on the wire; in `AFTER`: the target quantises
    scales: str = ""  # the target's parameter of scales

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: scales, where there are any, and behind them the elements, row-major."""
        rows = self.box.stop[0] - self.box.start[0]
        return wire_bytes(rows, self.box.numel // rows, self.dtype, self.quantization)


ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "float8_e4m3fn": 1}


def is_block_aligned(start: int, stop: int, size: int) -> bool:
    """Tell whether [start, stop) of a dim of this size consists of whole blocks."""
    return all(place % BLOCK == 0 or place == size for place in (start, stop))


def wire_bytes(rows: int, columns: int, dtype: str, quantization: str) -> int:
    """Return what ``rows`` of a region weigh on the wire."""
    size = rows * columns * ITEMSIZE[dtype]
    if quantization == "block":
        size += SCALE_BYTES * -(-rows // BLOCK) * -(-columns // BLOCK)
    return size


class Message(NamedTuple):
    """What one rank sends another in one piece.

    All ranks go through their messages in the order of `key`: the first unfinished one of all is
    then posted on both its ends, whatever window each rank posts, so that none waits for ever. What
    a rank forwards has a larger key than what brings it.
    """

    source_rank: int
    target_rank: int
    items: tuple[Operation, ...]
    step: int  # position in its pair's traffic, later by a lag for each hop
    hop: int  # 0 from a trainer; of a forwarded one 1 or more
    relayed: bool  # the target passes it on, or has it from one that did
    content: tuple[int, int, int]  # (route, stripe, piece): alike on every hop of the same bytes

    @property
    def key(self) -> tuple[int, ...]:
        # Interleave the pairs: in plain order every target would wait for the first source.
        turn = (self.target_rank - self.source_rank) % (1 << 20)
        return (self.step, turn, self.source_rank, self.target_rank, *self.content)

    @property
    def nbytes(self) -> int:
        return self.offsets[-1] + self.items[-1].nbytes

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each item begins in the message; aligned for any dtype."""
        starts, at = [0], 0
        for item in self.items[:-1]:
            at += -(-item.nbytes // ALIGNMENT) * ALIGNMENT
            starts.append(at)
        return tuple(starts)
