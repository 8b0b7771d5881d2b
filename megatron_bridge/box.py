"""Interval arithmetic on tensor regions; no torch.

A `Box` is a half-open hyper-rectangle ``start[d] <= index[d] < stop[d]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A non-empty region of a tensor, one interval per dimension.

    Raises:
        ValueError: an interval is empty or the ranks differ.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(
            not 0 <= low < high for low, high in zip(self.start, self.stop, strict=True)
        ):
            raise ValueError(f"not a box: start {self.start}, stop {self.stop}")

    @classmethod
    def of_shape(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

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

    def shift(self, offset: tuple[int, ...]) -> Box:
        """Return the box moved by ``offset``."""
        return Box(
            tuple(a + b for a, b in zip(self.start, offset, strict=True)),
            tuple(a + b for a, b in zip(self.stop, offset, strict=True)),
        )

    def contains(self, other: Box) -> bool:
        return self.intersect(other) == other
