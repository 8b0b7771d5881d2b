"""Weights by shared memory between neighbours and forwarded among generators: real processes."""

from __future__ import annotations

import dataclasses
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.ddma.checksums import Verify
from megarl.ddma.engine import SyncState, WeightSync
from megarl.ddma.transports.collective import CollectiveTransport, Window
from megarl.ddma.transports.ipc import IpcTransport
from megarl.errors import ChannelError, ChannelTimeout, WeightSyncError
from megarl.world import timed_wait
from megatron_bridge.flows import Forwarding
from megatron_bridge.parallel import GeneratorLayout, Quantization, TrainerLayout
from megatron_bridge.plan import PlanPolicy
from tests.processes import run_ranks
from tests.unit.megatron_bridge.oracle import make_spec
from tests.weights import WeightCase, differing, spoil

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
SIZES = {"num_layers": 1, "hidden_size": 128, "ffn_size": 256, "num_heads": 4, "num_kv_heads": 2}
SPEC = make_spec(**SIZES, head_dim=64, vocab_size=100)
RING = PlanPolicy(
    forwarding=Forwarding.RING, forward_bytes=512, alone_bytes=2000, message_bytes=20_000
)
SPREAD = dataclasses.replace(RING, forwarding=Forwarding.SPREAD, message_bytes=5000)
SMALL = PlanPolicy(alone_bytes=2000, message_bytes=9000)
ALL = (frozenset(range(5)),)
HOSTS = (frozenset((0, 2)), frozenset((1, 3, 4)))  # one trainer on each


def _make_case(policy: PlanPolicy, **changes: Any) -> WeightCase:
    """Two trainer ranks and three generators; Megatron's tp cuts what vLLM holds whole."""
    values: dict[str, Any] = {
        "spec": SPEC,
        "trainer": TrainerLayout(tp=2, vocab_divisor=16),
        "generator": GeneratorLayout(replicas=3),
        "policy": policy,
    }
    return WeightCase(**{**values, **changes})


FP8 = GeneratorLayout(replicas=3, quantization=Quantization.FP8_BLOCK)
WAYS: dict[str, tuple[WeightCase, tuple[frozenset[int], ...]]] = {
    "one host": (_make_case(SMALL), ALL),
    "coalesced, bfloat16": (_make_case(PlanPolicy(), dtype="bfloat16"), ALL),
    "two hosts": (_make_case(SMALL, dtype="bfloat16"), HOSTS),
    "ring": (_make_case(RING), ALL),
    "spread over two hosts": (_make_case(SPREAD), HOSTS),
    "ring over two hosts": (_make_case(RING, dtype="bfloat16"), HOSTS),
    "fp8": (_make_case(SMALL, generator=FP8, dtype="bfloat16", is_exact=True), HOSTS),
    "sockets, ring": (_make_case(RING), ()),
    "sockets, spread": (_make_case(SPREAD, dtype="bfloat16"), ()),
}


def _group(rank: int, size: int, name: str) -> dist.ProcessGroup:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))


def _make_transport(
    group: dist.ProcessGroup, hosts: tuple[frozenset[int], ...], seconds: float = 60.0
) -> CollectiveTransport:
    window = Window(slots=2, chunk_bytes=40_000, max_messages=5)
    wait = timed_wait(seconds)
    for host in hosts:
        if group.rank() in host:
            near = host - {group.rank()}
            return IpcTransport(group, CPU, near, wait=wait, window=window)
    return CollectiveTransport(group, CPU, wait=wait, window=window)


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # of the listing itself
    return [path for path in found if "torch_" in path or "shm" in path]


def _shared_files() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


def _mapped() -> int:
    return sum("/dev/shm/torch_" in line for line in Path("/proc/self/maps").open())


def _sync(rank: int, group: dist.ProcessGroup, way: str) -> list[str]:
    """Return what is wrong after two transfers, seen by views made before everything."""
    case, hosts = WAYS[way]
    params = case.expected(rank, 0)
    views = {name: tensor.view(tensor.shape) for name, tensor in params.items()}
    if rank in case.generators:
        spoil(params)
    transport = _make_transport(group, hosts)
    sync = WeightSync(case.plan, rank, transport, params, verify=Verify.FULL)
    wrong: list[str] = []
    for version in (1, 2):
        new = case.expected(rank, version)
        if rank in case.trainers:
            for name, tensor in params.items():
                tensor.copy_(new[name])
            sync.send(version)
            if way == "sockets, ring":  # a trainer may train at once
                for tensor in params.values():
                    tensor.mul_(3)
        else:
            assert sync.receive() == version
            sync.require_clean()
            wrong += differing(views, new)
    sync.settle()
    if transport.staging_bytes > transport.window.limit_bytes:
        wrong.append(f"staging memory {transport.staging_bytes}")
    transport.close()
    return wrong


def _sync_all(rank: int, size: int) -> dict[str, list[str]]:
    found = {}
    for way in WAYS:
        found[way] = _sync(rank, _group(rank, size, way), way)
        found[f"left by {way}"] = [*_descriptors(), *_shared_files()]
        if _mapped():
            found[f"left by {way}"].append(f"{_mapped()} mappings")
    return found


@pytest.fixture(scope="module")
def syncs() -> list[dict[str, list[str]]]:
    return run_ranks(_sync_all, 5, timeout=300)


@pytest.mark.parametrize("way", WAYS)
def test_generators_equal_the_oracle_bit_for_bit_and_nothing_is_left(
    syncs: list[dict[str, list[str]]], way: str
) -> None:
    assert [seen[way] for seen in syncs] == [[]] * 5
    assert [seen[f"left by {way}"] for seen in syncs] == [[]] * 5


