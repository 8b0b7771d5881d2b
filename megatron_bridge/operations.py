"""The unit of a transfer, `Operation`, and the rounds in which all ranks go through theirs.

Called by the planner, which makes operations, and by those who execute them; no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import sub

from megatron_bridge.box import Box


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Operation:
    """Copy one region of a canonical tensor from a source rank into a target rank.

    The three boxes have one shape: the region itself, and where it lies on each side.
    """

    source_rank: int
    target_rank: int
    tensor: str
    box: Box
    source_param: str
    source_box: Box
    target_param: str
    target_box: Box

    def rows(self, low: int, high: int) -> Operation:
        """Return the part of the operation that copies its rows ``low`` to ``high``."""
        return Operation(
            source_rank=self.source_rank,
            target_rank=self.target_rank,
            tensor=self.tensor,
            box=_rows(self.box, low, high),
            source_param=self.source_param,
            source_box=_rows(self.source_box, low, high),
            target_param=self.target_param,
            target_box=_rows(self.target_box, low, high),
        )


def numel_of(box: Box) -> int:
    """`Box.numel` for the loops over all operations, where its generators take half the time."""
    return prod(map(sub, box.stop, box.start))


def _rows(box: Box, low: int, high: int) -> Box:
    first = box.start[0]
    return Box((first + low, *box.start[1:]), (first + high, *box.stop[1:]))


def order_of(item: Operation) -> tuple[object, ...]:
    """The natural order of operations, as a key: comparing dataclasses takes ten times as long."""
    return (
        item.source_rank,
        item.target_rank,
        item.tensor,
        item.box.start,
        item.box.stop,
        item.source_param,
        item.source_box.start,
        item.target_param,
        item.target_box.start,
    )


def schedule(
    operations: Iterable[Operation], max_operations: int, max_numel: int, rank: int | None = None
) -> tuple[tuple[Operation, ...], ...]:
    """Divide operations into rounds that all ranks go through in the same order.

    In a round no rank has more than ``max_operations`` operations or ``max_numel`` elements, on
    either end; larger operations are split by rows (a single row is never split). A rank that posts
    its whole round before it waits cannot deadlock, since its peers' halves are in the same round.

    Args:
        rank: return only the operations of this rank, in those of the rounds that have any.
    """
    pairs: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for item in sorted(operations, key=order_of):
        pairs[item.source_rank, item.target_rank].append(item)
    # Interleave the pairs: lexicographic order would make every target wait for the first source.
    size = 1 + max((max(pair) for pair in pairs), default=0)
    order = sorted(pairs, key=lambda pair: ((pair[1] - pair[0]) % size, pair[0]))
    active = [(*pair, _pieces(pairs[pair], max_numel)) for pair in order]
    caps = (max_operations, max_numel)
    sending: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    receiving: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    rounds: dict[int, list[Operation]] = defaultdict(list)
    while active:
        unfinished: list[tuple[int, int, Iterator[_Piece]]] = []
        for source, target, pieces in active:
            piece = next(pieces, None)
            if piece is None:
                continue
            unfinished.append((source, target, pieces))
            item, low, high, numel = piece
            number = _place((sending[source], receiving[target]), numel, caps)
            if rank in (None, source, target):
                rounds[number].append(item if high == 0 else item.rows(low, high))
        active = unfinished
    return tuple(tuple(rounds[number]) for number in sorted(rounds))


def _place(ends: tuple[list[int], list[int]], numel: int, caps: tuple[int, int]) -> int:
    """Take an operation into the first round that neither end has passed or filled.

    An end is the last round that a rank's sending or receiving takes part in, with the number of
    its operations and elements there.
    """
    number = max(ends[0][0], ends[1][0])
    for last, count, load in ends:
        if last == number and count and (count >= caps[0] or load + numel > caps[1]):
            number += 1
            break
    for end in ends:
        if end[0] < number:
            end[:] = (number, 1, numel)
        else:
            end[1] += 1
            end[2] += numel
    return number


_Piece = tuple[Operation, int, int, int]  # rows low to high (0, 0: all) and their elements


def _pieces(items: Sequence[Operation], max_numel: int) -> Iterator[_Piece]:
    for item in items:
        numel = numel_of(item.box)
        if numel <= max_numel:
            yield item, 0, 0, numel
            continue
        count = item.box.stop[0] - item.box.start[0]
        row = numel // count
        step = max(1, max_numel // row)
        for low in range(0, count, step):
            high = min(low + step, count)
            yield item, low, high, (high - low) * row
