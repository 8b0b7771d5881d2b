"""Messages between ranks of one host: the sender writes into the receiver's parameters.

The receivers' parameters lie in memory that both processes map: CUDA IPC on GPUs, anonymous shared
memory on CPUs, which is gone when the last process is. That a sender has written all is told by its
checksums or its vote; where generators forward, a token of one byte follows each message over the
process group, so that order and waits are those of `CollectiveTransport`. Messages to other hosts go
over the group itself.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from megarl.ddma.checksums import Verify
from megarl.ddma.memory import Memory
from megarl.ddma.transports.collective import CollectiveTransport, Window
from megarl.errors import WeightSyncError
from megarl.world import Group, Wait
from megatron_bridge.operations import AFTER, Message, Operation


class IpcTransport(CollectiveTransport):
    """`CollectiveTransport` with a shorter way to the ranks of the own host."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        neighbours: frozenset[int],
        *,
        wait: Wait,
        window: Window | None = None,
        control: Group | None = None,
    ):
        """Take the other ranks of this host as ``neighbours``; they all do the same."""
        super().__init__(group, device, wait=wait, window=window, control=control)
        self._neighbours = neighbours
        self._remote: dict[int, Memory] = {}
        self._writers: list[int] = []  # neighbours that write here
        self._all: Sequence[Message] = ()
        self._direct: list[Message] = []  # to and from neighbours, passed on by nobody
        self._others: list[Message] = []
        self._copies: tuple[list[Tensor], list[Tensor]] = ([], [])  # what direct ones write, and of
        self._quantised: list[tuple[Message, Operation]] = []  # the rest of what they write
        self._token = torch.ones(1, dtype=torch.uint8, device=device)

    def register(
        self,
        params: Mapping[str, Tensor],
        messages: Sequence[Message],
        verify: Verify = Verify.NONE,
    ) -> None:
        """Also exchange handles with neighbours; all of them enter.

        Raises:
            WeightSyncError: a neighbour's memory cannot be mapped.
        """
        super().register(params, messages, verify)
        near = [message for message in messages if self._is_near(message)]
        self._writers = sorted({m.source_rank for m in near if m.target_rank == self.rank})
        readers = sorted({m.target_rank for m in near if m.source_rank == self.rank})
        written = {
            item.target_param for m in near if m.target_rank == self.rank for item in m.items
        }
        written |= {item.scales for m in near for item in m.items if item.scales in params}
        mine = self._describe({name: params[name] for name in sorted(written)}) if written else b""
        theirs = self._swap_bytes(dict.fromkeys(self._writers, mine), readers)
        self._remote = {rank: Memory(self._open(text, rank)) for rank, text in theirs.items()}

    def begin(self) -> None:
        super().begin()
        go = torch.ones(1, dtype=torch.int64)
        readers = dict.fromkeys(sorted(self._remote), 1)
        self.swap(dict.fromkeys(self._writers, go), readers, "leave to write weights")

    def close(self) -> None:
        super().close()
        self._remote.clear()
        self._copies, self._quantised = ([], []), []

    @torch.no_grad()
    def post(self, messages: Sequence[Message]) -> None:
        if messages is not self._all:
            self._all = messages
            self._direct = [m for m in messages if self._is_near(m) and not m.relayed]
            direct = set(map(id, self._direct))
            self._others = [m for m in messages if id(m) not in direct]
            self._plan_copies()
        super().post(self._others)
        if self._copies[0]:
            torch._foreach_copy_(*self._copies)
        for message, item in self._quantised:
            self.memory.write(item, self._remote[message.target_rank])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _plan_copies(self) -> None:
        mine = [(m, item) for m in self._direct if m.source_rank == self.rank for item in m.items]
        plain = [(m, item) for m, item in mine if item.quantization != "block"]
        targets = [self._remote[message.target_rank].target(item) for message, item in plain]
        self._copies = (targets, [self.memory.source(item) for _, item in plain])
        self._quantised = [(m, item) for m, item in mine if item.quantization == "block"]

    def _write(self, message: Message) -> None:
        for item in message.items:
            self.memory.write(item, self._remote[message.target_rank])

    def _is_near(self, message: Message) -> bool:
        other = {message.source_rank, message.target_rank} - {self.rank}
        scratch = any(item.quantization in AFTER for item in message.items)
        return bool(other) and other <= self._neighbours and not scratch

    def _is_in_place(self, message: Message, *, sending: bool) -> bool:
        return self._is_near(message) or super()._is_in_place(message, sending=sending)

    def _in_place(self, message: Message, *, sending: bool) -> Tensor:
        if not self._is_near(message):
            return super()._in_place(message, sending=sending)
        if not sending:
            return torch.empty_like(self._token)
        self._write(message)
        return self._token

    # --- Handles ------------------------------------------------------------------------------

    def _swap_bytes(
        self, outgoing: Mapping[int, bytes], incoming: Sequence[int]
    ) -> dict[int, bytes]:
        label = "handles of shared weights"
        lengths = {peer: torch.tensor([len(text)]) for peer, text in outgoing.items()}
        sizes = self.swap(lengths, dict.fromkeys(incoming, 1), f"lengths of {label}")
        vectors = {
            peer: torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
            for peer, text in outgoing.items()
        }
        found = self.swap(vectors, {peer: int(size) for peer, size in sizes.items()}, label)
        return {peer: bytes(vector.tolist()) for peer, vector in found.items()}

    def _describe(self, params: Mapping[str, Tensor]) -> bytes:
        if self._device.type == "cuda":
            return pickle.dumps({name: reduce_tensor(p.detach()) for name, p in params.items()})
        rows = []
        for name, param in params.items():
            storage = param.untyped_storage()
            descriptor, nbytes = storage._share_fd_cpu_()  # moves its bytes once; views follow
            file = (f"/proc/{os.getpid()}/fd/{descriptor}", os.fstat(descriptor).st_ino, nbytes)
            place = (param.storage_offset(), list(param.shape), list(param.stride()))
            rows.append((name, file, str(param.dtype).removeprefix("torch."), place))
        return json.dumps(rows).encode()

    def _open(self, text: bytes, rank: int) -> dict[str, Tensor]:
        if self._device.type == "cuda":
            rebuilt = pickle.loads(text)  # written by `_describe` of a rank of this run
            return {name: make(*arguments) for name, (make, arguments) in rebuilt.items()}
        params: dict[str, Tensor] = {}
        storages: dict[str, torch.UntypedStorage] = {}
        for name, (path, inode, nbytes), dtype, (offset, shape, stride) in json.loads(text):
            if path not in storages:
                try:
                    storages[path] = _map(path, inode, nbytes)
                except (OSError, RuntimeError) as error:
                    raise WeightSyncError(
                        f"rank {self.rank} cannot map {name} of rank {rank}: {error}"
                    ) from error
            view = torch.empty(0, dtype=getattr(torch, dtype))
            params[name] = view.set_(storages[path], offset, shape, stride)
        return params


def _map(path: str, inode: int, nbytes: int) -> torch.UntypedStorage:
    """Map another process's shared memory; the mapping keeps no descriptor open."""
    found = os.stat(path).st_ino
    if found != inode:  # a process of the same number in another container
        raise OSError(f"{path} is inode {found}, expected {inode}")
    storage = torch.UntypedStorage.from_file(path, True, nbytes)
    assert isinstance(storage, torch.UntypedStorage)
    return storage
