"""The errors of megarl: one small hierarchy, each also a standard error.

A message says what was wrong, what was got, what was expected and where. User mistakes
(`ConfigError`, `DataError`) are raised before any engine starts.
"""


class MegarlError(Exception):
    """Base of every error that megarl raises on purpose."""


class ConfigError(MegarlError, ValueError):
    """A configuration that cannot be honoured: unknown key, wrong type, impossible layout."""


class DataError(MegarlError, ValueError):
    """A missing or malformed input file; names the file and, for rows, the line."""


class ChannelError(MegarlError, RuntimeError):
    """A peer sent something else than the channel carries, or is gone."""


class ChannelTimeout(MegarlError, TimeoutError):
    """A wait expired; names who waited, for whom, at which step and since when."""


class WeightSyncError(MegarlError, RuntimeError):
    """A weight transfer that did not end in a committed version; the receiver is poisoned."""


class ContractError(MegarlError, RuntimeError):
    """Trainer and generators, with the same weights, do not compute the same: no training."""


class RewardError(MegarlError, RuntimeError):
    """A reward function that returned no usable score, or whose processes could not be kept."""
