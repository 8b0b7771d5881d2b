"""DDMA over gloo: real processes, real sockets."""

import dataclasses
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.ddma.checksums import Verify
from megarl.ddma.engine import SyncState, WeightSync
from megarl.ddma.export import HfExport, export_hf
from megarl.ddma.transports.collective import CollectiveTransport, Window
from megarl.errors import ChannelError, ChannelTimeout, WeightSyncError
from megarl.world import timed_wait
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.plan import PlanPolicy
from tests.processes import run_ranks
from tests.unit.megatron_bridge.oracle import make_spec, megatron_tensors
from tests.weights import WeightCase, differing

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
SPEC = make_spec(num_layers=2, qkv_bias=True, tied_embeddings=True)
# Every generator rank talks to both trainer ranks.
CASE = WeightCase(
    spec=SPEC,
    trainer=TrainerLayout(pp=2, vocab_divisor=16),
    generator=GeneratorLayout(tp=2),
)


def _group(rank: int, size: int, name: str = "global") -> dist.ProcessGroup:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))


@dataclass(frozen=True, kw_only=True)
class _Way:
    dtype: str = "float32"
    policy: PlanPolicy = field(default_factory=PlanPolicy)
    window: Window = field(default_factory=Window)
    verify: Verify = Verify.FULL


WAYS = {
    "float32": _Way(),
    "bfloat16": _Way(dtype="bfloat16", verify=Verify.SAMPLED),
    # Many rounds, every region its own message: in place where contiguous, else staged.
    "many rounds": _Way(
        policy=PlanPolicy(alone_bytes=1), window=Window(chunk_bytes=2048, max_messages=7)
    ),
    "one at a time": _Way(
        policy=PlanPolicy(alone_bytes=1, message_bytes=200),
        window=Window(slots=1, chunk_bytes=256),
        verify=Verify.NONE,
    ),
}


def _sync_three_versions(
    rank: int, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], way: _Way
) -> list[str]:
    """Return what differs from the trainers' weights after each of three transfers."""
    case = dataclasses.replace(CASE, dtype=way.dtype, policy=way.policy)
    transport = CollectiveTransport(
        groups[0], CPU, wait=timed_wait(30), window=way.window, control=groups[1]
    )
    trainer = rank in case.trainers
    params = case.expected(rank, 0)
    if not trainer:
        for tensor in params.values():
            tensor.fill_(-7)
    addresses = {name: tensor.data_ptr() for name, tensor in params.items()}
    sync = WeightSync(case.plan, rank, transport, params, verify=way.verify)
    wrong: list[str] = []
    for version in range(3):
        if trainer:
            new = case.expected(rank, version)
            for name, tensor in params.items():
                tensor.copy_(new[name])
            sync.send(version)
        else:
            assert sync.receive() == version
            sync.require_clean()
            wrong += differing(params, case.expected(rank, version))
    assert addresses == {name: tensor.data_ptr() for name, tensor in params.items()}
    assert transport.staging_bytes <= way.window.limit_bytes
    transport.close()
    return wrong


def _sync_with_another_plan(rank: int, group: dist.ProcessGroup) -> str:
    policy = PlanPolicy(message_bytes=100) if rank in CASE.generators else CASE.policy
    whole = dataclasses.replace(CASE, policy=policy).plan
    transport = CollectiveTransport(group, CPU, wait=timed_wait(30))
    sync = WeightSync(whole, rank, transport, CASE.expected(rank, 0))
    with pytest.raises(WeightSyncError) as caught:
        _enter(sync, rank)
    assert sync.state is SyncState.EMPTY
    return str(caught.value)


def _enter(sync: WeightSync, rank: int) -> None:
    if rank in CASE.trainers:
        sync.send(1)
    else:
        sync.receive()


def _sync_all_ways(rank: int, size: int) -> dict[str, list[str] | str]:
    groups = (_group(rank, size), _group(rank, size, "control"))
    results: dict[str, list[str] | str] = {
        name: _sync_three_versions(rank, groups, way) for name, way in WAYS.items()
    }
    results["another plan"] = _sync_with_another_plan(rank, groups[0])
    return results


@pytest.fixture(scope="module")
def syncs() -> list[dict]:
    """What each of the four ranks saw."""
    return run_ranks(_sync_all_ways, 4)


