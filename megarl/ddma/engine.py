"""One weight transfer from end to end: handshake, rounds, checksums, commit.

Called by the weights channel: `send` on every trainer rank, `receive` on every generator rank, at
the same tick. A receiver that did not reach the commit stays poisoned and must not sample.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from megarl.ddma.checksums import Verify, checksums
from megarl.ddma.transports import Transport
from megarl.errors import WeightSyncError
from megatron_bridge.operations import Operation
from megatron_bridge.plan import TransferPlan


class SyncState(Enum):
    """Of a receiver's weights. POISONED from the first byte of a transfer until its commit."""

    EMPTY = "empty"
    CLEAN = "clean"
    POISONED = "poisoned"


class WeightSync:
    """One rank's end of repeated transfers; the plan and the parameters stay the same.

    Example::

        sync = WeightSync(plan, rank, transport, params)
        sync.send(version)              # trainer
        version = sync.receive()        # generator; then sync.require_clean() passes
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        transport: Transport,
        params: Mapping[str, Tensor],
        *,
        verify: Verify = Verify.SAMPLED,
        round_bytes: int = 64 << 20,
    ):
        """Check the parameters against the plan and register them.

        Args:
            round_bytes: most bytes that a rank moves in one round; bounds the staging memory.

        Raises:
            WeightSyncError: a parameter is missing, too small or of another dtype than the wire.
        """
        self.rank = rank
        self.state = SyncState.EMPTY
        self.version = -1
        self._plan = plan
        self._transport = transport
        self._verify = verify
        self._params = {name: tensor.detach() for name, tensor in params.items()}
        self._sends = plan.of_source(rank)
        self._receives = plan.of_target(rank)
        self._check_params()
        self._padded = self._params_with_padding()
        itemsize = transport.wire_dtype.itemsize
        self._rounds = plan.rounds(max_numel=max(1, round_bytes // itemsize), rank=rank)
        self._agreement = f"{transport.framing}, rounds of {round_bytes} bytes, verify {verify}"
        transport.register(self._params)

    def _check_params(self) -> None:
        wire = self._transport.wire_dtype
        for name, box in [
            *((item.source_param, item.source_box) for item in self._sends),
            *((item.target_param, item.target_box) for item in self._receives),
        ]:
            shape = tuple(self._params[name].shape) if name in self._params else None
            if shape is None:
                raise WeightSyncError(f"rank {self.rank} has no parameter {name}")
            if len(shape) != len(box.stop) or any(
                high > size for high, size in zip(box.stop, shape, strict=True)
            ):
                raise WeightSyncError(
                    f"{name} of rank {self.rank} has shape {shape}, expected to hold {box}"
                )
        for item in self._receives:
            dtype = self._params[item.target_param].dtype
            if dtype != wire:
                raise WeightSyncError(
                    f"{item.target_param} of rank {self.rank} is {dtype}, the wire carries {wire}"
                )

    def _params_with_padding(self) -> list[Tensor]:
        """Return what a receiver gets only in part, or, all padding, not at all: must be zero."""
        if self.rank not in self._plan.target_ranks:
            return []
        received = dict.fromkeys(self._params, 0)
        for item in self._receives:
            received[item.target_param] += item.box.numel
        own = {item.source_param for item in self._sends}
        return [
            self._params[name]
            for name, numel in received.items()
            if numel < self._params[name].numel() and name not in own
        ]

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives in one transfer."""
        itemsize = self._transport.wire_dtype.itemsize
        return itemsize * sum(item.box.numel for item in self._receives)

    def require_clean(self) -> None:
        """Raise WeightSyncError unless the weights are those of one committed version."""
        if self.state is not SyncState.CLEAN:
            raise WeightSyncError(
                f"rank {self.rank} holds {self.state.value} weights "
                f"(last committed version {self.version}), expected clean"
            )

    def send(self, version: int) -> None:
        """Send this rank's operations as ``version``."""
        self.transfer(self.handshake(version))

    def receive(self) -> int:
        """Receive this rank's operations; return the version that is now committed."""
        version = self.handshake()
        self.transfer(version)
        return version

    def handshake(self, version: int | None = None) -> int:
        """Compare digests with every peer before the first byte; return the version to transfer.

        Senders give the version; a receiver takes it from them, who must all say the same.

        Raises:
            WeightSyncError: a peer has another plan, other manifests or other settings.
        """
        plan = self._plan
        agreement = hashlib.sha256(self._agreement.encode()).hexdigest()
        said = -1 if version is None else version
        mine = torch.tensor(
            [said, *(_word(text) for text in (plan.digest, plan.manifests_digest, agreement))]
        )
        peers = self._peers(self._sends, self._receives)
        answers = self._transport.swap(
            dict.fromkeys(peers, mine), dict.fromkeys(peers, len(mine)), "weight handshake"
        )
        for peer, theirs in answers.items():
            for place, what in ((2, "manifests"), (1, "plan"), (3, "settings")):
                if theirs[place] != mine[place]:
                    raise WeightSyncError(
                        f"{what} digest of rank {self.rank} is {int(mine[place]):015x}, of rank "
                        f"{peer} {int(theirs[place]):015x} (rank {self.rank}: {self._agreement})"
                    )
        if version is not None:
            return version
        return self._agreed_version({peer: int(vector[0]) for peer, vector in answers.items()})

    def _agreed_version(self, versions: Mapping[int, int]) -> int:
        if len(set(versions.values())) != 1:
            raise WeightSyncError(
                f"rank {self.rank} is offered versions {dict(sorted(versions.items()))} by rank, "
                "expected one"
            )
        return next(iter(versions.values()))

    def _peers(self, *sides: Sequence[Operation]) -> list[int]:
        ranks = {r for side in sides for item in side for r in (item.source_rank, item.target_rank)}
        return sorted(ranks - {self.rank})

    def transfer(self, version: int) -> None:
        """Move all rounds, compare checksums and commit ``version``; only after `handshake`.

        Consumes this rank's parameters as source, produces them as target; waits for every peer,
        unblocked by the peer's own `transfer` or by the transport's timeout.

        Raises:
            WeightSyncError: a checksum differs; the receiver stays poisoned.
        """
        if self._receives:
            self.state = SyncState.POISONED
        for tensor in self._padded:
            tensor.zero_()  # an engine's own start leaves anything there
        for items in self._rounds:
            self._transport.post(items)
        self._transport.wait()
        if self._verify is not Verify.NONE:
            self._compare_checksums()
        if self._receives:
            self.state = SyncState.CLEAN
        self.version = version

    def _compare_checksums(self) -> None:
        wire = self._transport.wire_dtype
        sent: dict[int, list[Tensor]] = defaultdict(list)
        for item in self._sends:
            region = self._params[item.source_param][item.source_box.slices]
            sent[item.target_rank].append(region)
        received: dict[int, list[Operation]] = defaultdict(list)
        for item in self._receives:
            received[item.source_rank].append(item)
        others = self._peers(self._sends, self._receives)
        outgoing = {
            peer: checksums(sent[peer], wire, self._verify) for peer in others if peer in sent
        }
        incoming = {peer: len(received[peer]) for peer in others if peer in received}
        for peer, sums in self._transport.swap(outgoing, incoming, "weight checksums").items():
            items = received[peer]
            regions = [self._params[item.target_param][item.target_box.slices] for item in items]
            mine = checksums(regions, wire, self._verify).cpu()
            wrong = [items[index].tensor for index in (mine != sums).nonzero().flatten().tolist()]
            if wrong:
                raise WeightSyncError(
                    f"checksums of {len(wrong)} of {len(items)} regions from rank {peer} differ "
                    f"on rank {self.rank}, the first in {wrong[0]}"
                )


def _word(digest: str) -> int:
    """Return the first 60 bits of a hex digest, which fit an int64 control vector."""
    return int(digest[:15], 16)
