from megarl.topology import GENERATOR, REWARD, TRAINER, rl_topology
from megatron_bridge.parallel import GeneratorLayout, TrainerCoordinate, TrainerLayout


def test_ranks_follow_megatrons_order_tp_cp_dp_pp() -> None:
    # The example of Megatron's parallel_state docstring: 16 ranks, tp 2, pp 4, so dp 2:
    # dp groups [g0, g2], [g1, g3], [g4, g6] ...; tp groups [g0, g1] ...; pp group [g0, g4, g8, g12].
    layout = TrainerLayout(tp=2, pp=4, dp=2)
    assert layout.world_size == 16
    assert layout.coordinate(2) == TrainerCoordinate(tp=0, cp=0, dp=1, pp=0)
    assert layout.coordinate(1) == TrainerCoordinate(tp=1, cp=0, dp=0, pp=0)
    assert layout.coordinate(12) == TrainerCoordinate(tp=0, cp=0, dp=0, pp=3)
    assert all(layout.rank_of(layout.coordinate(rank)) == rank for rank in range(16))


def test_every_rank_has_one_place_one_world_and_one_group() -> None:
    topology = rl_topology(TrainerLayout(tp=2, dp=2), GeneratorLayout(tp=2, replicas=3))
    assert topology.size == 4 + 6 + 1
    for rank in range(topology.size):
        (place,) = topology.places_of(rank)
        assert sum(rank in world for world in place.worlds) == 1
        assert sum(rank in group for group in place.groups) == 1


def test_a_data_parallel_group_holds_the_ranks_of_one_part_head_first() -> None:
    topology = rl_topology(TrainerLayout(tp=2, dp=2, pp=2), GeneratorLayout())
    # dp 0 has the tensor-parallel pairs (0, 1) of stage 0 and (4, 5) of stage 1.
    assert topology.place(TRAINER).groups == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert topology.place(TRAINER).heads == (0, 2)


def test_colocated_generators_have_the_trainers_ranks() -> None:
    topology = rl_topology(TrainerLayout(tp=2), GeneratorLayout(replicas=2), colocated=True)
    assert topology.size == 3
    assert topology.place(TRAINER).worlds == ((0, 1),)
    assert topology.place(GENERATOR).worlds == ((0,), (1,))
    assert topology.place(REWARD).ranks == (2,)
    assert [place.name for place in topology.places_of(1)] == [TRAINER, GENERATOR]
    assert [topology.label(rank) for rank in range(3)] == ["trainer.0", "trainer.1", "reward.0"]


def test_replicas_are_worlds_of_their_own_and_labels_count_within_the_executor() -> None:
    topology = rl_topology(TrainerLayout(), GeneratorLayout(tp=2, replicas=2))
    assert topology.place(GENERATOR).worlds == ((1, 2), (3, 4))
    assert [topology.label(rank) for rank in (0, 3, 5)] == ["trainer.0", "generator.2", "reward.0"]
    assert [place.name for place in topology.places_of(5)] == [REWARD]
