"""How long responses are: a distribution to draw from, or to take evenly spread quantiles of.

Called by the simulator, which draws, and by the advisor, which wants the same answer each time.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a response: ``measured`` ones, or log-normal ones around ``mean`` up to ``longest``.

    ``spread`` is the standard deviation of the length's logarithm: 0 for equal lengths, about 0.5 for
    answers of one kind, 1 and more for long tails. ``mean`` is that before the cut at ``longest``.
    """

    mean: float = 512.0
    spread: float = 0.6
    longest: int = 1 << 20
    measured: tuple[int, ...] = ()  # sorted; drawn from in place of the log-normal distribution

    def __post_init__(self) -> None:
        if self.mean < 1 or self.spread < 0 or self.longest < 1:
            raise ConfigError(
                f"lengths: mean {self.mean}, spread {self.spread}, longest {self.longest}; "
                "expected at least 1, 0 and 1"
            )
        if any(length < 1 for length in self.measured):
            raise ConfigError("lengths: a measured response has no token")

    def quantile(self, share: float) -> int:
        """Return the length that ``share`` of all responses do not exceed."""
        if self.measured:
            found = self.measured[min(len(self.measured) - 1, int(share * len(self.measured)))]
        elif self.spread == 0:
            found = round(self.mean)
        else:
            middle = math.log(self.mean) - self.spread**2 / 2
            found = round(math.exp(NormalDist(middle, self.spread).inv_cdf(share)))
        return max(1, min(self.longest, found))

    def spread_out(self, count: int) -> list[int]:
        """Return ``count`` lengths at the middles of equal shares, shortest first."""
        return [self.quantile((index + 0.5) / count) for index in range(count)]

    def draw(self, source: random.Random) -> int:
        """Return a random length."""
        return self.quantile(min(max(source.random(), 1e-12), 1 - 1e-12))


def measured_lengths(lengths: list[int]) -> Lengths:
    """Return the distribution of lengths that a run had.

    Raises:
        ConfigError: there are none.
    """
    if not lengths:
        raise ConfigError("lengths: no measured response")
    return Lengths(measured=tuple(sorted(lengths)))
