"""Transfers into generators that hold FP8: the bits of quantising each whole parameter."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from megarl.ddma.checksums import Verify
from megarl.ddma.engine import SyncState, WeightSync
from megarl.ddma.transports.loopback import LoopbackHub, LoopbackTransport
from megarl.errors import WeightSyncError
from megatron_bridge.errors import PlanError
from megatron_bridge.flows import Forwarding
from megatron_bridge.parallel import GeneratorLayout, Quantization, TrainerLayout
from megatron_bridge.plan import PlanPolicy
from tests.unit.megatron_bridge.oracle import Tensors, make_spec
from tests.weights import WeightCase, differing, spoil

SIZES = {
    "num_layers": 1,
    "hidden_size": 256,
    "ffn_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 128,
    "vocab_size": 64,
}
DENSE = make_spec(**SIZES, qkv_bias=True)
CUT = make_spec(**{**SIZES, "ffn_size": 384})  # tp 2 of a trainer cuts its rows at 192
EXPERTS = make_spec(
    **SIZES, family="qwen3_moe", num_experts=4, experts_per_token=2, moe_ffn_size=128, qk_norm=True
)
TP2 = TrainerLayout(tp=2, vocab_divisor=16)
SEQUENCE_PARALLEL = TrainerLayout(tp=2, vocab_divisor=16, sequence_parallel=True)
SMALL = PlanPolicy(alone_bytes=1 << 10, message_bytes=40_000)


def _make_case(spec: object, how: Quantization, tp: int = 1, **changes: object) -> WeightCase:
    generator = GeneratorLayout(tp=tp, quantization=how)
    values = {"trainer": TP2, "policy": SMALL, "dtype": "bfloat16", "is_exact": True, **changes}
    return WeightCase(**{"spec": spec, "generator": generator, **values})  # type: ignore[arg-type]


BLOCK, TENSOR = Quantization.FP8_BLOCK, Quantization.FP8_TENSOR
CASES = {
    "blocks at the source": (_make_case(DENSE, BLOCK), {"block"}),
    "blocks on two ranks": (_make_case(DENSE, BLOCK, tp=2), {"block"}),
    "blocks at the target": (_make_case(CUT, BLOCK), {"block", "after_block"}),
    "experts": (_make_case(EXPERTS, BLOCK, trainer=SEQUENCE_PARALLEL), {"block"}),
    "tensor": (_make_case(DENSE, TENSOR), {"after_tensor"}),
    "tensor on two ranks": (_make_case(DENSE, TENSOR, tp=2), {"after_tensor"}),
    "forwarded blocks": (
        _make_case(
            DENSE,
            BLOCK,
            generator=GeneratorLayout(replicas=3, quantization=BLOCK),
            policy=PlanPolicy(
                forwarding=Forwarding.RING,
                forward_bytes=1 << 10,
                alone_bytes=1 << 10,
                message_bytes=40_000,
            ),
        ),
        {"block"},
    ),
}


class _FlippingHub(LoopbackHub):
    """Flips a bit of one message of rank 0, in every transfer."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks, timeout_seconds=5.0)
        self.target: tuple[int, int] | None = None  # which of rank 0's messages, which byte
        self.num_messages = 1
        self._count = 0

    def put(self, kind: str, source: int, target: int, tensor: Tensor) -> None:
        if kind == "weights" and source == 0:
            if self.target and self._count % self.num_messages == self.target[0]:
                tensor[self.target[1]] ^= 1
            self._count += 1
        super().put(kind, source, target, tensor)


