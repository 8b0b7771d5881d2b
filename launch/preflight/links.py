"""Which hosts meet in which round, and what their rates say; pure but for one reader of files.

Called by the measurement (`rounds`) and by the judge (`read_rates`, `link_faults`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.preflight.judge import Fault
from launch.site import Site

ALL = ""  # the peer's name in the record of an exchange among all
_RATES = ".rates.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One host's measurement of one NIC: with a peer or, where that is `ALL`, among all."""

    peer: str
    nic: int
    bytes_per_second: float  # 0: it failed
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """Everything that one host measured, and which hosts took part."""

    tested: tuple[str, ...]
    rates: tuple[Rate, ...]


def rounds(num_hosts: int, most: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return at most ``most`` rounds of pairs, each host at most once in a round, no pair twice.

    The circle method of tournaments: one host stays, the others go round it. With an odd number one
    host has nobody to meet in each round.
    """
    seats: list[int | None] = list(range(num_hosts))
    if num_hosts % 2:
        seats.append(None)
    size, plan = len(seats), []
    for _ in range(min(most, size - 1)):
        pairs = zip(seats[: size // 2], reversed(seats[size // 2 :]), strict=True)
        plan.append(
            tuple((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        )
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(plan)


def rates_path(folder: Path, host: str) -> Path:
    return folder / f"{host}{_RATES}"


def read_rates(folder: Path) -> dict[str, HostRates]:
    """Return what hosts have measured; empty where nothing was."""
    found: dict[str, HostRates] = {}
    for path in sorted(folder.glob(f"*{_RATES}")):
        fields = json.loads(path.read_text())
        rates = tuple(Rate(**rate) for rate in fields["rates"])
        host = path.name.removesuffix(_RATES)
        found[host] = HostRates(tested=tuple(fields["tested"]), rates=rates)
    return found


def link_faults(measured: Mapping[str, HostRates], site: Site) -> list[Fault]:
    """Return the hosts more than half of whose links are slow, the worst first.

    A slow host makes its peers' links slow too: with each host that is named its links are taken
    away before the next is looked for. Of two equally bad ones the later is named.
    """
    tested, silent = _silent(measured)
    if 2 * len(silent) > len(tested):  # the step failed as a whole, which names nobody: see `notes`
        silent = []
    faults = [
        Fault(host=host, check="links", reason="it did not measure its links in time")
        for host in silent
    ]
    least = site.link_bytes_per_second * site.preflight.link_share
    left = {pair: rate for pair, rate in pair_rates(measured).items() if not pair & set(silent)}
    while (worst := _worst(tested, left, least)) is not None:
        met = {next(iter(pair - {worst})): rate for pair, rate in left.items() if worst in pair}
        faults.append(Fault(host=worst, check="links", reason=_slowness(met, least, site)))
        left = {pair: rate for pair, rate in left.items() if worst not in pair}
    return faults


def _silent(measured: Mapping[str, HostRates]) -> tuple[list[str], list[str]]:
    """Return the hosts that took part, and those of them that did not come to an end."""
    tested = list(dict.fromkeys(host for one in measured.values() for host in one.tested))
    return tested, [host for host in tested if host not in measured or not measured[host].rates]


def pair_rates(measured: Mapping[str, HostRates]) -> dict[frozenset[str], Rate]:
    """Return of each pair the slowest of its NICs, as the side sees it that saw it slower."""
    slowest: dict[frozenset[str], Rate] = {}
    for host, one in measured.items():
        for rate in one.rates:
            pair = frozenset((host, rate.peer))
            if rate.peer != ALL and (
                pair not in slowest or rate.bytes_per_second < slowest[pair].bytes_per_second
            ):
                slowest[pair] = rate
    return slowest


def _worst(hosts: Sequence[str], left: Mapping[frozenset[str], Rate], least: float) -> str | None:
    """Return the host with the largest share of slow links, if that is more than half."""
    worst, most = None, 0.5
    for host in hosts:
        slow = [rate.bytes_per_second < least for pair, rate in left.items() if host in pair]
        share = sum(slow) / max(len(slow), 1)
        if share > most or (worst is not None and share == most):
            worst, most = host, share
    return worst


def _slowness(met: Mapping[str, Rate], least: float, site: Site) -> str:
    slow = {peer: rate for peer, rate in met.items() if rate.bytes_per_second < least}
    peer, rate = min(slow.items(), key=lambda item: item[1].bytes_per_second)
    found = f"{rate.bytes_per_second / 1e9:.3g}" if rate.bytes_per_second else "no"
    text = (
        f"slow links to {len(slow)} of {len(met)} hosts: {found} GB/s with {peer} on NIC {rate.nic}, "
        f"expected at least {least / 1e9:.3g} of {site.link_bytes_per_second / 1e9:.3g}"
    )
    return f"{text} ({rate.error})" if rate.error else text


def notes(measured: Mapping[str, HostRates], site: Site) -> Iterator[str]:
    """Yield what is slow and cannot be laid to one host."""
    tested, silent = _silent(measured)
    if 2 * len(silent) > len(tested):
        yield f"links: {len(silent)} of {len(tested)} hosts did not end their measurement"
    least = site.link_bytes_per_second * site.preflight.link_share
    named = {fault.host for fault in link_faults(measured, site)}
    for pair, rate in pair_rates(measured).items():
        if rate.bytes_per_second < least and not pair & named:
            yield f"the link between {' and '.join(sorted(pair))} is slow: {_gigabytes(rate)}"
    among_all = [rate for one in measured.values() for rate in one.rates if rate.peer == ALL]
    slowest = min(among_all, key=lambda rate: rate.bytes_per_second, default=None)
    if slowest is not None and slowest.bytes_per_second < least:
        yield f"all-reduce over all tested hosts is slow: {_gigabytes(slowest)}"


def _gigabytes(rate: Rate) -> str:
    return rate.error or f"{rate.bytes_per_second / 1e9:.3g} GB/s a NIC"
