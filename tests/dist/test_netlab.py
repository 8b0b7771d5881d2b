"""The miniature cluster: its NICs keep their rate, its faults are faults, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.netlab import INTERFACE, Netlab, NetlabError, enter_host, made_names

REASON = Netlab.available()
pytestmark = [pytest.mark.dist, pytest.mark.skipif(bool(REASON), reason=REASON or "can")]

MEGABYTES = 10
# Both ends say how many bytes went through and how long that took.
RECEIVE = f"""
import socket, time
server = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
connection, _ = server.accept()
connection.settimeout(20)
began, got = time.monotonic(), 0
while got < {MEGABYTES} * 1_000_000:
    got += len(connection.recv(1 << 20)) or exit("closed")
print(time.monotonic() - began)
"""
SEND = f"""
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=20) as connection:
    connection.sendall(bytes({MEGABYTES} * 1_000_000))
"""


def _ours() -> list[str]:
    """Return what this process's labs made; others may be at work beside it."""
    return [name for name in made_names() if name.startswith(f"ml{os.getpid()}")]


def _transfer_seconds(lab: Netlab) -> float:
    """Send from host 0 to host 1."""
    receiver = lab.start(1, [sys.executable, "-c", RECEIVE], {}, stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"ready\n"
    sender = lab.start(0, [sys.executable, "-c", SEND, lab.addresses[1]], {})
    output, _ = receiver.communicate(timeout=30)
    assert sender.wait(30) == 0
    return float(output)


def test_a_stream_gets_the_rate_of_the_slower_nic_and_no_more() -> None:
    with Netlab(hosts=2, rate_mbit=200) as lab:
        at_full_rate = _transfer_seconds(lab)
        lab.slow(1, rate_mbit=40)
        at_a_fifth = _transfer_seconds(lab)
    # 80 Mbit less the burst that passes at once; the headroom above is for busy machines.
    assert 0.37 < at_full_rate < 0.8
    assert 1.9 < at_a_fifth < 3


def test_a_cut_host_cannot_be_reached_until_it_joins_again() -> None:
    def ping(lab: Netlab) -> int:
        code = f"import socket; socket.create_connection(({lab.addresses[1]!r}, 7001), 0.3)"
        process = lab.start(0, [sys.executable, "-c", code], {}, stderr=subprocess.PIPE)
        _, errors = process.communicate(timeout=20)
        return b"refused" in errors  # by the host's kernel: nobody listens, but it is there

    with Netlab(hosts=2) as lab:
        assert ping(lab)
        lab.cut(1)
        assert not ping(lab)
        lab.join(1)
        assert ping(lab)


def test_everything_is_gone_after_an_error() -> None:
    def fail() -> None:
        with Netlab(hosts=2) as lab:
            processes.append(lab.start(1, ["sleep", "600"], {}))
            assert len(_ours()) == 3
            raise ValueError("midway")

    processes: list[subprocess.Popen[bytes]] = []
    with pytest.raises(ValueError, match="midway"):
        fail()
    assert _ours() == []
    assert processes[0].returncode == -signal.SIGKILL


OWNER = """
import sys, time
from tools.netlab import Netlab
with Netlab(hosts=1) as lab:
    print(lab.start(0, ["sleep", "600"], {}).pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_everything_is_gone_after_a_signal(number: signal.Signals) -> None:
    """A killed owner cleans up nothing; the next lab does it instead."""
    root = Path(__file__).parents[2]
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=root, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    sleeper = int(owner.stdout.readline())
    owner.send_signal(number)
    owner.wait(20)
    if number == signal.SIGKILL:
        with Netlab(hosts=1):
            pass
    deadline = time.monotonic() + 10
    while Path(f"/proc/{sleeper}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{sleeper}").exists()
    assert [name for name in made_names() if name.startswith(f"ml{owner.pid}")] == []


def test_delay_is_felt_or_refused() -> None:
    """Kernels without netem cannot delay; that is said, not passed over."""
    code = "import socket, sys; socket.create_connection((sys.argv[1], 7001), 5)"
    with Netlab(hosts=2) as lab:
        refusal = ""
        try:
            lab.slow(1, delay_ms=400)
        except NetlabError as error:
            refusal = str(error)
        argv = [sys.executable, "-c", code, lab.addresses[1]]
        began = time.monotonic()
        lab.start(0, argv, {}, stderr=subprocess.DEVNULL).wait(20)
        seconds = time.monotonic() - began
    assert "netem" in refusal or seconds > 0.4


def test_a_host_has_its_own_loopback_and_one_nic() -> None:
    with Netlab(hosts=1) as lab:
        listing = lab.start(0, ["ip", "-br", "addr"], {}, stdout=subprocess.PIPE)
        output, _ = listing.communicate(timeout=20)
    rows = [line.split() for line in output.decode().splitlines()]
    assert [row[0].split("@")[0] for row in rows] == ["lo", INTERFACE]
    assert rows[1][2] == f"{lab.addresses[0]}/24"


def test_a_forked_process_enters_a_host_and_ends_with_the_lab() -> None:
    code = """
import sys, time
from tools.netlab import enter_host
enter_host(sys.argv[1])
print(sorted(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line))
sys.stdout.flush()
time.sleep(600)
"""
    root = Path(__file__).parents[2]
    with Netlab(hosts=1) as lab:
        argv = [sys.executable, "-c", code, lab.name_of(0)]
        process = subprocess.Popen(argv, cwd=root, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline().decode().strip() == str([INTERFACE, "lo"])
    assert process.wait(20) == -signal.SIGKILL
    with pytest.raises(NetlabError, match="cannot enter host nowhere"):
        enter_host("nowhere")


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("os.environ['PATH'] = '/nowhere'", "iproute2 is not installed"),
        ("os.setuid(65534)", "network namespaces cannot be made here: "),
    ],
)
def test_a_machine_that_permits_no_lab_says_why(before: str, reason: str) -> None:
    code = f"import os\nfrom tools.netlab import Netlab\n{before}\nprint(Netlab.available())"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(reason), done
