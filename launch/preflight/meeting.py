"""How hosts meet the first one: it listens, says its time and takes reports in; the others come.

Called by the check. The first host's `Listener` waits for all others and is unblocked by the last
one's report or its time limit; a visitor waits for the listener at most as long.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from launch.preflight.report import Report, from_json, to_json, write_report

TOKEN_FILE = "token"
_CLOCK, _REPORT = b"clock\n", b"report "
_PINGS = 5  # the quickest one tells the time best
_TELL_SHARE = 0.3
_ATTEMPT_SECONDS, _RETRY_SECONDS = 5.0, 0.2


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Answer one visitor until it goes."""
        try:
            for line in self.rfile:
                if line == _CLOCK:
                    answer = {"time": time.time(), "token": self.server.token}
                    self.wfile.write(json.dumps(answer).encode() + b"\n")
                elif line.startswith(_REPORT):
                    self.server.take(from_json(line.removeprefix(_REPORT).decode()))
        except (OSError, ValueError):  # it is gone in the middle of a word: it has not been met
            return


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # the ranks and the next attempt use this port too
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, token: str, folder: Path):
        self.token, self._folder = token, folder
        self.met: set[str] = set()
        self.changed = threading.Condition()
        super().__init__(("", port), _Handler)

    def take(self, report: Report) -> None:
        """Note who came; one whose folder is another cannot write its report where we read it."""
        if report.shared:
            write_report(self._folder, report)
        with self.changed:
            self.met.add(report.host)
            self.changed.notify_all()


class Listener:
    """The first host's side, open from its making to `wait`'s end.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, token: str, folder: Path):
        with (folder / TOKEN_FILE).open("w") as file:
            file.write(token)
        self._server = _Server(port, token, folder)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def wait(self, hosts: set[str], seconds: float) -> None:
        """Return when all ``hosts`` have come, or after ``seconds``; nobody is met afterwards."""
        try:
            with self._server.changed:
                self._server.changed.wait_for(lambda: self._server.met >= hosts, seconds)
        finally:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the first host listens, the folder that it shares, and for how long it is tried."""

    address: str
    port: int
    folder: Path
    seconds: float


def visit(place: Place, report: Report) -> Report:
    """Meet the first host, hand it the report and return it with what was found on the way."""
    deadline = time.monotonic() + place.seconds
    error: OSError | None = None
    while time.monotonic() < deadline:
        try:
            left = min(deadline - time.monotonic(), _ATTEMPT_SECONDS)
            with socket.create_connection((place.address, place.port), left) as link:
                return _talk(link, place, report, deadline)
        except OSError as raised:  # not yet listening, or not to be reached
            error = raised
            time.sleep(_RETRY_SECONDS)
    missed = f"{place.address}:{place.port} not reached in {place.seconds:g} s: {error}"
    return replace(report, master=missed, shared=_writable(place.folder))


def _talk(link: socket.socket, place: Place, report: Report, deadline: float) -> Report:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips: list[tuple[float, float]] = []
    token = ""
    with link.makefile("rb") as answers:
        for _ in range(_PINGS):
            asked = time.time()
            link.sendall(_CLOCK)
            line = answers.readline()
            answered = time.time()
            if not line:
                raise ConnectionError("the first host closed the connection")
            answer = json.loads(line)
            token = answer["token"]
            trips.append((answered - asked, answer["time"] - (asked + answered) / 2))
        round_trip, ahead = min(trips)
        found = replace(report, round_trip_seconds=round_trip, ahead_seconds=ahead)
        # NFS shows a new file only when its cache of the folder has grown old: seconds. Not to the
        # last, so that the first host still hears of it.
        look_until = deadline - place.seconds * _TELL_SHARE
        found = replace(found, shared=_sees(place.folder, token, look_until))
        link.sendall(_REPORT + to_json(found).encode() + b"\n")
        link.shutdown(socket.SHUT_WR)
        answers.read()  # until it has been taken in
    return found


def _sees(folder: Path, token: str, deadline: float) -> str:
    """Return why ``folder`` is not the one that the first host wrote the token into."""
    path = folder / TOKEN_FILE
    while True:
        if path.is_file() and path.read_text() == token:
            return _writable(folder)
        if time.monotonic() >= deadline:
            return (
                f"{folder} is another one than the first host's: its file {path.name} is not there"
            )
        time.sleep(_RETRY_SECONDS)


def _writable(folder: Path) -> str:
    """Return why nothing can be written into ``folder``."""
    probe = folder / f".probe.{socket.gethostname()}.{threading.get_native_id()}"
    try:
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    return ""
