"""The transfer protocol on loopback: handshake, state, checksums, commit."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megarl.ddma.checksums import Verify
from megarl.ddma.engine import SyncState, WeightSync
from megarl.ddma.transports import LoopbackHub, LoopbackTransport
from megarl.errors import ChannelTimeout, WeightSyncError
from megatron_bridge.layouts.megatron import megatron_manifest
from megatron_bridge.layouts.vllm import vllm_manifest
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.plan import TransferPlan, plan
from tests.unit.megatron_bridge.oracle import (
    Tensors,
    hf_tensors,
    make_spec,
    megatron_tensors,
    vllm_tensors,
)

SPEC = make_spec(num_layers=2, qkv_bias=True)
# Every generator rank talks to two trainer ranks.
LAYOUT = TrainerLayout(tp=4, vocab_divisor=16)
TRAINERS, GENERATORS = range(4), range(4, 6)


def _make_plan() -> TransferPlan:
    source = [megatron_manifest(SPEC, LAYOUT, rank) for rank in TRAINERS]
    target = [vllm_manifest(SPEC, 2, rank - 4, global_rank=rank) for rank in GENERATORS]
    return plan(source, target)


def _make_ranks(dtype: torch.dtype) -> dict[int, Tensors]:
    whole = {name: tensor.sin() for name, tensor in hf_tensors(SPEC, torch.float64).items()}
    whole = {name: tensor.to(dtype) for name, tensor in whole.items()}
    ranks = megatron_tensors(SPEC, whole, LAYOUT, [[0, 1]])
    return ranks | {rank: vllm_tensors(SPEC, whole, 2, rank - 4) for rank in GENERATORS}


class _FlippingTransport(LoopbackTransport):
    """Loses one bit of what arrives in one parameter: a fault of the wire."""

    def wait(self) -> None:
        super().wait()
        self._tensors["model.norm.weight"].view(torch.int32)[3] ^= 1


class _World:
    """All ranks of a transfer in threads of this process."""

    def __init__(self, verify: Verify = Verify.FULL, source_dtype: torch.dtype = torch.float32):
        self.expected = _make_ranks(torch.float32)
        self.ranks = _make_ranks(torch.float32)
        for rank in TRAINERS:
            self.ranks[rank] = {k: v.to(source_dtype) for k, v in self.ranks[rank].items()}
        for rank in GENERATORS:
            for tensor in self.ranks[rank].values():
                tensor.fill_(torch.nan)
        self.plans = dict.fromkeys(self.ranks, _make_plan())
        self.transport_of = dict.fromkeys(self.ranks, LoopbackTransport)
        self.versions = dict.fromkeys(TRAINERS, 7)
        self.hub = LoopbackHub(timeout_seconds=2.0)
        self.verify = verify
        self.syncs: dict[int, WeightSync] = {}

    def make(self, rank: int) -> WeightSync:
        transport = self.transport_of[rank](self.hub, rank, torch.float32)
        return WeightSync(self.plans[rank], rank, transport, self.ranks[rank], verify=self.verify)

    def run(self) -> dict[int, BaseException | None]:
        """Transfer once; return what each rank raised."""
        self.syncs = {rank: self.make(rank) for rank in self.ranks}

        def enter(rank: int) -> None:
            if rank in TRAINERS:
                self.syncs[rank].send(self.versions[rank])
            else:
                assert self.syncs[rank].receive() == 7

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            futures = {rank: pool.submit(enter, rank) for rank in self.ranks}
            return {rank: future.exception() for rank, future in futures.items()}


@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.float64])
def test_a_transfer_commits_the_version_and_equals_gather_and_slice(
    verify: Verify, source_dtype: torch.dtype
) -> None:
    world = _World(verify, source_dtype)
    assert not any(world.run().values())
    for rank in GENERATORS:
        world.syncs[rank].require_clean()
        assert world.syncs[rank].version == 7
        for name, tensor in world.expected[rank].items():
            got = world.ranks[rank][name]
            assert torch.equal(got, tensor), name  # the oracle's padding is zero


@pytest.mark.parametrize("verify", [Verify.SAMPLED, Verify.FULL])
def test_a_flipped_bit_poisons_the_receiver_and_is_named(verify: Verify) -> None:
    world = _World(verify)
    world.transport_of[5] = _FlippingTransport
    raised = world.run()
    assert {rank for rank, error in raised.items() if error} == {5}
    assert isinstance(raised[5], WeightSyncError)
    assert "on rank 5, the first in model.norm.weight" in str(raised[5])
    assert world.syncs[5].state is SyncState.POISONED
    with pytest.raises(WeightSyncError, match="rank 5 holds poisoned weights"):
        world.syncs[5].require_clean()
    world.syncs[4].require_clean()


def test_without_verification_a_flipped_bit_passes() -> None:
    world = _World(Verify.NONE)
    world.transport_of[5] = _FlippingTransport
    assert not any(world.run().values())


@pytest.mark.parametrize(("field", "word"), [("manifests_digest", "manifests"), ("digest", "plan")])
def test_other_digests_are_refused_on_both_sides_before_the_first_byte(
    field: str, word: str
) -> None:
    world = _World()
    changed = dataclasses.replace(world.plans[4], **{field: "f" * 64})
    for rank in GENERATORS:
        world.plans[rank] = changed
    raised = world.run()
    assert all(isinstance(error, WeightSyncError) for error in raised.values())
    mine = getattr(changed, field)[:15]
    for rank in world.ranks:
        assert f"{word} digest of rank {rank} is" in str(raised[rank])
        assert mine in str(raised[rank])
    for rank in GENERATORS:
        assert world.syncs[rank].state is SyncState.EMPTY
        assert world.ranks[rank]["model.norm.weight"].isnan().all()
        with pytest.raises(WeightSyncError, match="holds empty weights"):
            world.syncs[rank].require_clean()


def test_other_settings_are_refused() -> None:
    world = _World()
    syncs = {rank: world.make(rank) for rank in TRAINERS}
    world.verify = Verify.NONE
    syncs |= {rank: world.make(rank) for rank in GENERATORS}
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(syncs[r].handshake, 1 if r < 4 else None) for r in world.ranks]
        errors = [future.exception() for future in futures]
    assert all("settings digest" in str(error) for error in errors)


def test_trainers_that_offer_two_versions_are_refused() -> None:
    world = _World()
    world.versions[1] = 8
    raised = world.run()
    failed = {rank: error for rank, error in raised.items() if isinstance(error, WeightSyncError)}
    assert any("is offered versions" in str(error) for error in failed.values())
    assert set(failed) <= set(GENERATORS)


def test_an_absent_peer_ends_in_a_timeout_and_a_second_transfer_that_dies_poisons() -> None:
    world = _World()
    assert not any(world.run().values())
    world.hub.timeout_seconds = 0.1
    with pytest.raises(ChannelTimeout, match="rank 4 waits for control of rank"):
        world.syncs[4].receive()
    world.syncs[4].require_clean()  # nothing was written yet
    with pytest.raises(ChannelTimeout, match="rank 4 waits for weights of rank"):
        world.syncs[4].transfer(8)
    assert world.syncs[4].state is SyncState.POISONED
    assert world.syncs[4].version == 7


def test_parameters_that_do_not_hold_the_plan_are_refused() -> None:
    world = _World()
    norm = world.ranks[4]["model.norm.weight"]
    world.ranks[4]["model.norm.weight"] = norm[:5]
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight of rank 4 has shape \(5,\)"):
        world.make(4)
    world.ranks[4]["model.norm.weight"] = norm.bfloat16()
    with pytest.raises(
        WeightSyncError, match=r"is torch\.bfloat16, the wire carries torch\.float32"
    ):
        world.make(4)
    del world.ranks[4]["model.norm.weight"]
    with pytest.raises(WeightSyncError, match=r"rank 4 has no parameter model\.norm\.weight"):
        world.make(4)
