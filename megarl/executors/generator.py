"""The generator executor: one rank of one vLLM replica.

Consumes ``weights``, ``control`` and the orders of the reward executor; produces reports and
``metrics``. In its step it decodes whatever it was ordered to until the orders say that the tick is
over; unfinished responses stay in the engine and go on under the next weights. All ranks of a replica
make the same calls of the engine in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megarl.checkpoint import StartPoint
from megarl.config import RunConfig
from megarl.contract import first_difference, poison, require_manifest
from megarl.errors import ChannelError, WeightSyncError
from megarl.executors.base import Executor
from megarl.observe.trace import SpanKind, Tracer
from megarl.rollout.engine import Engine, Sample
from megarl.rollout.messages import State, Work, pack_samples, unpack_work
from megarl.topology import GENERATOR
from megarl.types import Control, Message, MetricValues, Orders, Report
from megatron_bridge.spec import RankManifest

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02  # how often a decoding rank looks whether the trainer has arrived
# Of the time, what reports take; and the longest from one to the next. The second of each is for
# when the trainer stands at the boundary, since a report brings word of the tick's end.
_REPORT_SHARES, _LONGEST_SILENCES = (0.02, 0.05), (0.2, 0.1)


class Pace:
    """When a decoding replica is to report."""

    def __init__(self, has_arrived: Callable[[], bool]):
        """``has_arrived`` says whether the trainer stands at the end of this tick."""
        self._has_arrived = has_arrived
        self._arrived = False
        self._due = self._look = 0.0

    def is_due(self, now: float) -> bool:
        if not self._arrived and now >= self._look:
            self._look = now + _LOOK_SECONDS
            self._arrived = self._has_arrived()
            if self._arrived:
                return True
        return now >= self._due

    def reported(self, began: float, ended: float) -> None:
        share, longest = _REPORT_SHARES[self._arrived], _LONGEST_SILENCES[self._arrived]
        self._due = ended + min((ended - began) / share, longest)


class Client(Protocol):
    """A replica's link to the reward executor; see `RequestClient`."""

    def agree(self, due: bool) -> bool: ...
    def exchange(self, report: Report) -> Orders: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What this rank's replica is and whom it asks for work."""

    manifest: RankManifest  # what this rank of it must hold
    client: Client
    has_arrived: Callable[[int], bool]  # whether the trainer stands at the head of a tick


