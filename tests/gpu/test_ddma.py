"""DDMA on GPUs: into a neighbour's memory by CUDA IPC, and between devices by NCCL.

One trainer rank and one generator rank in processes of their own; the weights are a Llama of about
half a gigabyte in random bf16 bits. Prints the bandwidth beside that of a copy on the device.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config import Verify
from megarl.ddma.engine import WeightSync
from megarl.ddma.transports.collective import CollectiveTransport
from megarl.ddma.transports.ipc import IpcTransport
from megarl.world import Group, timed_wait
from megatron_bridge.layouts.megatron import megatron_side
from megatron_bridge.layouts.vllm import vllm_side
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.plan import plan
from megatron_bridge.side import Side
from tests.processes import run_ranks
from tests.unit.megatron_bridge.checkpoints import make_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

SPEC = make_spec(
    vocab_size=32_000,
    hidden_size=2048,
    ffn_size=5632,
    num_layers=4,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
)
SOURCE = megatron_side(SPEC, TrainerLayout(), te=True, dtype="bfloat16")
TARGET = vllm_side(SPEC, GeneratorLayout(), first_rank=1, dtype="bfloat16")


def _params(side: Side, rank: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(rank)
    return {
        param.name: torch.randn(
            param.shape, dtype=torch.bfloat16, device=device, generator=generator
        )
        for param in side.manifest(rank).params
    }


def _copy_bytes_per_second(device: torch.device) -> float:
    source = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return source.numel() / best


def _transfer(rank: int, size: int, transport_name: str) -> tuple[float, float, float]:
    """Return a checksum of all weights, the transfer's and a copy's bytes a second."""
    device = torch.device("cuda", 0 if transport_name == "ipc" else rank)
    torch.cuda.set_device(device)
    store = dist.distributed_c10d._get_default_store()
    timeout = timedelta(seconds=60)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    control = cast(Group, gloo)
    wait = timed_wait(60)
    if transport_name == "ipc":
        transport = IpcTransport(control, device, frozenset({1 - rank}), wait=wait)
    else:
        options = dist.ProcessGroupNCCL.Options()
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        transport = CollectiveTransport(cast(Group, nccl), device, wait=wait, control=control)
    params = _params(SOURCE if rank == 0 else TARGET, rank, device)
    sync = WeightSync(plan(SOURCE, TARGET), rank, transport, params, verify=Verify.FULL)
    seconds = float("inf")
    for version in range(4):
        dist.barrier()
        began = time.perf_counter()
        if rank == 0:
            sync.send(version)
        else:
            assert sync.receive() == version
        torch.cuda.synchronize(device)
        dist.barrier()
        seconds = min(seconds, time.perf_counter() - began)
    nbytes = sum(param.numel() * param.element_size() for param in params.values())
    whole = sum(param.double().sum().item() for param in params.values())
    return whole, nbytes / seconds, _copy_bytes_per_second(device)


def _check(transport_name: str) -> None:
    sent, received = run_ranks(_transfer, 2, transport_name, timeout=120)
    # Every transfer compared the bits of all regions; the sums show that nothing is missing.
    assert sent[0] == pytest.approx(received[0], rel=1e-6)
    rates = f"{received[1] / 1e9:.1f} GB/s, a copy on the device {received[2] / 1e9:.1f} GB/s"
    sys.stdout.write(f"{transport_name}: {rates}\n")


def test_weights_cross_processes_of_one_gpu_by_cuda_ipc() -> None:
    _check("ipc")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_cross_gpus_by_nccl() -> None:
    _check("nccl")
