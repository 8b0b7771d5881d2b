"""A miniature cluster on one machine: network namespaces as hosts, each with a NIC of known rate.

On loopback every transfer scheme is bound by the same memory copies; here it is bound by the
busiest NIC, as in a cluster. Called by the weight-transfer benchmark and by tests of faults. Needs
root and iproute2. Whatever a lab made (processes, namespaces, bridge) goes with it, also after an
error or SIGTERM; what a killed one left behind goes when the next one starts.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

INTERFACE = "eth0"  # the NIC's name in every host
_NAME = re.compile(r"ml(\d+)[a-z]")  # of all that we make: the owner's process id and a letter
_COUNTER = itertools.count()
_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_COMMAND_SECONDS, _END_SECONDS = 20.0, 10.0
# Measured with one TCP stream through 400 Mbit/s: 0.96 of the rate with frames of 1500 bytes and
# 0.99 with these, at a third of the packets; the burst is above the largest segment (64 KiB) that
# the kernel hands down, and 2.6 ms of the rate.
_MTU = 9000
_BURST_BYTES = 128 << 10
_QUEUE_BYTES = 256 << 20  # the windows of all who may send to one host: the fabric loses nothing


class NetlabError(RuntimeError):
    """A miniature cluster could not be made or used."""


def _run(*argv: str, check: bool = True) -> str:
    """Run a command of iproute2 and return its output."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetlabError(f"{' '.join(argv)}: {error}") from error
    if check and done.returncode:
        raise NetlabError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def made_names() -> list[str]:
    """Return the namespaces and bridges that labs made and that exist now."""
    lines = [*_run("ip", "netns", "list").splitlines(), *_bridges().splitlines()]
    return sorted({line.split()[0] for line in lines if _NAME.match(line)})


def _bridges() -> str:
    return _run("ip", "-br", "link", "show", "type", "bridge")


def _remove(names: Iterable[str]) -> None:
    """End all processes in our namespaces and delete these and the bridges; veth pairs go too."""
    spaces = {line.split()[0] for line in _run("ip", "netns", "list").splitlines()}
    chosen = list(names)
    for name in spaces.intersection(chosen):
        for pid in _run("ip", "netns", "pids", name, check=False).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
    for name in chosen:
        if name in spaces:
            _run("ip", "netns", "delete", name, check=False)
        else:
            _run("ip", "link", "delete", name, check=False)


def _is_orphan(name: str) -> bool:
    match = _NAME.match(name)
    return match is not None and not Path(f"/proc/{match[1]}").exists()


