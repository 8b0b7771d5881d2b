"""Balance sequences over data-parallel ranks and pack them into micro-batches.

Called by the executors that make batches: `split` does both at once. Both hand out the longest
sequence first, each to the emptiest part (Graham's LPT rule: the fullest part holds at most 4/3 of
the least possible), with ties broken by index, so that every rank computes the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.errors import DataError


@dataclass(frozen=True, slots=True)
class Part:
    """What one data-parallel rank trains on."""

    rows: list[int]  # of the whole batch
    packs: list[list[int]]  # indices into `rows`; an update's last may be empty
    num_packs: list[int]  # of each update, whose packs follow each other; alike on every rank


def split(
    lengths: Sequence[int],
    num_parts: int,
    max_tokens: int,
    multiple_of: int = 1,
    num_updates: int = 1,
    prompts: Sequence[int] | None = None,
) -> list[Part]:
    """Split a batch over updates, each over data-parallel ranks, and those into micro-batches.

    Updates have about equal tokens and do not depend on the number of ranks, nor do ranks of an
    update differ much; all are cut into the same number of micro-batches. Where ``prompts`` says
    which sequences begin alike, a rank's are kept together in its micro-batches, if these fit.

    Raises:
        DataError: a sequence is longer than the budget.
    """
    parts = [Part([], [], []) for _ in range(num_parts)]
    for share in partition(lengths, num_updates):
        of_ranks = [
            [share[index] for index in chosen]
            for chosen in partition([lengths[row] for row in share], num_parts)
        ]
        packs = [
            micro_batches([lengths[row] for row in rows], max_tokens, multiple_of=multiple_of)
            for rows in of_ranks
        ]
        if prompts is not None:
            packs = [
                _together(
                    [lengths[row] for row in rows],
                    [prompts[row] for row in rows],
                    max_tokens,
                    found,
                )
                for rows, found in zip(of_ranks, packs, strict=True)
            ]
        count = max(map(len, packs))
        for part, rows, found in zip(parts, of_ranks, packs, strict=True):
            first = len(part.rows)
            part.rows.extend(rows)
            part.packs.extend([first + index for index in pack] for pack in found)
            part.packs.extend([] for _ in range(count - len(found)))
            part.num_packs.append(count)
    return parts


def _together(
    lengths: Sequence[int], prompts: Sequence[int], max_tokens: int, packs: list[list[int]]
) -> list[list[int]]:
    """Return as many packs in which all of a prompt's sequences are together; else ``packs``."""
    units: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        units.setdefault(prompt, []).append(index)
    members = list(units.values())
    sizes = [sum(lengths[index] for index in unit) for unit in members]
    chosen = partition(sizes, len(packs))
    if not all(pack and sum(sizes[unit] for unit in pack) <= max_tokens for pack in chosen):
        return packs
    return [[index for unit in pack for index in members[unit]] for pack in chosen]


def partition(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split sequences into `num_parts` lists of indices of about equal tokens.

    No part is empty where there are at least `num_parts` sequences.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, 0, part) for part in range(num_parts)]  # tokens, sequences, part
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, count, part = heap[0]
        parts[part].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], count + 1, part))
    return [sorted(part) for part in parts]


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    min_count: int = 1,
    multiple_of: int = 1,
    count: int | None = None,
) -> list[list[int]]:
    """Pack sequences into few, balanced lists of indices of at most `max_tokens` tokens each.

    Ranks that step together need equally many: each calls this once, they agree on the largest
    number, and each calls again with that `count`. It always fits, since the longest-first rule
    never makes the fullest part fuller when there is one part more. Lists may be empty where
    `count` or `min_count` exceeds the number of sequences.

    Args:
        lengths: tokens of each sequence.
        max_tokens: token budget of one micro-batch.
        min_count: at least so many micro-batches.
        multiple_of: their number is a multiple of it (interleaved pipelines need that).
        count: exactly so many.

    Raises:
        DataError: a sequence is longer than the budget, or `count` micro-batches are too few.
        ValueError: `count` contradicts `min_count` or `multiple_of`.
    """
    if max(lengths, default=0) > max_tokens:
        longest = max(range(len(lengths)), key=lambda i: lengths[i])
        raise DataError(
            f"sequence {longest} has {lengths[longest]} tokens, more than "
            f"trainer.max_tokens_per_micro_batch = {max_tokens}"
        )
    if count is not None and (count < min_count or count % multiple_of):
        raise ValueError(f"count {count}: expected a multiple of {multiple_of} from {min_count} on")
    least = max(min_count, 1, -(-sum(lengths) // max_tokens))
    number = count or -(-least // multiple_of) * multiple_of
    while True:
        batches = partition(lengths, number)
        fullest = max(sum(lengths[i] for i in batch) for batch in batches)
        if fullest <= max_tokens:
            return batches
        if count is not None:
            raise DataError(
                f"{len(lengths)} sequences of {sum(lengths)} tokens do not fit {count} micro-batches "
                f"of trainer.max_tokens_per_micro_batch = {max_tokens}: one would hold {fullest}"
            )
        number += multiple_of
