"""Groups of samples between admission and training: who may start, what a batch is made of.

Owned by the reward executor; pure bookkeeping, no tensors, no clock. A *group* is one prompt and its
samples. Staleness holds by construction:

* A group admitted while the generators hold version v must be trained on by version
  v + max_staleness, its *deadline*: none of its tokens is older than v.
* Groups admitted and not skipped or dropped never exceed (v + max_staleness + 1) batches. So there is
  room for each new one in the batches up to its deadline.
* Generators may hold an older version g than the one v to train, where weights do not travel at every
  batch. Batch v needs v + 1 batches admitted in all, and g + max_staleness + 1 may be: it can always be
  completed if, and only if, v - g never exceeds max_staleness. With weights every k batches v - g is
  k - 1 at most, so max_staleness must be at least k - 1.
* A batch takes the complete groups with the earliest deadlines, if those that it leaves still have
  room in the batches up to theirs; those whose deadline it is have none. Where unfinished groups are
  in the way, the stale policy says what happens.

A prompt is consumed by exactly one batch, or skipped, or dropped; counters say how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Generic, TypeVar

from megarl.config import StalePolicy
from megarl.errors import ChannelError, ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPolicy:
    """What a batch is and how old it may be."""

    batch_groups: int  # groups of a batch
    group_size: int  # samples of a group
    max_staleness: int  # versions between a group's oldest token and the version it trains
    stale_policy: StalePolicy = StalePolicy.WAIT
    skip_uniform: bool = False  # leave out groups whose rewards are all equal
    max_oversample: float = 3.0  # batches of groups started for one, at most, because of skipping
    last_version: int = 1 << 60  # batches of the run: nothing is admitted for later ones


@dataclass(slots=True, kw_only=True)
class Group(Generic[T]):
    """One prompt's finished samples, by sample id, with their rewards."""

    prompt_id: int
    admitted: int  # version of the generators at its admission
    skippable: bool
    samples: dict[int, T] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Prompts since the run began."""

    consumed: int = 0
    skipped: int = 0  # all rewards equal
    dropped: int = 0  # too old, stale_policy=drop
    regenerated: int = 0  # too old and started again, stale_policy=regenerate


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """A group given up because its deadline came; ``again``: to be sampled anew."""

    prompt_id: int
    again: bool


class RolloutBuffer(Generic[T]):
    """Admission, buffer and the choice of batches; ``T`` is what a sample is kept as.

    Example::

        for prompt_id in buffer.admit(version): ...          # start these groups
        buffer.put(prompt_id, sample_id, sample, reward)     # as samples finish, in any order
        if buffer.is_ready(version):
            groups = buffer.take(version)                    # sorted by prompt
    """

    def __init__(self, policy: BufferPolicy, first_version: int = 0):
        """Begin behind ``first_version`` batches, with nothing in flight."""
        self.policy = policy
        self.next_prompt_id = first_version * policy.batch_groups
        self.counters = Counters(consumed=self.next_prompt_id)
        self._groups: dict[int, Group[T]] = {}
        self._skip_limit = self._limit()
        self._told = replace(self.counters)

    def __len__(self) -> int:
        """Groups that are admitted and not yet trained on."""
        return len(self._groups)

    @property
    def num_complete(self) -> int:
        return sum(map(self._is_complete, self._groups.values()))

    def _limit(self) -> int:
        """Return the prompt from which on equal rewards are taken too; order does not change it."""
        extra = (self.policy.max_oversample - 1) * self.policy.batch_groups
        return self.next_prompt_id + self.policy.batch_groups + int(extra)

    def admit(self, version: int) -> list[int]:
        """Return the prompts that may be started now that the generators hold ``version``."""
        policy = self.policy
        last = min(version + policy.max_staleness + 1, policy.last_version)
        room = last * policy.batch_groups - self.counters.consumed - len(self._groups)
        started = list(range(self.next_prompt_id, self.next_prompt_id + max(0, room)))
        for prompt_id in started:
            skippable = policy.skip_uniform and prompt_id < self._skip_limit
            self._groups[prompt_id] = Group(
                prompt_id=prompt_id, admitted=version, skippable=skippable
            )
        self.next_prompt_id += len(started)
        return started

    def put(self, prompt_id: int, sample_id: int, sample: T, reward: float) -> bool:
        """Keep one finished sample; skip its group where that is complete and teaches nothing.

        Returns:
            Whether the group is still kept.

        Raises:
            ChannelError: no such group is open, or it has this sample already.
        """
        group = self._groups.get(prompt_id)
        if group is None or sample_id in group.samples or sample_id >= self.policy.group_size:
            twice = group is not None and sample_id in group.samples
            raise ChannelError(
                f"sample {sample_id} of prompt {prompt_id} came "
                f"{'twice' if twice else 'though it is not expected'}"
            )
        group.samples[sample_id], group.rewards[sample_id] = sample, reward
        if group.skippable and self._is_complete(group) and len(set(group.rewards.values())) == 1:
            del self._groups[prompt_id]
            self.counters.skipped += 1
            return False
        return True

    def missing(self) -> list[tuple[int, int]]:
        """Return (prompt, sample) of all that is admitted and unfinished."""
        return [
            (group.prompt_id, sample_id)
            for group in self._groups.values()
            for sample_id in range(self.policy.group_size)
            if sample_id not in group.samples
        ]

    def _is_complete(self, group: Group[T]) -> bool:
        return len(group.samples) == self.policy.group_size

    def _is_due(self, group: Group[T], version: int) -> bool:
        return group.admitted + self.policy.max_staleness <= version

    def is_ready(self, version: int) -> bool:
        """Whether ``take(version)`` can be called."""
        return self.num_complete >= self.policy.batch_groups and not self._in_the_way(version)

    def _in_the_way(self, version: int) -> list[Group[T]]:
        """Return the unfinished groups for which batch ``version`` of later ones leaves no room."""
        size, left = self.policy.batch_groups, self.policy.max_staleness - version
        in_the_way: list[Group[T]] = []
        unfinished: list[Group[T]] = []
        num_complete = 0
        for admitted, groups in groupby(
            sorted(self._groups.values(), key=lambda group: group.admitted),
            key=lambda group: group.admitted,
        ):
            for group in groups:
                if self._is_complete(group):
                    num_complete += 1
                else:
                    unfinished.append(group)
            # Of groups with a deadline up to this one: in this batch, and in those after it.
            room = min(size, num_complete) + (admitted + left) * size
            over = max(0, num_complete + len(unfinished) - room)
            in_the_way += unfinished[:over]
            del unfinished[:over]
        return in_the_way

    def expire(self, version: int, generator_version: int) -> list[Expired]:
        """Give up the groups that a full batch would otherwise wait for, as the policy says.

        Called while the trainer waits for batch ``version``. A group that starts again counts as
        admitted under ``generator_version``.
        """
        policy = self.policy
        if policy.stale_policy is StalePolicy.WAIT or self.num_complete < policy.batch_groups:
            return []
        late = self._in_the_way(version)
        again = policy.stale_policy is StalePolicy.REGENERATE
        # Started again under a version that is due already, it would only be given up once more.
        late = [group for group in late if not again or group.admitted < generator_version]
        for group in late:
            if again:
                group.samples.clear()
                group.rewards.clear()
                group.admitted = generator_version
                self.counters.regenerated += 1
            else:
                del self._groups[group.prompt_id]
                self.counters.dropped += 1
        return [Expired(prompt_id=group.prompt_id, again=again) for group in late]

    def take(self, version: int) -> list[Group[T]]:
        """Return the batch that ``version`` trains on, sorted by prompt; it is consumed with that.

        Raises:
            ChannelError: it is not ready, or a group is older than the bound.
        """
        if not self.is_ready(version):
            raise ChannelError(f"batch {version} is not ready: {self.describe(version)}")
        complete = [group for group in self._groups.values() if self._is_complete(group)]
        complete.sort(key=lambda group: (group.admitted, group.prompt_id))
        batch = complete[: self.policy.batch_groups]
        oldest = batch[0].admitted
        left = [g.prompt_id for g in self._groups.values() if self._is_due(g, version)]
        over = set(left) - {group.prompt_id for group in batch}
        if over or version - oldest > self.policy.max_staleness:
            raise ChannelError(
                f"batch {version} breaks max_staleness={self.policy.max_staleness}: oldest group of "
                f"version {oldest}, prompts {sorted(over)[:5]} would be left behind"
            )
        for group in batch:
            del self._groups[group.prompt_id]
        self.counters.consumed += len(batch)
        self._skip_limit = self._limit()
        return sorted(batch, key=lambda group: group.prompt_id)

    def describe(self, version: int) -> str:
        """Say what batch ``version`` still lacks, for a report."""
        waited = [group.prompt_id for group in self._in_the_way(version)]
        return (
            f"{self.num_complete} of {self.policy.batch_groups} groups are complete, "
            f"{len(self._groups)} admitted, unfinished and in the way: {waited[:5]}"
        )

    def take_metrics(self) -> dict[str, float]:
        """Return what is held now, and what happened since the last call."""
        last, self._told = self._told, replace(self.counters)
        return {
            "buffer/groups": float(len(self)),
            "buffer/complete_groups": float(self.num_complete),
            "rollout/skipped_groups": float(self.counters.skipped - last.skipped),
            "staleness/dropped": float(self.counters.dropped - last.dropped),
            "staleness/regenerated": float(self.counters.regenerated - last.regenerated),
        }

    # --- Checkpoints ----------------------------------------------------------------------------

    def groups(self) -> Sequence[Group[T]]:
        """Return all groups in the order of their admission."""
        return list(self._groups.values())

    def state(self) -> dict[str, Any]:
        """Return all but the samples as plain JSON values; see `restore`."""
        groups = [(g.prompt_id, g.admitted, g.skippable) for g in self._groups.values()]
        return {
            "next_prompt_id": self.next_prompt_id,
            "skip_limit": self._skip_limit,
            "counters": asdict(self.counters),
            "group_size": self.policy.group_size,
            "max_staleness": self.policy.max_staleness,
            "groups": groups,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a state; its finished samples must be put again.

        Raises:
            ConfigError: groups in flight are of another size, or too many for a lower staleness.
        """
        policy, size, staleness = self.policy, state["group_size"], state["max_staleness"]
        if state["groups"] and (size != policy.group_size or staleness > policy.max_staleness):
            raise ConfigError(
                f"the checkpoint has {len(state['groups'])} groups in flight of rollout.n={size} "
                f"under max_staleness={staleness}; this run has rollout.n={policy.group_size} and "
                f"max_staleness={policy.max_staleness}: expected the same n and no lower staleness"
            )
        self.next_prompt_id = state["next_prompt_id"]
        self._skip_limit = state["skip_limit"]
        self.counters = Counters(**state["counters"])
        self._told = replace(self.counters)
        self._groups = {
            prompt_id: Group(prompt_id=prompt_id, admitted=admitted, skippable=skippable)
            for prompt_id, admitted, skippable in state["groups"]
        }
