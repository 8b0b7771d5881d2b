"""Interval arithmetic on tensor regions; no torch.

A `Box` is a half-open hyper-rectangle ``start[d] <= index[d] < stop[d]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import lt, sub


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A non-empty region of a tensor, one interval per dimension.

    Raises:
        ValueError: an interval is empty or the ranks differ.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if (
            len(self.start) != len(self.stop)
            or not all(map(lt, self.start, self.stop))
            or min(self.start, default=0) < 0
        ):
            raise ValueError(f"not a box: start {self.start}, stop {self.stop}")

    @classmethod
    def of_shape(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index a tensor (or a safetensors slice) with this box."""
        return tuple(slice(low, high) for low, high in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def without(self, hole: Box) -> list[Box]:
        """Return boxes that cover the rest once."""
        common = self.intersect(hole)
        if common is None:
            return [self]
        rest: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for dim, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
            for first, last in ((start[dim], low), (high, stop[dim])):
                if first < last:
                    rest.append(
                        Box(
                            (*start[:dim], first, *start[dim + 1 :]),
                            (*stop[:dim], last, *stop[dim + 1 :]),
                        )
                    )
            start[dim], stop[dim] = low, high
        return rest

    def shift(self, offset: tuple[int, ...]) -> Box:
        """Return the box moved by ``offset``."""
        return Box(
            tuple(a + b for a, b in zip(self.start, offset, strict=True)),
            tuple(a + b for a, b in zip(self.stop, offset, strict=True)),
        )

    def contains(self, other: Box) -> bool:
        return self.intersect(other) == other
