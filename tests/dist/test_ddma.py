"""DDMA over gloo: real processes, real sockets."""

import dataclasses
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.ddma.checksums import Verify
from megarl.ddma.engine import SyncState, WeightSync
from megarl.ddma.export import HfExport, export_hf
from megarl.ddma.transports import CollectiveTransport
from megarl.world import timed_wait
from megarl.errors import ChannelError, ChannelTimeout, WeightSyncError
from megatron_bridge.layouts.megatron import megatron_manifest
from megatron_bridge.layouts.vllm import vllm_manifest
from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.plan import TransferPlan, plan
from megatron_bridge.spec import ModelSpec
from tests.processes import run_ranks
from tests.unit.megatron_bridge.oracle import (
    Tensors,
    hf_tensors,
    make_spec,
    megatron_tensors,
    vllm_tensors,
)

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
# Every generator rank talks to both trainer ranks.
LAYOUT = TrainerLayout(pp=2, vocab_divisor=16)
SPEC = make_spec(num_layers=2, qkv_bias=True, tied_embeddings=True)


def _group(rank: int, size: int) -> dist.ProcessGroup:
    store = dist.PrefixStore("global", dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))


def _make_plan(spec: ModelSpec) -> TransferPlan:
    """Trainer pp 2 on ranks 0 and 1, generator tp 2 on ranks 2 and 3."""
    source = [megatron_manifest(spec, LAYOUT, rank) for rank in range(2)]
    target = [vllm_manifest(spec, 2, rank, global_rank=2 + rank) for rank in range(2)]
    return plan(source, target)


def _whole(spec: ModelSpec, version: int, dtype: torch.dtype) -> Tensors:
    tensors = hf_tensors(spec, torch.float64)
    return {name: (tensor + version).sin().to(dtype) for name, tensor in tensors.items()}


def _make_params(spec: ModelSpec, rank: int, version: int, dtype: torch.dtype) -> Tensors:
    whole = _whole(spec, version, dtype)
    if rank < 2:
        return megatron_tensors(spec, whole, LAYOUT, [[0], [1]])[rank]
    return vllm_tensors(spec, whole, 2, rank - 2)


def _differing(got: Tensors, expected: Tensors) -> list[str]:
    """Names that differ bitwise, zero padding included."""
    assert got.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)]


@dataclass(frozen=True, kw_only=True)
class _Case:
    wire: torch.dtype = torch.float32
    round_bytes: int = 64 << 20
    coalesce_bytes: int = 1 << 18


CASES = {
    "float32": _Case(),
    "bfloat16": _Case(wire=torch.bfloat16),
    # Many rounds, every region its own message: in place where contiguous, else staged.
    "many rounds": _Case(round_bytes=2048, coalesce_bytes=1),
}


def _sync_three_versions(rank: int, group: dist.ProcessGroup, case: _Case) -> list[str]:
    """Return what differs from the trainers' weights after each of three transfers."""
    transport = CollectiveTransport(
        group, case.wire, CPU, wait=timed_wait(30), coalesce_bytes=case.coalesce_bytes
    )
    trainer = rank < 2
    params = _make_params(SPEC, rank, 0, torch.float32 if trainer else case.wire)
    if not trainer:
        for tensor in params.values():
            tensor.fill_(-7)
    addresses = {name: tensor.data_ptr() for name, tensor in params.items()}
    sync = WeightSync(
        _make_plan(SPEC), rank, transport, params, verify=Verify.FULL, round_bytes=case.round_bytes
    )
    differing: list[str] = []
    for version in range(3):
        if trainer:
            new = _make_params(SPEC, rank, version, torch.float32)
            for name, tensor in params.items():
                tensor.copy_(new[name])
            sync.send(version)
        else:
            assert sync.receive() == version
            sync.require_clean()
            differing += _differing(params, _make_params(SPEC, rank, version, case.wire))
    assert addresses == {name: tensor.data_ptr() for name, tensor in params.items()}
    transport.close()
    return differing


def _sync_with_another_plan(rank: int, group: dist.ProcessGroup) -> str:
    whole = _make_plan(SPEC)
    if rank >= 2:
        whole = dataclasses.replace(whole, digest="0" * 64)
    transport = CollectiveTransport(group, torch.float32, CPU, wait=timed_wait(30))
    sync = WeightSync(whole, rank, transport, _make_params(SPEC, rank, 0, torch.float32))
    with pytest.raises(WeightSyncError) as caught:
        _enter(sync, rank)
    assert sync.state is SyncState.EMPTY
    return str(caught.value)


def _enter(sync: WeightSync, rank: int) -> None:
    if rank < 2:
        sync.send(1)
    else:
        sync.receive()


def _sync_all_cases(rank: int, size: int) -> dict[str, list[str] | str]:
    group = _group(rank, size)
    results: dict[str, list[str] | str] = {
        name: _sync_three_versions(rank, group, case) for name, case in CASES.items()
    }
    results["another plan"] = _sync_with_another_plan(rank, group)
    return results


@pytest.fixture(scope="module")
def syncs() -> list[dict]:
    """What each of the four ranks saw."""
    return run_ranks(_sync_all_cases, 4)


@pytest.mark.parametrize("case", CASES)
def test_poisoned_generators_equal_the_trainers_after_each_sync(
    syncs: list[dict], case: str
) -> None:
    assert [seen[case] for seen in syncs] == [[], [], [], []]


def test_a_digest_mismatch_is_an_error_on_both_sides(syncs: list[dict]) -> None:
    digest = _make_plan(SPEC).digest[:15]
    for rank, seen in enumerate(syncs):
        message = seen["another plan"]
        assert f"plan digest of rank {rank} is" in message
        assert digest in message
        assert "000000000000000" in message


def _say(what: str, rank: int) -> None:
    dist.distributed_c10d._get_default_store().set(f"{what}/{rank}", "")


def _hear(what: str, ranks: range) -> None:
    keys = [f"{what}/{rank}" for rank in ranks]
    dist.distributed_c10d._get_default_store().wait(keys, timedelta(seconds=60))


def _sync_with_an_absent_receiver(rank: int, size: int) -> tuple[str, float]:
    """Rank 3 joins the group and then does not come."""
    transport = CollectiveTransport(_group(rank, size), torch.float32, CPU, wait=timed_wait(2))
    params = _make_params(SPEC, rank, 0, torch.float32)
    sync = WeightSync(_make_plan(SPEC), rank, transport, params)
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
    transport = CollectiveTransport(_group(rank, size), torch.float32, CPU, wait=timed_wait(5))
    params = _make_params(SPEC, rank, 0, torch.float32)
    sync = WeightSync(_make_plan(SPEC), rank, transport, params)
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
        manifests=tuple(megatron_manifest(SPEC, layout, r) for r in range(size)),
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
    whole = {k: v.contiguous() for k, v in _whole(SPEC, 0, torch.float32).items()}
    save_file(whole, source / "model.safetensors")
    if layout.world_size == 1:
        _export(0, 1, layout, str(source), str(target))
    else:
        run_ranks(_export, layout.world_size, layout, str(source), str(target))
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 1
    got = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert _differing(got, whole) == []
    assert (target / "config.json").read_text() == "{}"