class _World:
    def __init__(self, case: WeightCase, verify: Verify = Verify.FULL) -> None:
        self.case, self.verify = case, verify
        self.hub = _FlippingHub(case.size)
        self.params: dict[int, Tensors] = case.all_expected(1)
        self.expected = {r: {k: t.clone() for k, t in p.items()} for r, p in self.params.items()}
        for rank in case.generators:
            spoil(self.params[rank])
        self.syncs = {rank: self._make(rank) for rank in range(case.size)}

    def _make(self, rank: int) -> WeightSync:
        transport = LoopbackTransport(self.hub, rank)
        return WeightSync(self.case.plan, rank, transport, self.params[rank], verify=self.verify)

    def run(self) -> dict[int, BaseException | None]:
        def enter(rank: int) -> None:
            sync = self.syncs[rank]
            if rank in self.case.trainers:
                sync.send(1)
                sync.settle()
            else:
                sync.receive()

        with ThreadPoolExecutor(self.case.size) as pool:
            futures = {rank: pool.submit(enter, rank) for rank in self.syncs}
            return {rank: future.exception() for rank, future in futures.items()}


@pytest.mark.parametrize("verify", [Verify.FULL, Verify.SAMPLED])
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_the_bits_of_quantising_it_whole(name: str, verify: Verify) -> None:
    case, kinds = CASES[name]
    messages = [m for rank in case.trainers for m in case.plan.messages(rank)]
    assert {i.quantization for m in messages for i in m.items if i.quantization} == kinds
    world = _World(case, verify)
    for _ in range(2):
        assert not any(world.run().values())
        for rank in case.generators:
            assert differing(world.params[rank], world.expected[rank]) == []
            memory = world.syncs[rank]._transport.memory
            assert not memory._scratch  # freed with the last region
            spoil(world.params[rank])


@pytest.mark.parametrize("part", ["scales", "elements"])
@pytest.mark.parametrize("name", CASES)
def test_a_bit_flipped_in_elements_or_scales_is_named(name: str, part: str) -> None:
    world = _World(CASES[name][0])
    messages = [m for m in world.case.plan.messages(0) if m.source_rank == 0]
    kinds = ("block",) if part == "scales" else ("block", "after_block", "after_tensor")
    found = [(n, m) for n, m in enumerate(messages) if m.items[0].quantization in kinds]
    if not found:
        assert world.case.generator.quantization is TENSOR
        return  # its scale is made by the target, never sent
    number, message = found[len(found) // 2]
    world.hub.num_messages = len(messages)
    world.hub.target = (number, 3 if part == "scales" else message.items[0].nbytes - 3)
    raised = world.run()
    assert all(isinstance(error, WeightSyncError) for error in raised.values())
    assert message.items[0].tensor in str(raised[message.target_rank])
    for rank in world.case.generators:
        assert world.syncs[rank].state is SyncState.POISONED
    world.hub.target = None
    assert not any(world.run().values())
    for rank in world.case.generators:
        assert differing(world.params[rank], world.expected[rank]) == []


def test_quantised_parameters_without_their_scales_or_in_another_dtype_are_refused() -> None:
    case = CASES["blocks at the source"][0]
    name = "model.layers.0.mlp.down_proj.weight"
    world = _World(case)
    (rank,) = case.generators
    for wrong, words in (
        ({name: world.params[rank][name].bfloat16()}, r"is torch\.bfloat16, the plan brings"),
        ({f"{name}_scale_inv": torch.ones(1, 1)}, r"has shape \(1, 1\), expected \(2, 2\)"),
    ):
        params = {**world.params[rank], **wrong}
        with pytest.raises(WeightSyncError, match=words):
            WeightSync(case.plan, rank, LoopbackTransport(world.hub, rank), params)
    del world.params[rank][f"{name}_scale_inv"]
    with pytest.raises(WeightSyncError, match=f"has no parameter {name}_scale_inv"):
        world._make(rank)


def test_a_forwarding_plan_of_parameters_that_receivers_quantise_is_refused() -> None:
    for spec, how in ((DENSE, TENSOR), (CUT, BLOCK)):
        generator = GeneratorLayout(replicas=2, quantization=how)
        policy = PlanPolicy(forwarding=Forwarding.SPREAD)
        case = _make_case(spec, how, generator=generator, policy=policy)
        with pytest.raises(PlanError, match="cannot be forwarded"):
            case.plan.messages(0)
