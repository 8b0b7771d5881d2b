"""The cost model against closed forms on worlds small enough to count by hand."""

import dataclasses
from pathlib import Path

import pytest

from megatron_bridge.box import Box
from megatron_bridge.cluster import Cluster, load_cluster
from megatron_bridge.cost import choose_plan, costed_plans, floors, link_loads, predict
from megatron_bridge.errors import PlanError
from megatron_bridge.flows import Forwarding
from megatron_bridge.plan import PlanPolicy, TransferPlan, plan
from megatron_bridge.side import Block, Side
from megatron_bridge.spec import LocalParam, Shard

ROWS, COLUMNS = 1024, 256
NBYTES = ROWS * COLUMNS * 4
APART = Cluster(nic_bytes_per_second=1e6, nic_efficiency=0.5, message_seconds=0, sync_seconds=0)
POLICY = PlanPolicy(message_bytes=NBYTES // 16, alone_bytes=1, forward_bytes=1)


def _side(*ranks: int) -> Side:
    """Return replicas that all hold one matrix."""
    box = Box.of_shape((ROWS, COLUMNS))
    shard = Shard(tensor="t", box=box, param="p", local=box)
    param = LocalParam(name="p", shape=(ROWS, COLUMNS), shards=(shard,))
    return Side((Block(canonical="", local="", variants=((param,),), ranks=(ranks,)),))


def _plan(sources: int, targets: int, **policy: object) -> TransferPlan:
    changed = dataclasses.replace(POLICY, **policy)  # type: ignore[arg-type]
    ranks = range(sources, sources + targets)
    return plan(_side(*range(sources)), _side(*ranks), changed)


def test_one_nic_carries_every_copy() -> None:
    whole = _plan(1, 3)
    found = predict(whole, whole.load(), APART)
    assert found.nic_seconds == pytest.approx(3 * NBYTES / 0.5e6)
    assert found.seconds == found.nic_seconds
    floor = floors(whole, APART)
    assert floor.receiver == pytest.approx(NBYTES / 1e6)
    assert floor.sender_unicast == pytest.approx(3 * NBYTES / 1e6)
    assert floor.sender_multicast == pytest.approx(NBYTES / 1e6)


def test_messages_and_the_handshake_take_their_time() -> None:
    whole = _plan(1, 3)
    cluster = dataclasses.replace(APART, message_seconds=0.01, sync_seconds=0.2)
    found = predict(whole, whole.load(), cluster)
    assert found.message_seconds == pytest.approx(3 * 16 * 0.01)  # the source sends all
    assert len(whole.messages(0)) == 3 * 16
    assert found.seconds == pytest.approx(found.nic_seconds + 0.48 + 0.2)


def test_ranks_of_a_host_share_its_nics() -> None:
    cluster = dataclasses.replace(APART, ranks_per_host=2)
    whole = _plan(2, 2)
    loads = link_loads(whole.load(), cluster)
    assert loads.nics == {(0, 0, "out"): 2 * NBYTES, (1, 0, "in"): 2 * NBYTES}
    one_each = dataclasses.replace(cluster, nics_per_host=2)
    assert predict(whole, whole.load(), one_each).nic_seconds == pytest.approx(NBYTES / 0.5e6)
    assert predict(whole, whole.load(), cluster).nic_seconds == pytest.approx(NBYTES / 0.25e6)


def test_replicas_on_the_same_host_are_served_over_its_own_links() -> None:
    # Hosts of three ranks: source 0, source 1 and target 2; target 3 alone.
    cluster = dataclasses.replace(APART, ranks_per_host=3, local_bytes_per_second=4e6)
    seats = cluster.seats(4)
    blind, seeing = _plan(2, 2), _plan(2, 2, seats=seats)
    for whole in (blind, seeing):
        loads = link_loads(whole.load(), cluster)
        assert loads.hosts == {0: NBYTES}
        assert loads.nics == {(0, 0, "out"): NBYTES, (1, 0, "in"): NBYTES}
    found = predict(seeing, seeing.load(), cluster)
    assert found.local_seconds == pytest.approx(NBYTES / 4e6)


def test_sources_prefer_their_rail() -> None:
    cluster = dataclasses.replace(APART, ranks_per_host=2, nics_per_host=2)
    # Targets in the order of the rails 1, 0: plain order would cross them.
    source, target = _side(0, 1), _side(3, 2)
    crossed = plan(source, target, POLICY).load().pairs
    straight = plan(source, target, dataclasses.replace(POLICY, seats=cluster.seats(4)))
    assert dict(crossed) == {(0, 3): NBYTES, (1, 2): NBYTES}
    assert dict(straight.load().pairs) == {(0, 2): NBYTES, (1, 3): NBYTES}


def test_all_on_one_host_is_bound_by_its_memory_and_cores() -> None:
    cluster = Cluster(
        ranks_per_host=8,
        nic_bytes_per_second=1.0,
        local_bytes_per_second=1e6,
        host_bytes_per_second=1.5e6,
        message_seconds=0,
        sync_seconds=0,
    )
    whole = _plan(2, 2)
    found = predict(whole, whole.load(), cluster)
    assert found.nic_seconds == 0
    assert found.local_seconds == pytest.approx(NBYTES / 1e6)
    assert found.host_seconds == pytest.approx(2 * NBYTES / 1.5e6)
    assert found.seconds == found.host_seconds
    # Each of the two copies is packed and unpacked, by two cores, which the link needs as well.
    cores = dataclasses.replace(cluster, pack_bytes_per_second=2e6, cores_per_host=2)
    busy = predict(whole, whole.load(), cores)
    assert busy.host_seconds == pytest.approx(found.host_seconds + 4 * NBYTES / 4e6)
    assert busy.pack_seconds == pytest.approx(2 * (NBYTES // 16) / 2e6)


def test_a_ring_of_three_sends_one_copy_and_fills() -> None:
    whole = _plan(1, 3, forwarding=Forwarding.RING)
    load = whole.load()
    assert load.sent[0] == NBYTES
    for rank in (1, 2, 3):
        assert load.received[rank] == NBYTES
        assert load.sent[rank] == pytest.approx(NBYTES * 2 / 3, rel=0.01)
    found = predict(whole, load, APART)
    assert found.nic_seconds == pytest.approx(NBYTES / 0.5e6)
    assert found.fill_seconds == pytest.approx(
        2 * (NBYTES // 64) / 0.5e6
    )  # its messages are smaller


def test_forwarding_is_chosen_where_senders_are_the_limit() -> None:
    many = choose_plan(_side(0), _side(1, 2, 3, 4), POLICY, APART)
    assert many.policy.forwarding is not Forwarding.NONE
    one = choose_plan(_side(0), _side(1), POLICY, APART)
    assert one.policy.forwarding is Forwarding.NONE
    found = costed_plans(_side(0), _side(1, 2, 3, 4), POLICY, APART)
    assert set(found) == set(Forwarding)
    slowest = found[Forwarding.NONE].prediction.seconds
    assert slowest == pytest.approx(4 * NBYTES / 0.5e6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ranks_per_host: 0", "ranks_per_host is 0"),
        ("nic_bytes_per_second: 0", "nic_bytes_per_second is 0"),
        ("nic_efficiency: 1.5", "at most 1"),
        ("sync_seconds: -1", "sync_seconds is -1"),
        ("{ranks_per_host: 4, nics_per_host: 3}", "do not divide"),
        ("nics: 3", "nics"),
        ("name: [", "cluster.yaml"),
    ],
)
def test_a_bad_cluster_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text + "\n")
    with pytest.raises(PlanError, match=words):
        load_cluster(file)