@pytest.mark.parametrize("way", WAYS)
def test_poisoned_generators_equal_the_trainers_after_each_sync(
    syncs: list[dict], way: str
) -> None:
    assert [seen[way] for seen in syncs] == [[], [], [], []]


def test_a_digest_mismatch_is_an_error_on_both_sides(syncs: list[dict]) -> None:
    for rank, seen in enumerate(syncs):
        assert f"plan digest of rank {rank} is" in seen["another plan"]


def _say(what: str, rank: int) -> None:
    dist.distributed_c10d._get_default_store().set(f"{what}/{rank}", "")


def _hear(what: str, ranks: range) -> None:
    keys = [f"{what}/{rank}" for rank in ranks]
    dist.distributed_c10d._get_default_store().wait(keys, timedelta(seconds=60))


def _sync_with_an_absent_receiver(rank: int, size: int) -> tuple[str, float]:
    """Rank 3 joins the group and then does not come."""
    transport = CollectiveTransport(_group(rank, size), CPU, wait=timed_wait(2))
    params = CASE.expected(rank, 0)
    sync = WeightSync(CASE.plan, rank, transport, params)
    if rank == 3:
        _hear("over", range(3))  # stays connected: what the others see is silence
        return "", 0.0
    began = time.monotonic()
    with pytest.raises((ChannelTimeout, ChannelError)) as caught:
        _enter(sync, rank)
    seconds = time.monotonic() - began
    assert sync.state is not SyncState.CLEAN
    _say("over", rank)
    return f"{caught.type.__name__}: {caught.value}", seconds


def test_an_absent_receiver_is_a_named_timeout_not_a_hang() -> None:
    results = run_ranks(_sync_with_an_absent_receiver, 4)[:2]
    for message, seconds in results:
        assert message.startswith("ChannelTimeout: weight handshake with ranks 2, 3 for "), message
        assert "weight handshake from rank 3: " in message
        assert 2 <= seconds < 20


def _die_after_the_handshake(rank: int, size: int) -> tuple[str, str]:
    transport = CollectiveTransport(_group(rank, size), CPU, wait=timed_wait(5))
    params = CASE.expected(rank, 0)
    sync = WeightSync(CASE.plan, rank, transport, params)
    sync.handshake(4 if rank < 2 else None)
    _say("shaken", rank)
    if rank == 0:
        _hear("shaken", range(4))
        return "", ""  # the process ends here and its sockets close
    try:
        sync.transfer(4)
    except (ChannelError, ChannelTimeout) as error:
        return str(error), sync.state.value
    return "no error", sync.state.value


def test_a_sender_that_dies_midway_leaves_receivers_poisoned() -> None:
    results = run_ranks(_die_after_the_handshake, 4)
    for message, state in results[2:]:
        assert "from rank 0" in message
        assert state == SyncState.POISONED.value


EXPORT_LAYOUT = TrainerLayout(tp=2, pp=2, vocab_divisor=16)


def _export(rank: int, size: int, layout: TrainerLayout, source: str, target: str) -> None:
    whole = load_file(f"{source}/model.safetensors")
    stages = [[0, 1]] if layout.pp == 1 else [[0], [1]]
    params = megatron_tensors(SPEC, whole, layout, stages, padding=9)[rank]
    export = HfExport(
        spec=SPEC,
        side=megatron_side(SPEC, layout),
        dtype=torch.float32,
        source_folder=Path(source),
        target_folder=Path(target),
        max_shard_bytes=20_000,
    )
    group = _group(rank, size) if size > 1 else None
    export_hf(export, params, group, timed_wait(20))


@pytest.mark.parametrize("layout", [TrainerLayout(), EXPORT_LAYOUT], ids=["1 rank", "4 ranks"])
def test_an_exported_folder_holds_the_source_tensors(layout: TrainerLayout, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "config.json").write_text("{}")
    whole = CASE.whole(0)
    save_file(whole, source / "model.safetensors")
    if layout.world_size == 1:
        _export(0, 1, layout, str(source), str(target))
    else:
        run_ranks(_export, layout.world_size, layout, str(source), str(target))
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 1
    got = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert differing(got, whole) == []
    assert (target / "config.json").read_text() == "{}"
