"""A private Slurm for tests: a controller, powered-down hosts of 8 GPUs and virtual nodes that run.

`Slurm` starts `munged` and `slurmctld`, which need no root. The nodes need root: each is a `slurmd`
with a host name and an ``/etc/hosts`` of its own, so that names of nodes resolve as on a cluster. All
processes of a node share its UTS namespace, by which they are found.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

SEARCH_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has the daemons
CONTROLLER = ("slurmctld", "munged", "sbatch", "scontrol")
NODE = ("slurmd", "unshare")
NODES = tuple(f"n{number}" for number in range(1, 7))

# A short time until a silent node counts as down, until a job that was asked to end is killed, and
# (cred_expire) until one that was requeued may start again. Jobs of two such Slurms on one machine
# have other numbers, and so other ports.
_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout=6
MessageTimeout=5
KillWait=8
MinJobAge=600
JobRequeue=1
GresTypes=gpu
FirstJobId={port}
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=86400
SuspendExcNodes={names}
NodeName=DEFAULT CPUs=64 Sockets=2 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=2000000
NodeName=c[001-128] NodeHostname=localhost NodeAddr=127.0.0.1 Port={port_of_all} Gres=gpu:8 State=CLOUD
{nodes}
PartitionName=batch Nodes=c[001-128] Default=YES MaxTime=7-00:00:00 State=UP
PartitionName=nodes Nodes={names} MaxTime=7-00:00:00 State=UP
PartitionName=trainers Nodes={trainers} MaxTime=7-00:00:00 State=UP
PartitionName=generators Nodes={generators} MaxTime=7-00:00:00 State=UP
"""
_START_NODE = """
mount --make-rprivate /
mount --bind "$1/hosts" /etc/hosts
hostname "$2"
exec slurmd -D -f "$1/slurm.conf" -N "$2"
"""
TRAINERS, GENERATORS = NODES[:3], NODES[3:]


def missing(programs: tuple[str, ...]) -> list[str]:
    """Return which of ``programs`` this machine lacks."""
    return [each for each in programs if shutil.which(each, path=SEARCH_PATH) is None]


def wait_until(done: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for ``done`` to say something true.

    Raises:
        AssertionError: it did not in time.
    """
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {what}"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("0.0.0.0", 0))
        return [each.getsockname()[1] for each in sockets]


class Slurm:
    """A controller from `start` to `stop`; `start_nodes` adds the nodes that run jobs."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.environment = {**os.environ, "PATH": SEARCH_PATH, "SLURM_CONF": f"{folder}/slurm.conf"}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._homes: dict[str, str] = {}  # the UTS namespace of each node

    def start(self) -> None:
        folder = self._folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        port, port_of_all, *ports = _free_ports(2 + len(NODES))
        nodes, hosts = [], ["127.0.0.1 localhost"]
        for number, (name, at) in enumerate(zip(NODES, ports, strict=True), 1):
            nodes.append(f"NodeName={name} NodeAddr=127.0.1.{number} Port={at} State=UNKNOWN")
            hosts.append(f"127.0.1.{number} {name}")
        conf = _CONF.format(
            folder=folder,
            user=getpass.getuser(),
            port=port,
            port_of_all=port_of_all,
            nodes="\n".join(nodes),
            names=",".join(NODES),
            trainers=",".join(TRAINERS),
            generators=",".join(GENERATORS),
        )
        (folder / "slurm.conf").write_text(conf)
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        (folder / "gres.conf").write_text("")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": folder / "munge.sock"}
        files |= {name: folder / f"munged.{name}" for name in ("pid-file", "seed-file", "log-file")}
        # The folders above may be anyone's: the key is this test's own.
        munge = ["munged", "--foreground", "--force", *(f"--{k}={at}" for k, at in files.items())]
        for command in (munge, ["slurmctld", "-D", "-c", "-f", f"{folder}/slurm.conf"]):
            self._daemons.append(self._spawn(command[0], command))
        wait_until(lambda: "UP" in self.ask("scontrol", "ping", check=False), 60, "a controller")

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.out").open("ab") as log:
            return subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_nodes(self) -> None:
        """Start all virtual nodes and wait until jobs may run there."""
        for name in NODES:
            self.start_node(name)
        wait_until(lambda: set(NODES) <= self.idle(), 60, "idle nodes")

    def start_node(self, name: str) -> None:
        enter = ["unshare", "--mount", "--uts", "--", "sh", "-ec", _START_NODE, "sh"]
        node = self._nodes[name] = self._spawn(name, [*enter, str(self._folder), name])
        own = os.readlink("/proc/self/ns/uts")
        wait_until(lambda: _uts(node.pid) not in ("", own), 10, f"a namespace of {name}")
        self._homes[name] = _uts(node.pid)

    def ask(self, *command: str, check: bool = True) -> str:
        """Return what a Slurm command prints."""
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0 or not check, (command, result)
        return result.stdout.strip()

    def idle(self) -> set[str]:
        return set(self.ask("sinfo", "-hN", "-p", "nodes", "-t", "idle", "-o", "%N").split())

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING; also of one that has ended."""
        words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        return next(word for word in words if word.startswith("JobState=")).partition("=")[2]

    def processes(self, name: str) -> list[int]:
        """Return the processes of a node beside its slurmd."""
        found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        own = self._nodes[name].pid
        return [pid for pid in found if pid != own and _uts(pid) == self._homes[name]]

    def crash(self, name: str) -> None:
        """Kill a node: its slurmd, and all that it started, at once and without a word."""
        for pid in (self._nodes[name].pid, *self.processes(name)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._nodes[name].wait(timeout=10)

    def stop(self) -> None:
        """End everything that this cluster started."""
        self.ask("scancel", "--user", getpass.getuser(), check=False)
        with suppress(AssertionError):
            wait_until(lambda: not any(map(self.processes, self._nodes)), 20, "no tasks")
        for process in (*self._nodes.values(), *reversed(self._daemons)):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        left = [pid for name in self._nodes for pid in self.processes(name)]
        left += [
            each.pid for each in (*self._nodes.values(), *self._daemons) if each.poll() is None
        ]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes {left} were left over"


def _uts(pid: int) -> str:
    """Return the UTS namespace of a process; nothing where it is gone or a zombie."""
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return ""