# --- A trainer that goes on -------------------------------------------------------------------


class _HeldBack(CollectiveTransport):
    """Takes what comes and then lets nobody see that it has arrived, until it is told."""

    framing = "CollectiveTransport"
    key, flips = "", False

    def agree(self, fault: bool) -> list[int]:
        _store().wait([self.key], timedelta(seconds=60))
        return super().agree(fault)

    def swap(self, outgoing: Any, incoming: Any, label: str) -> dict[int, torch.Tensor]:
        if label == "weight checksums" and self.flips:
            return {p: v + 1 for p, v in super().swap(outgoing, incoming, label).items()}
        return super().swap(outgoing, incoming, label)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _go_on(rank: int, size: int) -> list[str]:
    """Generator 4 waits for a word that trainer 0 gives only after its transfer has returned.

    In the second transfer generator 4 says that its weights are damaged.
    """
    case = _make_case(RING)
    params = case.expected(rank, 1)
    group, wait = _group(rank, size, "go on"), timed_wait(60.0)
    kind = _HeldBack if rank == 4 else CollectiveTransport
    transport = kind(group, CPU, wait=wait)
    sync = WeightSync(case.plan, rank, transport, params, verify=Verify.FULL)
    said: list[str] = []
    for version, flips in ((1, False), (2, True)):
        if isinstance(transport, _HeldBack):
            transport.key, transport.flips = f"returned {version}", flips
        if rank in case.trainers:
            sync.send(version)
            said.append(f"returned, version {sync.version}")
            if rank == 0:
                _store().set(f"returned {version}", "")
            try:
                sync.settle()
                said.append(f"settled, version {sync.version}")
            except WeightSyncError as error:
                said.append(str(error))
        else:
            try:
                sync.receive()
            except WeightSyncError as error:
                said.append(str(error))
            said.append(sync.state.value)
    return said


def test_a_trainer_goes_on_while_generators_forward_and_settles_later() -> None:
    results = run_ranks(_go_on, 5)
    for rank in (0, 1):
        damaged = f"weights of ranks [4] are damaged: nothing is committed on rank {rank}"
        assert results[rank][:2] == ["returned, version -1", "settled, version 1"]
        assert results[rank][2:] == ["returned, version 1", damaged]
    for rank in (2, 3, 4):
        assert results[rank][0] == SyncState.CLEAN.value
        assert results[rank][2] == SyncState.POISONED.value
    assert "differ on rank 4" in results[4][1]


# --- Peers that die ---------------------------------------------------------------------------


def _die_midway(transport: CollectiveTransport, index: int) -> None:
    if transport.rank == int(os.environ["VICTIM"]) and index >= len(transport._rounds) // 2:
        os.kill(os.getpid(), signal.SIGKILL)


class _DyingNeighbour(IpcTransport):
    """Its rank $VICTIM is killed when half of its rounds have been posted."""

    framing = "IpcTransport"

    def _start(self, index: int, current: Any) -> None:
        _die_midway(self, index)
        super()._start(index, current)


class _Dying(CollectiveTransport):
    framing = "CollectiveTransport"

    def _start(self, index: int, current: Any) -> None:
        _die_midway(self, index)
        super()._start(index, current)


def _transfer_and_die(rank: int, size: int, folder: str, way: str) -> str:
    victim = int(os.environ["VICTIM"])
    store = dist.FileStore(f"{folder}/{way}", size)
    group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    window = Window(chunk_bytes=9000, max_messages=3)
    if way == "ipc":
        near = frozenset(range(size)) - {rank}
        transport: CollectiveTransport = _DyingNeighbour(
            group, CPU, near, wait=timed_wait(8.0), window=window
        )
    else:
        transport = _Dying(group, CPU, wait=timed_wait(8.0), window=window)
    case = _make_case(SMALL)
    sync = WeightSync(case.plan, rank, transport, case.expected(rank, 1), verify=Verify.FULL)
    try:
        sync.send(1) if rank in case.trainers else sync.receive()
    except (ChannelError, ChannelTimeout) as error:
        # Stay connected until all have spoken: only the one that was killed is to be missed.
        store.set(f"spoken/{rank}", "")
        store.wait(
            [f"spoken/{other}" for other in range(size) if other != victim], timedelta(seconds=30)
        )
        return f"{sync.state.value}: {error}"
    return "no error"


def _outlive(rank: int, size: int, folder: str, way: str, victim: int) -> str:
    """Return what this rank saw; the victim is played by a child of its process, which is killed."""
    os.environ["VICTIM"] = str(victim)
    if rank != victim:
        return _transfer_and_die(rank, size, folder, way)
    child = os.fork()
    if child == 0:
        try:
            _transfer_and_die(rank, size, folder, way)
        finally:
            os._exit(3)
    return f"signal {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"


@pytest.mark.parametrize(("way", "victim"), [("ipc", 1), ("ipc", 3), ("sockets", 1)])
def test_a_rank_killed_while_bytes_flow_is_named_and_receivers_stay_poisoned(
    way: str, victim: int, tmp_path: Path
) -> None:
    results = run_ranks(_outlive, 5, str(tmp_path), way, victim, default_group=False)
    assert results[victim] == "signal -9"
    peers = (2, 3, 4) if victim == 1 else (0, 1)
    for rank in peers:
        assert f"rank {victim}" in results[rank], results[rank]
    for rank in {2, 3, 4} - {victim}:
        assert results[rank].startswith("poisoned: "), results[rank]
    assert "no error" not in results
