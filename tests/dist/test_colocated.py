"""Trainer and generators on the same ranks: two worlds in one process, weights from a rank to itself."""

import os
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.ddma.checksums import Verify
from megarl.ddma.engine import WeightSync
from megarl.ddma.transports.collective import CollectiveTransport
from megarl.ddma.transports.ipc import IpcTransport
from megarl.errors import WeightSyncError
from megarl.topology import GENERATOR, TRAINER, rl_topology
from megarl.world import Rendezvous, World, timed_wait
from megatron_bridge.flows import Forwarding
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.layouts.vllm import vllm_side
from megatron_bridge.parallel import GeneratorLayout, Quantization, TrainerLayout
from megatron_bridge.plan import PlanPolicy, TransferPlan, plan
from tests.processes import run_ranks
from tests.unit.megatron_bridge.oracle import make_spec
from tests.weights import WeightCase, differing, spoil

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
RING = PlanPolicy(forwarding=Forwarding.RING, alone_bytes=1, forward_bytes=1)
SPREAD = replace(RING, forwarding=Forwarding.SPREAD)

# Beside what a rank gives itself, each has something to give and to take.
CASES = {
    "tp2 -> 2 replicas": WeightCase(
        trainer=TrainerLayout(tp=2), generator=GeneratorLayout(replicas=2)
    ),
    "dp2 -> tp2": WeightCase(trainer=TrainerLayout(dp=2), generator=GeneratorLayout(tp=2)),
    "pp2 -> fp8": WeightCase(
        spec=make_spec(
            num_layers=2, hidden_size=128, ffn_size=256, num_heads=2, num_kv_heads=1, head_dim=128
        ),
        trainer=TrainerLayout(pp=2),
        generator=GeneratorLayout(replicas=2, quantization=Quantization.FP8_BLOCK),
    ),
    "ring": WeightCase(
        trainer=TrainerLayout(tp=2),
        generator=GeneratorLayout(replicas=2),
        policy=RING,
    ),
    "spread": WeightCase(
        trainer=TrainerLayout(dp=2),
        generator=GeneratorLayout(replicas=2),
        policy=SPREAD,
    ),
}


def _colocated(case: WeightCase) -> TransferPlan:
    source = megatron_side(case.spec, case.trainer)
    target = vllm_side(case.spec, case.generator, first_rank=0, dtype=case.dtype)
    return plan(source, target, case.policy)


def _group(rank: int, size: int, name: str) -> dist.ProcessGroup:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))


def _transfer_twice(case: WeightCase, rank: int, transport: CollectiveTransport) -> list[str]:
    """Return what differs from the oracle's generator after each of two transfers."""
    trainer, generator = case.expected(rank, 0), case.expected(rank + 2, 0)
    spoil(generator)
    sync = WeightSync(
        _colocated(case), rank, transport, {**trainer, **generator}, verify=Verify.FULL
    )
    wrong: list[str] = []
    for version in range(2):
        for name, tensor in case.expected(rank, version).items():
            trainer[name].copy_(tensor)
        sync.transfer(sync.handshake(version))
        sync.require_clean()
        wrong += differing(generator, case.expected(rank + 2, version))
        wrong += differing(trainer, case.expected(rank, version))
    transport.close()
    return wrong


def _disagree(rank: int, group: dist.ProcessGroup) -> str:
    case = CASES["tp2 -> 2 replicas"]
    params = {**case.expected(rank, 0), **case.expected(rank + 2, 0)}
    transport = CollectiveTransport(group, CPU, wait=timed_wait(30))
    with pytest.raises(WeightSyncError) as caught:
        WeightSync(_colocated(case), rank, transport, params).handshake(rank)
    return str(caught.value)


def _transfer_all(rank: int, size: int) -> dict[str, list[str] | str]:
    group, control = _group(rank, size, "weights"), _group(rank, size, "control")
    wait = timed_wait(30)
    seen: dict[str, list[str] | str] = {}
    for name, case in CASES.items():
        messages = CollectiveTransport(group, CPU, wait=wait, control=control)
        seen[f"{name}, collective"] = _transfer_twice(case, rank, messages)
        memory = IpcTransport(group, CPU, frozenset({1 - rank}), wait=wait, control=control)
        seen[f"{name}, ipc"] = _transfer_twice(case, rank, memory)
    seen["versions"] = _disagree(rank, control)
    return seen


@pytest.fixture(scope="module")
def transfers() -> list[dict]:
    """What each of the two ranks saw."""
    return run_ranks(_transfer_all, 2)


@pytest.mark.parametrize("way", ["collective", "ipc"])
@pytest.mark.parametrize("case", CASES)
def test_engines_on_the_trainers_ranks_get_its_weights(
    transfers: list[dict], case: str, way: str
) -> None:
    assert [seen[f"{case}, {way}"] for seen in transfers] == [[], []]


def test_ranks_that_are_both_must_offer_one_version(transfers: list[dict]) -> None:
    assert transfers[0]["versions"] == (
        "rank 0 is offered versions {0: 0, 1: 1} by rank, expected one"
    )


def _two_worlds(rank: int, size: int, port: int) -> list[tuple[int, ...]]:
    topology = rl_topology(TrainerLayout(dp=4), GeneratorLayout(tp=2, replicas=2), colocated=True)
    at = Rendezvous(
        rank=rank, host="127.0.0.1", port=port, is_store_host=False, timeout_seconds=30.0
    )
    world = World(topology, at)

    def look() -> tuple[int, ...]:
        """Return (size, rank, the environment's rank, the sum of global ranks) of this world."""
        total = torch.tensor([world.rank])
        dist.all_reduce(total)
        size, local = dist.get_world_size(), dist.get_rank()
        assert os.environ["WORLD_SIZE"] == str(size)
        return size, local, int(os.environ["RANK"]), int(total)

    seen = [look()]
    if len(world.places) == 2:
        with world.inside(GENERATOR):
            pair = dist.new_group([0, 1])  # as engines make them
            seen.append(look())
            with world.inside(TRAINER):
                seen.append(look())
            dist.broadcast(torch.zeros(1), src=1, group=pair)
            with pytest.raises(KeyError), world.inside(TRAINER):
                raise KeyError
            seen.append(look())
        seen.append(look())
    world.barrier("end")
    world.leave()
    return seen


def test_a_rank_of_both_has_two_default_groups_one_at_a_time() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seen = run_ranks(_two_worlds, 5, store.port, default_group=False, timeout=60)
    for rank in range(4):
        trainer = (4, rank, rank, 0 + 1 + 2 + 3)
        replica = (2, rank % 2, rank % 2, 2 * (rank // 2 * 2) + 1)
        assert seen[rank] == [trainer, replica, trainer, replica, trainer]
    assert seen[4] == [(1, 0, 0, 4)]