def enter_host(name: str) -> None:
    """Move this process, while it has one thread, to a lab's host; the lab ends it with the rest.

    For processes that are forked from one which has imported everything: importing an engine costs
    seconds of processor time, on a machine of few cores more than a transfer.

    Raises:
        NetlabError: there is no such host.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with Path(f"/run/netns/{name}").open() as space:
            if libc.setns(space.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError as error:
        raise NetlabError(f"cannot enter host {name}: {error}") from error


class Netlab:
    """Hosts with one NIC each on one lossless switch, from entering the context to leaving it.

    Several processes may run on one host; among themselves they use its loopback or shared memory.

    Example::

        with Netlab(hosts=8, rate_mbit=400) as lab:
            process = lab.start(3, [sys.executable, "-m", "x"], {"MASTER_ADDR": lab.addresses[0]})
            process.wait()
    """

    def __init__(self, hosts: int, rate_mbit: float = 400.0):
        if not 1 <= hosts <= 250 or rate_mbit <= 0:
            raise NetlabError(f"expected 1 to 250 hosts and a rate, got {hosts} at {rate_mbit}")
        self.rate_mbit = rate_mbit
        run_id = f"ml{os.getpid()}{chr(ord('a') + next(_COUNTER) % 26)}"
        self._bridge = f"{run_id}br"
        self._hosts = [f"{run_id}h{host}" for host in range(hosts)]
        self._ports = [f"{run_id}p{host}" for host in range(hosts)]  # 15 characters at most
        subnet = f"10.77.{os.getpid() % 256}"
        self.addresses = tuple(f"{subnet}.{host + 1}" for host in range(hosts))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._old_handler: object = None

    @staticmethod
    def available() -> str:
        """Return why no lab can be made on this machine; an empty string where one can."""
        missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
        if missing:
            return f"iproute2 is not installed: no {' or '.join(missing)} on the path"
        probe = f"ml{os.getpid()}zprobe"
        try:
            _run("ip", "netns", "add", probe)
            try:
                _run("ip", "-n", probe, "link", "add", "name", "bridge0", "type", "bridge")
                shaped = ("rate", "1mbit", "burst", "2kb", "limit", "9kb")
                _run("tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", "tbf", *shaped)
            finally:
                _run("ip", "netns", "delete", probe, check=False)
        except NetlabError as error:
            return f"network namespaces cannot be made here: {error}"
        return ""

    def __enter__(self) -> Self:
        """Make the hosts.

        Raises:
            NetlabError: this machine does not permit it; says why.
        """
        reason = self.available()
        if reason:
            raise NetlabError(reason)
        _remove(filter(_is_orphan, made_names()))
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, _leave_by_exception)
        try:
            _run("ip", "link", "add", self._bridge, "mtu", str(_MTU), "type", "bridge")
            _run("ip", "link", "set", self._bridge, "up", "type", "bridge", "nf_call_iptables", "0")
            for host in range(len(self._hosts)):
                self._make_host(host)
        except BaseException:
            self._close()
            raise
        return self

    def _make_host(self, host: int) -> None:
        name, port, mtu = self._hosts[host], self._ports[host], str(_MTU)
        _run("ip", "netns", "add", name)
        inner = ("peer", "name", INTERFACE, "mtu", mtu, "netns", name)
        _run("ip", "link", "add", port, "mtu", mtu, "type", "veth", *inner)
        _run("ip", "link", "set", port, "master", self._bridge, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        _run("ip", "-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", INTERFACE)
        self._shape(host, self.rate_mbit, "add")

    def _shape(self, host: int, rate_mbit: float, verb: str) -> None:
        """Limit both directions: what leaves the host and what the switch hands it."""
        rate = ("rate", f"{round(rate_mbit * 1000)}kbit", "burst", str(_BURST_BYTES))
        rule = ("root", "handle", "1:", "tbf", *rate, "limit", str(_QUEUE_BYTES))
        _run("tc", "-n", self._hosts[host], "qdisc", verb, "dev", INTERFACE, *rule)
        _run("tc", "qdisc", verb, "dev", self._ports[host], *rule)

    def start(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host; ``env`` is added to this process's environment."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._hosts[host], *argv],
            env={**os.environ, **env},
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # an interrupt from the keyboard reaches us alone
        )
        self._processes.append(process)
        return process

    def name_of(self, host: int) -> str:
        """Return the name by which a process enters a host, see `enter_host`."""
        return self._hosts[host]

    def cut(self, host: int) -> None:
        """Take the host's cable out."""
        _run("ip", "link", "set", self._ports[host], "down")

    def join(self, host: int) -> None:
        """Put the cable back."""
        _run("ip", "link", "set", self._ports[host], "up")

    def slow(
        self,
        host: int,
        *,
        rate_mbit: float | None = None,
        delay_ms: float = 0.0,
        loss_percent: float = 0.0,
    ) -> None:
        """Give the host's NIC another rate, or delay and lose what the switch hands it.

        Raises:
            NetlabError: delay or loss, and this kernel has no netem.
        """
        self._shape(host, rate_mbit or self.rate_mbit, "change")
        if delay_ms or loss_percent:
            netem = ("netem", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%")
            place = ("dev", self._ports[host], "parent", "1:", "handle", "2:")
            _run("tc", "qdisc", "replace", *place, *netem, "limit", "100000")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        try:
            for process in self._processes:
                process.kill()  # it may not have entered its namespace yet
            _remove([*self._hosts, self._bridge])
            for process in self._processes:
                process.wait(_END_SECONDS)
        finally:
            if self._old_handler is not None:
                signal.signal(signal.SIGTERM, self._old_handler)  # pyright: ignore[reportArgumentType]


def _leave_by_exception(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
