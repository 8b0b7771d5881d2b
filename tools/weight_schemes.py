"""The contract of a scheme in the weight-transfer benchmark, and DDMA as one.

`ddma_scheme` is the only place of the benchmark that knows DDMA's API. Called by
`tools.weight_rank`; the schemes that DDMA is measured against are in `tools.weight_peers`.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ddma.checksums import Verify
from megarl.ddma.engine import WeightSync
from megarl.ddma.transports.collective import CollectiveTransport
from megarl.ddma.transports.ipc import IpcTransport
from megarl.world import Group, timed_wait
from megatron_bridge.cluster import Cluster
from megatron_bridge.cost import predict
from megatron_bridge.flows import Forwarding
from megatron_bridge.plan import PlanPolicy, plan
from megatron_bridge.spec import RankManifest
from tools.weight_cases import Case, Unavailable

_WAIT_SECONDS = 100.0
_CPU = torch.device("cpu")
# Measured once with this benchmark: what TCP and gloo reach of a shaped link; what copies of all
# cores at once reach of one core's alone; handshake, checksums and vote, for each rank.
_NIC_EFFICIENCY = 0.96
_COPY_EFFICIENCY = 0.7
_SYNC_SECONDS = 5e-3

Tensors = dict[str, Tensor]


class Scheme(ABC):
    """One way to move the trainer's weights into the generators; one object on each rank.

    `setup` once, then `run` any number of times.
    """

    target: RankManifest | None = None  # what `params` must hold afterwards; None on a trainer
    params: Tensors  # where this rank receives
    plan_seconds = 0.0  # part of `setup`
    sent_bytes = 0  # by this rank, in one run
    extra_bytes_bound: int | None = None  # what the scheme promises of its memory

    @abstractmethod
    def setup(self) -> None:
        """Make groups and plans; all ranks enter."""

    @abstractmethod
    def sync(self) -> None:
        """Move all weights once; all ranks enter."""

    def predict(self, nic_bytes_per_second: float, copy_bytes_per_second: float) -> float | None:
        """Return the seconds that a model of the scheme expects; None where there is none.

        Args:
            nic_bytes_per_second: of a host; 0 where all ranks share one.
            copy_bytes_per_second: of one core's memory copies, measured here.
        """
        return None

    def run(self) -> float:
        """Move all weights once; return the seconds between two barriers. All ranks enter."""
        dist.barrier()
        began = time.perf_counter()
        self.sync()
        dist.barrier()
        return time.perf_counter() - began


class _Ddma(Scheme):
    def __init__(
        self, case: Case, rank: int, params: Tensors, make: Callable[[], CollectiveTransport]
    ):
        self.params = params
        self._case, self._rank, self._make = case, rank, make
        self._version = 0
        self._is_trainer = rank in case.trainer_ranks
        if not self._is_trainer:
            self.target = case.target.manifest(rank)

    def setup(self) -> None:
        case = self._case
        seats = tuple((case.host_of(rank), 0) for rank in range(case.num_ranks))
        policy = PlanPolicy(
            forwarding=Forwarding.RING if case.forwarding else Forwarding.NONE,
            seats=seats if case.ranks_per_host > 1 else (),
        )
        began = time.perf_counter()
        transfer = plan(case.source, case.target, policy)
        self.plan_seconds = time.perf_counter() - began
        self._plan = transfer
        transport = self._make()
        self._sync = WeightSync(transfer, self._rank, transport, self.params, verify=Verify.SAMPLED)
        self.sent_bytes = transfer.load().sent[self._rank]
        self.extra_bytes_bound = transport.window.limit_bytes

    def predict(self, nic_bytes_per_second: float, copy_bytes_per_second: float) -> float:
        """Return the cost model's seconds on the machine at hand."""
        case, cores = self._case, os.cpu_count() or 1
        cluster = Cluster(
            ranks_per_host=case.ranks_per_host if nic_bytes_per_second else case.num_ranks,
            nic_bytes_per_second=nic_bytes_per_second or 1.0,
            nic_efficiency=_NIC_EFFICIENCY,
            local_bytes_per_second=copy_bytes_per_second,
            host_bytes_per_second=cores * copy_bytes_per_second * _COPY_EFFICIENCY,
            sync_seconds=case.num_ranks * _SYNC_SECONDS,
        )
        return predict(self._plan, self._plan.load(), cluster).seconds

    def sync(self) -> None:
        self._version += 1
        if self._is_trainer:
            self._sync.send(self._version)
        else:
            self._sync.receive()


def ddma_scheme(
    case: Case, rank: int, transport_name: str, params: Tensors, neighbours: frozenset[int]
) -> Scheme:
    """Return DDMA over one of its transports; all ranks enter.

    Args:
        transport_name: "collective" or "ipc".
        params: the trainer rank's weights, or where a generator rank receives.
        neighbours: the other ranks of this rank's host.

    Raises:
        Unavailable: the transport has no use in this case.
    """
    store = dist.PrefixStore(f"ddma/{transport_name}", dist.distributed_c10d._get_default_store())
    wait = timed_wait(_WAIT_SECONDS)

    def make() -> CollectiveTransport:
        group = cast(
            Group,
            dist.ProcessGroupGloo(store, rank, case.num_ranks, timedelta(seconds=_WAIT_SECONDS)),
        )
        if transport_name == "collective":
            return CollectiveTransport(group, _CPU, wait=wait)
        return IpcTransport(group, _CPU, neighbours, wait=wait)

    if transport_name == "ipc" and not neighbours:
        raise Unavailable("every rank has a host of its own: no memory to share")
    return _Ddma(case, rank, params, make)
