"""Which hosts measure their links together, and which of them the rates name."""

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from launch.preflight.links import ALL, HostRates, Rate, link_faults, notes, rounds
from launch.site import Site, load_site

GOOD, SLOW = 45e9, 5e9  # of a NIC that is to reach 46 GB/s, and 0.7 of that at least


@cache
def _site() -> Site:
    return load_site(Path(__file__).parents[3] / "configs" / "clusters" / "dgx_h100.yaml")


def _measured(num_hosts: int, slow: set[str], most_rounds: int = 99) -> dict[str, HostRates]:
    """Return rates as hosts of which ``slow`` have a bad NIC would measure them."""
    names = tuple(f"n{host}" for host in range(num_hosts))
    met: dict[str, list[str]] = {name: [] for name in names}
    for first, second in itertools.chain(*rounds(num_hosts, most_rounds)):
        met[names[first]].append(names[second])
        met[names[second]].append(names[first])
    return {
        name: HostRates(
            tested=names,
            rates=tuple(
                Rate(peer=peer, nic=0, bytes_per_second=SLOW if slow & {name, peer} else GOOD)
                for peer in peers
            ),
        )
        for name, peers in met.items()
    }


@pytest.mark.parametrize("num_hosts", range(2, 12))
def test_everybody_meets_everybody_once_and_one_at_a_time(num_hosts: int):
    plan = rounds(num_hosts, 99)
    assert len(plan) == num_hosts - 1 + num_hosts % 2
    for pairs in plan:
        hosts = list(itertools.chain(*pairs))
        assert len(hosts) == len(set(hosts)) == num_hosts - num_hosts % 2
    assert sorted(itertools.chain(*plan)) == list(itertools.combinations(range(num_hosts), 2))


def test_a_thousand_hosts_meet_in_as_many_rounds_as_are_asked_for():
    assert [len(pairs) for pairs in rounds(1000, 4)] == [500] * 4


def test_one_host_meets_nobody():
    assert list(itertools.chain(*rounds(1, 4))) == []


@pytest.mark.parametrize(
    ("num_hosts", "slow", "most_rounds"),
    [
        (8, set(), 99),
        (2, {"n1"}, 99),
        (3, {"n0"}, 99),
        (3, {"n2"}, 99),
        (4, {"n0"}, 99),
        (5, {"n1", "n3"}, 99),
        (8, {"n2", "n5", "n7"}, 99),
        (16, {"n9"}, 4),
        (16, {"n9", "n0"}, 4),
    ],
)
def test_slow_hosts_are_named_and_their_peers_are_not(
    num_hosts: int, slow: set[str], most_rounds: int
):
    faults = link_faults(_measured(num_hosts, slow, most_rounds), _site())
    assert {fault.host for fault in faults} == slow
    assert len(faults) == len(slow)


def test_of_two_hosts_the_later_is_named():
    assert [fault.host for fault in link_faults(_measured(2, {"n0"}), _site())] == ["n1"]


def test_the_reason_says_how_slow_on_which_nic_and_with_whom():
    (fault,) = link_faults(_measured(4, {"n2"}), _site())
    assert fault.reason == (
        "slow links to 3 of 3 hosts: 5 GB/s with n0 on NIC 0, expected at least 32.2 of 46"
    )


def test_one_slow_nic_of_eight_is_enough():
    measured = _measured(4, set())
    rails = [Rate(peer=peer, nic=6, bytes_per_second=SLOW) for peer in ("n0", "n1", "n3")]
    measured["n2"] = replace(measured["n2"], rates=(*measured["n2"].rates, *rails))
    (fault,) = link_faults(measured, _site())
    assert fault.host == "n2"
    assert "NIC 6" in fault.reason


def test_a_slow_link_between_two_good_hosts_names_nobody_and_is_told():
    measured = _measured(6, set())
    bad = Rate(peer="n4", nic=0, bytes_per_second=SLOW)
    measured["n1"] = replace(measured["n1"], rates=(*measured["n1"].rates, bad))
    assert link_faults(measured, _site()) == []
    assert list(notes(measured, _site())) == ["the link between n1 and n4 is slow: 5 GB/s a NIC"]


def test_a_link_that_fails_is_slower_than_any_and_tells_why():
    measured = _measured(4, set())
    failed = [
        Rate(peer=peer, nic=0, bytes_per_second=0, error="timed out") for peer in ("n0", "n1", "n2")
    ]
    measured["n3"] = replace(measured["n3"], rates=tuple(failed))
    (fault,) = link_faults(measured, _site())
    assert fault.host == "n3"
    assert "no GB/s with n0" in fault.reason
    assert "(timed out)" in fault.reason


def test_a_host_that_took_part_and_wrote_no_rates_is_named_and_its_peers_are_not():
    measured = _measured(4, {"n1"})
    del measured["n1"]
    assert [(fault.host, fault.check) for fault in link_faults(measured, _site())] == [
        ("n1", "links")
    ]


def test_a_host_that_began_and_did_not_end_is_named_like_one_that_did_not_begin():
    measured = _measured(4, {"n1"})
    measured["n1"] = replace(measured["n1"], rates=())
    assert [fault.host for fault in link_faults(measured, _site())] == ["n1"]


def test_a_measurement_that_fails_on_most_hosts_names_nobody_and_is_told():
    measured = {
        host: replace(one, rates=()) if host != "n0" else one
        for host, one in _measured(4, set()).items()
    }
    assert link_faults(measured, _site()) == []
    assert list(notes(measured, _site())) == ["links: 3 of 4 hosts did not end their measurement"]


def test_a_slow_exchange_among_all_is_told():
    measured = _measured(4, set())
    among_all = Rate(peer=ALL, nic=0, bytes_per_second=SLOW)
    measured["n0"] = replace(measured["n0"], rates=(*measured["n0"].rates, among_all))
    assert link_faults(measured, _site()) == []
    assert list(notes(measured, _site())) == [
        "all-reduce over all tested hosts is slow: 5 GB/s a NIC"
    ]


def test_where_nothing_was_measured_there_is_no_fault():
    assert link_faults({}, _site()) == []