class GeneratorExecutor(Executor):
    """One generator rank; `make_engine` builds the engine once the executor world exists."""

    name = GENERATOR

    def __init__(
        self,
        config: RunConfig,
        start: StartPoint,
        replica: Replica,
        make_engine: Callable[[], Engine],
        tracer: Tracer,
    ):
        self._config, self._replica, self._tracer = config, replica, tracer
        self._make_engine = make_engine
        self._running: Engine | None = None
        self._start = start
        self._tick = start.step
        self.version = -1  # until the first weights have come
        self._received_bytes = 0
        self._recomputed = 0  # tokens, until the last step
        self._unreported: list[Sample] = []
        self._num_tokens = 0  # sampled in this step
        self._metrics: dict[str, float] = {}
        self._contract: dict[str, float] = {}  # metrics of the start, reported with the first step

    def init(self) -> None:
        self._running = self._make_engine()
        live, dtype = self._running.parameters(), getattr(torch, self._config.generator_dtype)
        require_manifest(self._replica.manifest, live, dtype, self._running.transforms())
        poison(live)

    def set_step(self, step: int) -> None:
        self._tick, self._received_bytes = step, 0

    def get_output(self, channel: str) -> Sequence[Message]:
        metrics, self._metrics = self._metrics, {}
        return (MetricValues.from_dict(metrics),)

    def put_input(self, channel: str, messages: Sequence[Message]) -> None:
        (message,) = messages
        if not isinstance(message, Control):
            raise ChannelError(f"the generator takes no {type(message).__name__} ({channel!r})")
        self.stopping = bool(message.stop)

    def get_model(self) -> Mapping[str, Tensor]:
        return self._engine().parameters()

    def begin_update(self) -> None:
        """New weights arrive: nothing can be sampled until `commit_update`."""
        self._engine().poison()

    def commit_update(self, version: int, received_bytes: int) -> None:
        if self.version < 0:
            self._require_checkpoint()
        self._engine().commit(version)
        self.version = version
        self._received_bytes = received_bytes

    def _require_checkpoint(self) -> None:
        """Compare the first weights with the model folder, where they come from there.

        Raises:
            WeightSyncError: names the first element that differs; the engine stays poisoned.
        """
        live, manifest = self.get_model(), self._replica.manifest
        self._contract["contract/parameters"] = float(len(live))
        if self._start.trainer_folder is not None:
            return
        folder, dtype = Path(self._config.model.path), getattr(torch, self._config.model.dtype)
        with self._tracer.span("contract"):
            difference = first_difference(folder, manifest, live, dtype)
        if difference is not None:
            raise WeightSyncError(
                f"after the first transfer rank {manifest.rank} does not hold the "
                f"checkpoint: {difference}"
            )
        equal = sum(tensor.numel() * tensor.itemsize for tensor in live.values())
        self._contract["contract/equal_bytes"] = float(equal)
        logger.info("the first weights are those of %s: %d bytes, bit for bit", folder, equal)

    def step(self) -> None:
        """Decode and report until the tick is over."""
        began = time.monotonic()
        self._num_tokens = 0
        state = State.GO
        while state is State.GO:
            with self._tracer.span("gen"):
                state = self._decode()
            if state is State.GO:
                with self._tracer.span("wait/orders", SpanKind.WAIT):
                    state = self._report()  # answered when there is something to do
        if state is State.HAND_OVER:
            self._hand_over()
        if self._config.is_colocated:
            self._engine().sleep()  # the next tick's commit wakes it
        self._metrics = self._step_metrics(time.monotonic() - began) | self._contract
        self._contract = {}

    def _decode(self) -> State:
        """Decode and report until nothing is unfinished or the orders end the tick."""
        state, pace = State.GO, Pace(lambda: self._replica.has_arrived(self._tick + 1))
        while state is State.GO and self._engine().num_unfinished:
            self._unreported += self._engine().step()
            began = time.monotonic()
            if self._replica.client.agree(pace.is_due(began)):
                state = self._report()
                pace.reported(began, time.monotonic())
        return self._report() if state is State.GO and self._unreported else state

    def _report(self) -> State:
        """Report what is finished and take on what is ordered."""
        samples, self._unreported = self._unreported, []
        self._num_tokens += sum(len(sample.tokens) for sample in samples)
        work = self._exchange(samples)
        if work.aborts:
            self._engine().abort(work.aborts)
        if work.requests:
            self._engine().add(work.requests)
        return work.state

    def _hand_over(self) -> None:
        """Show what every unfinished request has so far; it stays where it is."""
        work = self._exchange(self._engine().unfinished())
        if work.state is not State.BOUNDARY:
            raise ChannelError(f"after handing over the orders say {work.state.name}")

    def _exchange(self, samples: Sequence[Sample]) -> Work:
        return unpack_work(self._replica.client.exchange(pack_samples(samples)))

    def _step_metrics(self, seconds: float) -> dict[str, float]:
        times = self._tracer.drain()
        idle = times.pop("idle_ratio")
        recomputed = self._engine().recomputed_tokens
        metrics = {
            "step": float(self._tick + 1),
            "generator/idle_ratio": idle,
            "generator/tokens_per_second": self._num_tokens / max(seconds, 1e-9),
            "generator/recomputed_tokens": float(recomputed - self._recomputed),
            "generator/unfinished": float(self._engine().num_unfinished),
            **{name.replace("timing_s/", "generator/timing_s/"): v for name, v in times.items()},
            "timing_s/gen": times["timing_s/gen"],
            **{name: times[name] for name in ("timing_s/update_weights",) if name in times},
            "perf/weight_sync_bytes": float(self._received_bytes),
        }
        self._recomputed = recomputed
        return metrics

    def _engine(self) -> Engine:
        assert self._running is not None, "init() builds the engine"
        return self._running

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
