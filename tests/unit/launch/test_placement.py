"""Placement: ranks on hosts by hand, for layouts that are fit and for some that are not."""

from dataclasses import replace

import pytest

from launch.placement import Placement, picture, place
from megarl.config import GeneratorConfig, Mode, RunConfig, TrainerConfig
from megarl.config import Placement as Colocation
from megarl.errors import ConfigError
from megatron_bridge.cluster import Cluster
from megatron_bridge.parallel import GeneratorLayout, TrainerLayout


def _make_config(trainer: TrainerLayout, generator: GeneratorLayout) -> RunConfig:
    return RunConfig(
        trainer=TrainerConfig(layout=trainer), generator=GeneratorConfig(layout=generator)
    )


def _make_placement(devices: int = 4, **extra: int) -> Placement:
    config = _make_config(TrainerLayout(tp=2, pp=2, dp=2), GeneratorLayout(tp=2, replicas=2))
    return place(config, devices, **extra)


def test_ranks_fill_the_hosts_in_order_and_the_reward_rank_sits_beside_the_last():
    placement = _make_placement()
    assert [seat.host for seat in placement.seats] == [0] * 4 + [1] * 4 + [2] * 5
    assert [seat.local_rank for seat in placement.seats] == [0, 1, 2, 3] * 3 + [4]
    # Megatron's order: tensor parallel fastest, then data parallel, then stages.
    assert [seat.parts for seat in placement.seats[:8:2]] == [
        ("trainer stage 0 dp 0",),
        ("trainer stage 0 dp 1",),
        ("trainer stage 1 dp 0",),
        ("trainer stage 1 dp 1",),
    ]
    assert placement.seats[8].parts == ("generator 0",)
    assert placement.seats[10].parts == ("generator 1",)
    assert placement.seats[12].parts == ("reward",)


def test_hosts_are_those_by_which_the_weights_are_planned():
    placement = _make_placement()
    planned = Cluster(ranks_per_host=4, nics_per_host=4).seats(12)
    assert [(seat.host, seat.local_rank) for seat in placement.seats[:12]] == list(planned)


def test_colocated_ranks_are_both():
    config = _make_config(TrainerLayout(tp=2), GeneratorLayout(tp=1, replicas=2))
    config = replace(config, placement=Colocation.COLOCATED, mode=Mode.SYNC)
    placement = place(config, 2)
    assert placement.num_hosts == 1
    assert placement.seats[1].parts == ("trainer stage 0 dp 0", "generator 1")
    assert picture(placement) == [
        "host    0 | 0 trainer stage 0 dp 0 + generator 0 | "
        "1 trainer stage 0 dp 0 + generator 1 | 2 reward"
    ]


@pytest.mark.parametrize(
    ("trainer", "devices", "aligned"),
    [
        (TrainerLayout(tp=2, pp=2, dp=2), 4, True),
        (TrainerLayout(tp=2, pp=3, dp=1), 4, False),  # stage 1 on devices 2-3, stage 2 on 0-1
        (TrainerLayout(tp=2, pp=2, dp=1), 4, True),  # both on one host
    ],
)
def test_stages_that_are_whole_hosts_are_rail_aligned(
    trainer: TrainerLayout, devices: int, aligned: bool
):
    config = _make_config(trainer, GeneratorLayout(tp=1, replicas=1))
    assert place(config, devices).rail_aligned is aligned


def test_a_replica_larger_than_a_host_gets_whole_hosts():
    config = _make_config(TrainerLayout(tp=4), GeneratorLayout(tp=8, replicas=2))
    placement = place(config, 4)
    assert (placement.num_hosts, placement.hosts_per_replica) == (5, 2)
    assert placement.seats[4].host == 1
    assert placement.seats[12].host == 3


@pytest.mark.parametrize(
    ("trainer", "generator", "words"),
    [
        (TrainerLayout(tp=8), GeneratorLayout(), ["trainer.layout.tp is 8", "ranks 0 to 7"]),
        (TrainerLayout(tp=3, dp=2), GeneratorLayout(), ["tp is 3", "ranks 3 to 5"]),
        (TrainerLayout(tp=1), GeneratorLayout(tp=4), ["replica 0", "1 to 4", "2 hosts of 4"]),
        (TrainerLayout(tp=2), GeneratorLayout(tp=8), ["replica 0", "2 to 9", "3 hosts"]),
        (TrainerLayout(tp=4), GeneratorLayout(tp=6), ["replica 0", "4 to 9"]),
    ],
)
def test_what_would_cross_hosts_is_refused(
    trainer: TrainerLayout, generator: GeneratorLayout, words: list[str]
):
    with pytest.raises(ConfigError) as caught:
        place(_make_config(trainer, generator), 4)
    assert all(word in str(caught.value) for word in words), caught.value


def test_too_few_hosts_are_refused_with_their_spares():
    assert _make_placement(num_hosts=4, spare_hosts=1).spare_hosts == 1
    with pytest.raises(ConfigError, match=r"need 3 hosts of 4, with 2 spare 5; .* has 4"):
        _make_placement(num_hosts=4, spare_hosts=2)


def test_a_large_picture_shows_both_ends_of_each_executor():
    config = _make_config(TrainerLayout(tp=8, pp=16, dp=4), GeneratorLayout(tp=16, replicas=32))
    lines = picture(place(config, 8, spare_hosts=3), most_hosts=4)
    assert lines == [
        "host    0 | 0-7 trainer stage 0 dp 0",
        "host    1 | 0-7 trainer stage 0 dp 1",
        "     ... | 60 more",
        "host   62 | 0-7 trainer stage 15 dp 2",
        "host   63 | 0-7 trainer stage 15 dp 3",
        "host   64 | 0-7 generator 0",
        "host   65 | 0-7 generator 0",
        "     ... | 60 more",
        "host  126 | 0-7 generator 31",
        "host  127 | 0-7 generator 31 | 8 reward",
        "   spare | 3 more",
    ]
