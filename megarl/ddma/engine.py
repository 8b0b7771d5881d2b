"""One weight transfer from end to end: handshake, messages, checksums, vote, commit.

Called by the weights channel: `send` on every trainer rank, `receive` on every generator rank, at
the same tick. A receiver that did not reach the commit stays poisoned and must not sample.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from math import prod

import torch
from torch import Tensor

from megarl.ddma.checksums import Verify
from megarl.ddma.transports.base import Transport
from megarl.errors import WeightSyncError
from megatron_bridge.flows import Forwarding
from megatron_bridge.operations import Operation
from megatron_bridge.plan import TransferPlan
from megatron_bridge.spec import LocalParam

_ATTEMPTS = 2  # of a transfer whose checksums differ: bytes are overwritten, so it can be repeated


class SyncState(Enum):
    """Of a receiver's weights. POISONED from before the first byte of a transfer until its commit."""

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
    ):
        """Check the parameters against the plan and register them.

        Raises:
            WeightSyncError: a parameter is missing, of another shape or of another dtype than the
                plan's.
        """
        self.rank = rank
        self.state = SyncState.EMPTY
        self.version = -1
        self._plan, self._transport, self._verify = plan, transport, verify
        self._params = {name: tensor.detach() for name, tensor in params.items()}
        self._messages = plan.messages(rank)
        self._sends: dict[int, list[Operation]] = defaultdict(list)
        self._receives: dict[int, list[Operation]] = defaultdict(list)
        for message in self._messages:
            if message.source_rank == rank:
                self._sends[message.target_rank] += message.items
            if message.target_rank == rank:
                self._receives[message.source_rank] += message.items
        self._is_target = rank in plan.target.ranks
        self._check_params()
        self._padded = self._params_with_padding()
        self._framing = f"{transport.framing}, verify {verify}"
        self._digests = [
            _word(hashlib.sha256(text.encode()).hexdigest())
            for text in (plan.sides_digest, plan.digest, self._framing)
        ]
        self._pair_digests = {peer: self._pair_digest(peer) for peer in self._peers()}
        forwarded = plan.policy.forwarding is not Forwarding.NONE
        # While generators pass weights on, trainers train: their weights are then no longer those
        # that they sent, so that nothing can be sent again.
        self._goes_on = forwarded and not self._is_target
        self._attempts = 1 if forwarded else _ATTEMPTS
        self._on_gpu = any(tensor.is_cuda for tensor in self._params.values())
        self._rest: threading.Thread | None = None
        self._failure: BaseException | None = None
        transport.register(self._params, self._messages, verify)
        self.warm_up()

    def _check_params(self) -> None:
        for param in self._plan.source.manifest(self.rank).params:
            self._check_shape(param)
        for param in self._plan.target.manifest(self.rank).params:
            self._check_shape(param)
            wanted = getattr(torch, param.dtype or self._plan.target.dtype)
            got = self._params[param.name].dtype
            if got != wanted:
                raise WeightSyncError(
                    f"{param.name} of rank {self.rank} is {got}, the plan brings {wanted}"
                )

    def _check_shape(self, param: LocalParam) -> None:
        if param.name not in self._params:
            raise WeightSyncError(f"rank {self.rank} has no parameter {param.name}")
        shape = tuple(self._params[param.name].shape)
        if shape != param.shape:
            raise WeightSyncError(
                f"{param.name} of rank {self.rank} has shape {shape}, expected {param.shape}"
            )

    def _params_with_padding(self) -> list[Tensor]:
        """Return what a receiver gets only in part, or, all padding, not at all: must be zero."""
        return [
            self._params[param.name]
            for param in self._plan.target.manifest(self.rank).params
            if not param.derived
            and sum(shard.local.numel for shard in param.shards) < prod(param.shape)
        ]

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives in one transfer."""
        return sum(item.nbytes for items in self._receives.values() for item in items)

    def warm_up(self) -> None:
        """Connect this rank with all its peers, so that the first transfer does not; they enter too."""
        self._transport.warm_up(self._peers())

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

        Senders give the version; a receiver takes it from them, who must all say the same, the
        receiver too where it is one of them.

        Raises:
            WeightSyncError: a peer has another plan, other manifests or other settings.
        """
        self.settle()
        said = -1 if version is None else version
        peers = self._peers()
        vectors = {
            peer: torch.tensor([said, *self._digests, self._pair_digests[peer]]) for peer in peers
        }
        answers = self._transport.swap(vectors, dict.fromkeys(peers, 5), "weight handshake")
        for peer, theirs in answers.items():
            for place, what in ((1, "manifests"), (2, "plan"), (3, "settings"), (4, "messages")):
                mine, other = int(vectors[peer][place]), int(theirs[place])
                if mine != other:
                    raise WeightSyncError(
                        f"{what} digest of rank {self.rank} is {mine:015x}, of rank {peer} "
                        f"{other:015x} (rank {self.rank}: {self._framing})"
                    )
        if not self._is_target:
            return said
        trainers = self._plan.source.ranks
        offered = {p: int(v[0]) for p, v in answers.items() if p in trainers}
        return self._agreed_version(offered if version is None else {**offered, self.rank: version})

    def _agreed_version(self, versions: Mapping[int, int]) -> int:
        if len(set(versions.values())) != 1:
            raise WeightSyncError(
                f"rank {self.rank} is offered versions {dict(sorted(versions.items()))} by rank, "
                "expected one"
            )
        return next(iter(versions.values()))

    def _pair_digest(self, peer: int) -> int:
        """Return a number that both ends of a pair have in common where their messages match."""
        sums = [0, 0]
        for place, items in enumerate((self._sends.get(peer, ()), self._receives.get(peer, ()))):
            for item in items:
                text = f"{item.tensor} {item.box} {item.target_param} {item.target_box}"
                text += f"{item.dtype} {item.quantization} {item.scales}"
                sums[place] = zlib.crc32(text.encode(), sums[place])
        low, high = sums if self.rank < peer else reversed(sums)
        return low << 31 | high >> 1

    def _peers(self) -> list[int]:
        return sorted((self._sends.keys() | self._receives.keys()) - {self.rank})

    def transfer(self, version: int) -> None:
        """Move all messages, compare checksums and commit ``version``; only after `handshake`.

        Consumes this rank's parameters as source, produces them as target; waits for every peer,
        unblocked by the peer's own `transfer` or by the transport's timeout. Where generators
        forward, a trainer returns once its own bytes have left and may change its weights; the next
        `handshake`, or `settle`, raises what happened later.

        Raises:
            WeightSyncError: checksums differ, also after a second attempt; receivers stay poisoned.
        """
        if self._goes_on and threading.current_thread() is not self._rest:
            self._move()
            sent = self._sent_checksums()
            self._rest = threading.Thread(target=self._end, args=(version, sent), daemon=True)
            self._rest.start()
            return
        for attempt in range(1, self._attempts + 1):
            self._move()
            if self._is_agreed(self._sent_checksums(), last=attempt == self._attempts):
                break
        self._commit(version)

    def send_beside(self, version: int) -> None:
        """Start to send ``version`` beside what this trainer does next; only after `handshake`.

        Its weights must not change before `settle` has returned, which raises what `transfer` would.
        """
        began = torch.cuda.Event() if self._on_gpu else None
        if began is not None:
            began.record()
        self._rest = threading.Thread(target=self._send_all, args=(version, began), daemon=True)
        self._rest.start()

    def _send_all(self, version: int, began: torch.cuda.Event | None) -> None:
        try:
            if began is None:
                self.transfer(version)
                return
            # In a stream of its own, so that neither waits for the other's collectives.
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_event(began)
                self.transfer(version)
        except (WeightSyncError, TimeoutError, ConnectionError, RuntimeError) as error:
            self._failure = error  # raised by `settle`

    def _move(self) -> None:
        if self._is_target:
            self.state = SyncState.POISONED
        for tensor in self._padded:
            tensor.zero_()  # an engine's own start leaves anything there
        self._transport.begin()
        self._transport.post(self._messages)
        self._transport.wait()

    def _commit(self, version: int) -> None:
        if self._is_target:
            self.state = SyncState.CLEAN
        self.version = version

    def _end(self, version: int, sent: Mapping[int, Tensor]) -> None:
        """Take part in the end of a transfer while this rank's caller has gone on."""
        try:
            self._is_agreed(sent, last=True)
            self._commit(version)
        except (WeightSyncError, TimeoutError, ConnectionError, RuntimeError) as error:
            self._failure = error  # raised by `settle`

    def settle(self) -> None:
        """Wait for the end of a transfer from which this trainer went on; raise what it raised."""
        if self._rest is not None:
            self._rest.join()
            self._rest = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _is_agreed(self, sent: Mapping[int, Tensor], *, last: bool) -> bool:
        """Compare checksums and vote; whether all ranks hold what was sent."""
        wrong = self._differing(sent) if self._verify is not Verify.NONE else []
        faulty = self._transport.agree(bool(wrong))
        if not faulty:
            return True
        if not last:
            return False
        raise WeightSyncError(
            "; ".join(wrong)
            if wrong
            else f"weights of ranks {faulty} are damaged: nothing is committed on rank {self.rank}"
        )

    def _sent_checksums(self) -> dict[int, Tensor]:
        return self._checksums(self._sends, sending=True)

    def _checksums(
        self, by_peer: Mapping[int, Sequence[Operation]], *, sending: bool
    ) -> dict[int, Tensor]:
        if self._verify is Verify.NONE:
            return {}
        return {
            peer: self._transport.memory.checksums(items, sending=sending)
            for peer, items in by_peer.items()
            if peer != self.rank
        }

    def _differing(self, sent: Mapping[int, Tensor]) -> list[str]:
        lengths = {
            peer: len(_owners(items)) for peer, items in self._receives.items() if peer != self.rank
        }
        theirs = self._transport.swap(sent, lengths, "weight checksums")
        mine = self._checksums(self._receives, sending=False)  # not before: see `Transport.wait`
        wrong: list[str] = []
        for peer, sums in theirs.items():
            places = (mine[peer] != sums).nonzero().flatten().tolist()
            if places:
                owners = _owners(self._receives[peer])
                names = dict.fromkeys(owners[place].tensor for place in places)
                wrong.append(
                    f"checksums of {len(names)} tensors from rank {peer} differ on rank "
                    f"{self.rank}, the first in {next(iter(names))}"
                )
        return wrong


def _owners(items: Sequence[Operation]) -> list[Operation]:
    """Return the operation of each checksum; see `Memory.checksums`."""
    return [item for item in items for _ in range(2 if item.quantization == "block" else 1)]


def _word(digest: str) -> int:
    """Return the first 60 bits of a hex digest, which fit an int64 control vector."""
    return int(digest[:15], 16)
