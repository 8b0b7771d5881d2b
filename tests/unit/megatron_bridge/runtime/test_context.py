"""Sharing, padding and division of tokens; context parallelism's arithmetic, which no CPU runs whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_bridge.parallel import TrainerLayout
from megatron_bridge.runtime.context import lay_out, share
from tests.processes import run_ranks

_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8))
def test_neighbours_share_their_common_beginning_and_nothing_else(rows: list[list[int]]) -> None:
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([token for row in rows for token in row])
    found = share(lengths, tokens)
    parts = [part.tolist() for part in found.places.split(lengths.tolist())]
    taken: set[int] = set()
    for number, (row, places) in enumerate(zip(rows, parts, strict=True)):
        common = 0
        if number:
            before = rows[number - 1]
            while common < min(len(row), len(before)) and row[common] == before[common]:
                common += 1
            assert places[:common] == parts[number - 1][:common]
        own = places[common:]
        assert len(set(own)) == len(own)
        assert taken.isdisjoint(own)
        taken.update(own)
    assert taken == set(range(found.num_places))
    held, _ = found.spread(tokens)
    assert torch.equal(held[found.places], tokens)


@given(_lengths, st.sampled_from([1, 2, 4]))
def test_sequence_parallelism_appends_one_sequence_at_most(lengths: list[int], tp: int) -> None:
    layout = TrainerLayout(tp=tp, sequence_parallel=tp > 1)
    found = lay_out(torch.tensor(lengths), layout, 0)
    assert int(found.lengths.sum()) % tp == 0
    assert found.lengths.tolist()[: len(lengths)] == lengths
    assert len(found.lengths) - len(lengths) == (sum(lengths) % tp != 0)
    tokens = torch.arange(1, sum(lengths) + 1)
    held, following = found.spread(tokens)
    assert torch.equal(held[: len(tokens)], tokens)
    assert torch.equal(following[: len(tokens) - 1], tokens[1:])


@given(_lengths, st.sampled_from([2, 4]), st.sampled_from([1, 2]))
def test_context_parallel_ranks_hold_every_place_once(lengths: list[int], cp: int, tp: int) -> None:
    layout = TrainerLayout(cp=cp, tp=tp, sequence_parallel=tp > 1)
    found = [lay_out(torch.tensor(lengths), layout, rank) for rank in range(cp)]
    held = [part.held for part in found if part.held is not None]
    size = int(found[0].lengths.sum())
    assert sorted(torch.cat(held).tolist()) == list(range(size))
    assert {len(part) for part in held} == {size // cp}
    assert len(held[0]) % tp == 0
    assert size < sum(lengths) + 2 * cp * tp * len(lengths)
    tokens = torch.arange(1, sum(lengths) + 1)
    padded = torch.zeros(size, dtype=torch.int64)
    for part, places in zip(found, held, strict=True):
        padded[places] = part.spread(tokens)[0]
    assert torch.equal(padded[found[0].places], tokens)


def test_a_rank_holds_a_chunk_of_the_front_and_its_mirror() -> None:
    found = lay_out(torch.tensor([8, 3]), TrainerLayout(cp=2), 0)
    assert found.lengths.tolist() == [8, 4]
    assert found.held is not None
    assert found.held.tolist() == [0, 1, 6, 7, 8, 11]


def _reassemble(rank: int, size: int) -> tuple[list[float], list[float]]:
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    lengths = torch.tensor([5, 1, 7])
    found = lay_out(lengths, TrainerLayout(cp=size), rank)
    tokens = torch.arange(1, 14)
    held, following = found.spread(tokens)
    # a "model" that says 10 x token + next token at each place
    local = (10.0 * held + following).requires_grad_()
    of_tokens = found.of_tokens(local, group)
    (of_tokens * torch.arange(13.0)).sum().backward()
    assert local.grad is not None
    everywhere = torch.zeros(14)
    everywhere[held] = local.grad
    dist.all_reduce(everywhere)  # token 0 stands for padding
    return of_tokens.tolist(), everywhere[1:].tolist()


@pytest.mark.dist
def test_ranks_reassemble_what_each_token_was_given_and_share_its_gradient() -> None:
    first = {0, 5, 6}
    wanted = [0.0 if t in first else 10.0 * t + (t + 1) for t in range(13)]
    # the place of token t (from 0) predicts token t + 1, whose weight is t + 1
    gradient = [0.0 if t + 1 in first or t == 12 else t + 1.0 for t in range(13)]
    for values, grads in run_ranks(_reassemble, 2):
        assert values == wanted
        assert grads == gradient
