"""No order of events makes a transfer hang: ranks as threads, a group whose sends block.

`_Group` matches each send with its receive only when both are posted, in an order that a seed
chooses; nothing is buffered, so that a wrong order of messages would wait for ever.
"""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ddma.transports.collective import CollectiveTransport, Window
from megatron_bridge.flows import Forwarding
from megatron_bridge.operations import Message
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout
from megatron_bridge.plan import PlanPolicy
from tests.unit.megatron_bridge.oracle import Tensors, make_spec
from tests.weights import WeightCase, differing

CPU = torch.device("cpu")


class _Work(dist.Work):
    """Half of a message."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.done = threading.Event()

    def wait(self, timeout: timedelta) -> bool:  # type: ignore[override]
        if not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out")
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class _Mail:
    """What all ranks have posted and not yet exchanged."""

    def __init__(self, seed: int, delay: float) -> None:
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.posted: dict[tuple[int, int], tuple[list[_Work], list[_Work]]] = {}
        self.delay = delay

    def post(self, source: int, target: int, side: int, tensor: Tensor) -> _Work:
        """Add one half; then exchange some of the complete messages, not always the oldest."""
        work = _Work(tensor)
        with self.lock:
            self.posted.setdefault((source, target), ([], []))[side].append(work)
            if self.random.random() < self.delay:
                return work
        time.sleep(0)
        self.deliver(self.random.randint(1, 3))
        return work

    def deliver(self, most: int) -> None:
        with self.lock:
            ready = [pair for pair, (sent, wanted) in self.posted.items() if sent and wanted]
            for pair in self.random.sample(ready, min(most, len(ready))):
                sends, receives = self.posted[pair]
                sent, wanted = sends.pop(0), receives.pop(0)
                assert sent.tensor.numel() == wanted.tensor.numel()
                wanted.tensor.copy_(sent.tensor)
                sent.done.set()
                wanted.done.set()


class _Group:
    """One rank's end of the mail; the part of `megarl.world.Group` that messages need."""

    def __init__(self, mail: _Mail, rank: int) -> None:
        self._mail, self._rank = mail, rank

    def rank(self) -> int:
        return self._rank

    def send(self, tensors: list[Tensor], target: int, tag: int) -> _Work:
        return self._mail.post(self._rank, target, 0, tensors[0])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        return self._mail.post(source, self._rank, 1, tensors[0])


class _Stuck(Exception):
    """A rank waited too long."""


class _Run:
    """One transfer of a plan by threads."""

    def __init__(self, case: WeightCase, seed: int, seconds: float = 20.0) -> None:
        self.case, self.seconds = case, seconds
        self.random = random.Random(seed)
        self.mail = _Mail(seed, delay=self.random.choice((0.0, 0.5, 0.9)))
        self.params: dict[int, Tensors] = {}

    def _wait(self, work: dist.Work, label: str) -> None:
        deadline = time.monotonic() + self.seconds
        while not work.is_completed():
            self.mail.deliver(1)
            if time.monotonic() > deadline:
                raise _Stuck(label)
            time.sleep(0.0003)

    def _make(self, rank: int) -> CollectiveTransport:
        window = Window(
            slots=self.random.randint(1, 3),
            chunk_bytes=self.random.choice((300, 2000, 1 << 20)),
            max_messages=self.random.choice((1, 3, 256)),
        )
        group = _Group(self.mail, rank)
        return CollectiveTransport(group, CPU, wait=self._wait, window=window)  # type: ignore[arg-type]

    def run(self, messages: dict[int, list[Message]]) -> None:
        """Transfer, and look at what arrived and at the staging memory."""
        self.params = {r: {k: t.clone() for k, t in p.items()} for r, p in WHOLE[self.case].items()}
        for rank in self.case.generators:
            for tensor in self.params[rank].values():
                tensor.zero_()
        transports = {rank: self._make(rank) for rank in messages}

        def enter(rank: int) -> None:
            transport = transports[rank]
            transport.register(self.params[rank], messages[rank])
            transport.begin()
            transport.post(messages[rank])
            transport.wait()
            largest = max([m.nbytes for m in messages[rank]], default=0)
            if largest + 255 < transport.window.chunk_bytes:
                assert transport.staging_bytes <= transport.window.limit_bytes

        with ThreadPoolExecutor(len(messages)) as pool:
            for future in [pool.submit(enter, rank) for rank in messages]:
                future.result()
        for rank in self.case.generators:
            assert differing(self.params[rank], WHOLE[self.case][rank]) == []


SPEC = make_spec(num_layers=1, hidden_size=8, ffn_size=16, vocab_size=64, num_heads=4, head_dim=2)
CASES = [
    WeightCase(
        spec=SPEC,
        trainer=trainer,
        generator=GeneratorLayout(tp=tp, replicas=replicas),
        policy=PlanPolicy(
            forwarding=forwarding, forward_bytes=64, alone_bytes=alone, message_bytes=message
        ),
    )
    for trainer, tp, replicas in (
        (TrainerLayout(tp=4, vocab_divisor=16), 2, 2),
        (TrainerLayout(tp=2, vocab_divisor=16), 1, 6),
        (TrainerLayout(tp=2, dp=2, vocab_divisor=16), 2, 3),
    )
    for forwarding in Forwarding
    for alone, message in ((1, 70), (200, 500), (1 << 18, 1 << 20))
]
WHOLE = {case: case.all_expected(3) for case in CASES}
MESSAGES = {case: {r: case.plan.messages(r) for r in range(case.size)} for case in CASES}


@pytest.mark.parametrize("block", range(3))
def test_no_order_of_events_hangs(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        case = random.Random(seed).choice(CASES)
        _Run(case, seed).run(MESSAGES[case])


def test_the_group_is_strict_enough_to_see_a_wrong_order() -> None:
    """Two ranks that order their peers otherwise: with one message at a time nobody can go on."""
    case = next(c for c in CASES if c.policy.alone_bytes == 1)
    run = _Run(case, 0, seconds=0.5)
    run._make = lambda rank: CollectiveTransport(  # type: ignore[method-assign]
        _Group(run.mail, rank),  # type: ignore[arg-type]
        CPU,
        wait=run._wait,
        window=Window(slots=1, max_messages=1),
    )
    messages = dict(MESSAGES[case])
    rank = case.generators[0]
    # Only the order among peers changes, so that each pair still agrees.
    messages[rank] = sorted(messages[rank], key=lambda m: (m.source_rank, m.key))
    other = case.trainers[0]
    messages[other] = sorted(messages[other], key=lambda m: (-m.target_rank, m.key))
    with pytest.raises((_Stuck, AssertionError)):
        run.run(messages)
