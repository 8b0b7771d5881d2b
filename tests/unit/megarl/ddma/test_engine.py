"""The transfer protocol on loopback: handshake, state, checksums, commit."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config

from megarl.contract import first_difference
from megarl.ddma.checksums import Verify
from megarl.ddma.engine import SyncState, WeightSync
from megarl.ddma.transports.loopback import LoopbackHub, LoopbackTransport
from megarl.errors import ChannelTimeout, WeightSyncError
from megatron_bridge.operations import Message
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.plan import plan
from tests.weights import WeightCase, differing

# Every generator rank talks to two trainer ranks.
CASE = WeightCase(trainer=TrainerLayout(tp=4, vocab_divisor=16), generator=GeneratorLayout(tp=2))
TRAINERS, GENERATORS = CASE.trainers, CASE.generators


class _FlippingTransport(LoopbackTransport):
    """Loses one bit of what arrives in one parameter: a fault of the wire."""

    faults = 99  # transfers that have one
    framing = "LoopbackTransport"

    def wait(self) -> None:
        super().wait()
        if self.faults and self._is_last:
            self.faults -= 1
            self.memory.params["model.norm.weight"].view(torch.int32)[3] ^= 1

    def begin(self) -> None:
        super().begin()
        self._is_last = False

    def post(self, messages: list[Message]) -> None:
        super().post(messages)
        self._is_last = True


class _FlippingOnce(_FlippingTransport):
    faults = 1


class _World:
    """All ranks of a transfer in threads of this process."""

    def __init__(self, verify: Verify = Verify.FULL, source_dtype: torch.dtype = torch.float32):
        self.expected = CASE.all_expected(7)
        self.ranks = CASE.all_expected(7)
        for rank in TRAINERS:
            self.ranks[rank] = {k: v.to(source_dtype) for k, v in self.ranks[rank].items()}
        for rank in GENERATORS:
            for tensor in self.ranks[rank].values():
                tensor.fill_(torch.nan)
        self.plans = dict.fromkeys(self.ranks, CASE.plan)
        self.transport_of = dict.fromkeys(self.ranks, LoopbackTransport)
        self.versions = dict.fromkeys(TRAINERS, 7)
        self.hub = LoopbackHub(len(self.ranks), timeout_seconds=2.0)
        self.verify = verify
        self.syncs: dict[int, WeightSync] = {}

    def make(self, rank: int) -> WeightSync:
        transport = self.transport_of[rank](self.hub, rank)
        return WeightSync(self.plans[rank], rank, transport, self.ranks[rank], verify=self.verify)

    def require_equal(self) -> None:
        for rank in GENERATORS:
            self.syncs[rank].require_clean()
            assert self.syncs[rank].version == 7
            assert differing(self.ranks[rank], self.expected[rank]) == []

    def require_untouched(self) -> None:
        for rank in GENERATORS:
            assert self.syncs[rank].state is SyncState.EMPTY
            assert all(tensor.isnan().all() for tensor in self.ranks[rank].values())
            with pytest.raises(WeightSyncError, match="holds empty weights"):
                self.syncs[rank].require_clean()

    def run(self) -> dict[int, BaseException | None]:
        """Transfer once; return what each rank raised."""
        self.syncs = self.syncs or {rank: self.make(rank) for rank in self.ranks}

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
    world.require_equal()


@pytest.mark.parametrize("verify", [Verify.SAMPLED, Verify.FULL])
def test_a_bit_flipped_in_both_attempts_is_named_and_nobody_commits(verify: Verify) -> None:
    world = _World(verify)
    world.transport_of[5] = _FlippingTransport
    raised = world.run()
    assert all(isinstance(error, WeightSyncError) for error in raised.values())
    assert "on rank 5, the first in model.norm.weight" in str(raised[5])
    for rank in set(world.ranks) - {5}:
        assert f"weights of ranks [5] are damaged: nothing is committed on rank {rank}" in str(
            raised[rank]
        )
    for rank in GENERATORS:
        assert world.syncs[rank].state is SyncState.POISONED
        assert world.syncs[rank].version == -1
        with pytest.raises(WeightSyncError, match=f"rank {rank} holds poisoned weights"):
            world.syncs[rank].require_clean()
    world.syncs[5]._transport.faults = 0  # type: ignore[attr-defined]
    assert not any(world.run().values())
    world.require_equal()


@pytest.mark.parametrize("verify", [Verify.SAMPLED, Verify.FULL])
def test_a_bit_flipped_once_is_sent_again(verify: Verify) -> None:
    world = _World(verify)
    world.transport_of[5] = _FlippingOnce
    assert not any(world.run().values())
    world.require_equal()


def test_without_verification_a_flipped_bit_passes() -> None:
    world = _World(Verify.NONE)
    world.transport_of[5] = _FlippingTransport
    assert not any(world.run().values())
    with pytest.raises(AssertionError):
        world.require_equal()


def test_another_plan_is_refused_on_both_sides_before_the_first_byte() -> None:
    """Other sides (of a trainer in another dtype), and the same sides cut otherwise."""
    source = dataclasses.replace(CASE.plan.source, dtype="float16")
    policy = dataclasses.replace(CASE.policy, message_bytes=100)
    for other, word in (
        (dataclasses.replace(CASE.plan, source=source), "manifests"),
        (dataclasses.replace(CASE, policy=policy).plan, "plan"),
    ):
        world = _World()
        world.plans |= dict.fromkeys(GENERATORS, other)
        raised = world.run()
        assert all(isinstance(error, WeightSyncError) for error in raised.values())
        for rank in world.ranks:
            assert f"{word} digest of rank {rank} is" in str(raised[rank])
        world.require_untouched()


def test_other_messages_under_an_equal_plan_digest_are_refused() -> None:
    """A planner that is not the same program: rank 4 expects the biases of k and v exchanged."""
    world = _World()
    theirs = plan(CASE.plan.source, CASE.plan.target, CASE.policy)
    names = {"self_attn.k_proj.bias": "self_attn.v_proj.bias"}
    names |= {new: old for old, new in names.items()}
    for route in theirs.routes:
        for index, part in enumerate(route.parts):
            regions = tuple(
                dataclasses.replace(r, tensor=names.get(r.tensor, r.tensor)) for r in part.regions
            )
            route.parts[index] = dataclasses.replace(part, regions=regions)
    assert theirs.digest == CASE.plan.digest
    world.plans[4] = theirs
    raised = world.run()
    assert "messages digest of rank 4 is" in str(raised[4])
    senders = {
        message.source_rank
        for message in CASE.plan.messages(4)
        if any(item.tensor.endswith("k_proj.bias") for item in message.items)
    }
    assert senders
    for rank in senders:
        assert f"messages digest of rank {rank} is" in str(raised[rank])
    assert world.syncs[4].state is SyncState.EMPTY
    assert all(isinstance(error, WeightSyncError | ChannelTimeout) for error in raised.values())
    with pytest.raises(WeightSyncError):
        world.syncs[5].require_clean()


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
    for rank, name in ((4, "model.norm.weight"), (0, "decoder.final_layernorm.weight")):
        for size in (5, 17):
            world = _World()
            norm = world.ranks[rank][name]
            world.ranks[rank][name] = norm.new_zeros(size)
            words = rf"{name} of rank {rank} has shape \({size},\), expected \(16,\)"
            with pytest.raises(WeightSyncError, match=words):
                world.make(rank)
        del world.ranks[rank][name]
        with pytest.raises(WeightSyncError, match=f"rank {rank} has no parameter {name}"):
            world.make(rank)
    world = _World()
    world.ranks[4]["model.norm.weight"] = world.ranks[4]["model.norm.weight"].bfloat16()
    with pytest.raises(
        WeightSyncError, match=r"is torch\.bfloat16, the plan brings torch\.float32"
    ):
        world.make(4)


def test_names_exchanged_on_one_side_pass_the_transfer_but_not_the_comparison_with_the_folder(
    tmp_path: Path,
) -> None:
    """What is sent arrives; only equality with the checkpoint can tell that it has another name."""
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=4,
    )
    config.save_pretrained(tmp_path)
    save_file(CASE.whole(7), tmp_path / "model.safetensors")
    names = [
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
    ]
    for is_swapped in (False, True):
        world = _World()
        for rank in TRAINERS if is_swapped else ():
            first, second = (world.ranks[rank][name] for name in names)
            world.ranks[rank] |= {names[0]: second, names[1]: first}
        assert not any(world.run().values())
        for rank in GENERATORS:
            manifest = CASE.plan.target.manifest(rank)
            found = first_difference(tmp_path, manifest, world.ranks[rank], torch.float32)
            assert (found is not None) == is_swapped
            if found:
                assert "model.layers.1.input_layernorm.weight[0]" in found
