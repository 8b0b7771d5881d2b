"""Who is left out of a job, and why: reports of hosts in, faults out."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from launch.preflight.allocation import Allocation
from launch.preflight.judge import Fault, find_faults, majority, reasons_by_host
from launch.preflight.report import Report
from launch.preflight.steps import choose, write_verdict
from launch.site import Site, load_site

CLUSTER = Path(__file__).parents[3] / "configs" / "clusters" / "dgx_h100.yaml"
HOSTS = ("n1", "n2", "n3", "n4")
# What nvidia-smi prints of an idle H100: name, driver, MiB used, ECC, highest clock, slowdown.
GPU = "NVIDIA H100 80GB HBM3, 550.54.15, 3, 0, 1980, Not Active"


@cache
def _dgx() -> Site:
    return load_site(CLUSTER)


def _site(**changes: object) -> Site:
    site = _dgx()
    return replace(site, preflight=replace(site.preflight, **changes))


def _report(host: str, **changes: object) -> Report:
    good = Report(
        host=host,
        first="n1",
        gpu_lines=(GPU,) * 8,
        versions={"torch": "2.13.0", "numpy": "2.4.6"},
        open_files=1 << 20,
        shm_bytes=512 << 30,
        memory_bytes=1800 << 30,
    )
    return replace(good, **changes)


def _faults(*changed: Report, hosts: tuple[str, ...] = HOSTS, **site: object) -> list[Fault]:
    reports = {host: _report(host) for host in hosts} | {one.host: one for one in changed}
    return find_faults(hosts, reports, _site(**site))


def test_hosts_that_show_what_the_cluster_file_says_have_no_fault():
    assert _faults() == []


@pytest.mark.parametrize(
    ("changes", "check", "reason"),
    [
        ({"master": "n1:29500 not reached in 120 s: refused"}, "master", "not reached in 120 s"),
        ({"shared": "/runs/x cannot be written: Read-only"}, "shared", "cannot be written"),
        ({"ahead_seconds": -1.5}, "clock", "1.5 s ahead of the others', 1 s allowed"),
        ({"ahead_seconds": 7200.0}, "clock", "7.2e+03 s behind the others'"),
        (
            {"gpu_error": "`nvidia-smi` ended with 9: no devices"},
            "gpus",
            "ended with 9: no devices",
        ),
        ({"gpu_lines": (GPU,) * 7}, "gpus", "7 GPUs, expected 8"),
        ({"gpu_lines": ()}, "gpus", "0 GPUs, expected 8"),
        (
            {"gpu_lines": (*[GPU] * 7, GPU.replace(" 0,", " 3,"))},
            "gpus",
            "GPU 7: 3 uncorrected ECC",
        ),
        ({"gpu_lines": (GPU.replace("Not Active", "Active"), *[GPU] * 7)}, "gpus", "slowed down"),
        (
            {"gpu_lines": (GPU.replace(" 3,", " 40960,"), *[GPU] * 7)},
            "gpus",
            "40.0 GiB of its memory",
        ),
        (
            {"gpu_lines": (*[GPU] * 7, GPU.replace(" 0,", " [GPU requires reset],"))},
            "gpus",
            "GPU 7: ecc_errors is '[GPU requires reset]', expected a number",
        ),
        (
            {"gpu_lines": (GPU.replace("550.54.15", "535.1"),) * 8},
            "versions",
            "driver is 535.1, 550.54.15 on 3 of 4 hosts",
        ),
        (
            {"gpu_lines": (GPU.replace("1980", "1410"), *[GPU] * 7)},
            "versions",
            "max_clock_mhz is 1410 and 1980, 1980 on 3 of 4 hosts",
        ),
        (
            {"versions": {"torch": "2.12.0", "numpy": "2.4.6"}},
            "versions",
            "torch is 2.12.0, 2.13.0 on 3 of 4 hosts",
        ),
        ({"open_files": 1024}, "limits", "open files: 1.02e+03, expected at least 4096"),
        ({"shm_bytes": 64 << 20}, "limits", "/dev/shm: 0.0625 GiB, expected at least 1 GiB"),
        ({"memory_bytes": 10 << 30}, "limits", "free memory: 10 GiB, expected at least 16 GiB"),
    ],
)
def test_a_fault_is_named_with_its_host_and_reason(changes: dict, check: str, reason: str):
    (fault,) = _faults(_report("n3", **changes), memory_gib=16.0)
    assert (fault.host, fault.check) == ("n3", check)
    assert reason in fault.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"ahead_seconds": 0.9},
        {"ahead_seconds": 1.4, "round_trip_seconds": 1.0},  # half of which may be all of it
        {"open_files": -1},  # RLIM_INFINITY
        {"gpu_lines": (*[GPU] * 7, GPU.replace(" 0,", " [N/A],"))},
        {"gpu_lines": (GPU,) * 9},
    ],
)
def test_what_is_allowed_or_not_known_is_no_fault(changes: dict):
    assert _faults(_report("n3", **changes)) == []


def test_a_list_of_names_alone_counts_the_gpus_of_another_vendor():
    hosts = [_report(host, gpu_lines=("MI300X",) * (7 if host == "n2" else 8)) for host in HOSTS]
    (fault,) = _faults(*hosts)
    assert (fault.host, fault.reason) == ("n2", "7 GPUs, expected 8")


def test_a_host_without_a_report_is_named():
    reports = {host: _report(host) for host in HOSTS if host != "n4"}
    (fault,) = find_faults(HOSTS, reports, _site(timeout_seconds=90.0))
    assert (fault.host, fault.check) == ("n4", "report")
    assert "no report within 90 s" in fault.reason


def test_a_first_host_that_most_do_not_reach_is_the_bad_one():
    missed = [_report(host, master=f"n1 not reached by {host}") for host in ("n2", "n4")]
    (fault,) = _faults(*missed)
    assert fault.host == "n1"
    assert "2 of 3 hosts did not meet it: n1 not reached by n2" in fault.reason


def test_of_two_hosts_that_do_not_meet_the_second_is_the_bad_one():
    (fault,) = _faults(_report("n2", master="not reached"), hosts=("n1", "n2"))
    assert fault.host == "n2"


def test_a_first_host_that_could_not_listen_is_the_bad_one():
    missed = [_report(host, master="refused") for host in HOSTS[1:]]
    (fault,) = _faults(_report("n1", master="cannot listen on port 1"), *missed)
    assert (fault.host, fault.reason) == ("n1", "cannot listen on port 1")


def test_the_first_hosts_clock_is_wrong_where_all_others_agree():
    (fault,) = _faults(*(_report(host, ahead_seconds=30.0) for host in HOSTS[1:]))
    assert fault.host == "n1"
    assert "30 s ahead of" in fault.reason


def test_hosts_of_another_group_than_the_first_host_are_judged_by_what_they_saw_of_it():
    group = ("n5", "n6", "n7")
    late = [_report(host, ahead_seconds=9.0) for host in group[:1]]
    missed = [_report(host, master="not reached") for host in group[1:2]]
    faults = _faults(*late, *missed, hosts=group)
    assert [(fault.host, fault.check) for fault in faults] == [("n5", "clock"), ("n6", "master")]


@pytest.mark.parametrize(
    ("values", "right"),
    [("aab", "a"), ("baa", "a"), ("ab", "a"), ("bbaac", "b"), ("c", "c")],
)
def test_the_majority_is_right_and_else_the_earlier(values: str, right: str):
    assert majority(list(values)) == right


def test_spares_take_the_places_of_bad_hosts_in_node_order():
    faults = [
        Fault(host="n2", check="gpus", reason="x"),
        Fault(host="n2", check="clock", reason="y"),
    ]
    assert choose(HOSTS, faults, 2) == ("n1", "n3")
    assert choose(HOSTS, faults, 4) == ("n1", "n3", "n4")
    assert reasons_by_host(faults) == {"n2": "x; y"}


def test_faults_come_in_the_order_of_hosts_and_checks():
    bad = [_report("n2", gpu_lines=(), master="no"), _report("n1", shm_bytes=0)]
    assert [(fault.host, fault.check) for fault in _faults(*bad)] == [
        ("n1", "limits"),
        ("n2", "master"),
        ("n2", "gpus"),
    ]


def test_groups_of_hosts_are_judged_one_by_one_and_measured_together(tmp_path: Path):
    trainers = Allocation(host="n1", hosts=("n1", "n2", "n3"), folder=tmp_path, address="", port=0)
    generators = replace(trainers, hosts=("n4", "n5"))
    write_verdict(trainers, [Fault(host="n1", check="gpus", reason="7 GPUs,\nexpected 8")], 1)
    assert (tmp_path / "hosts").read_text() == "n2\n"
    assert (tmp_path / "bad").read_text() == "n1\t7 GPUs, expected 8\n"
    write_verdict(generators, [], 2)
    assert (tmp_path / "hosts").read_text() == "n4\nn5\n"
    assert (tmp_path / "chosen").read_text() == "n2\nn4\nn5\n"
    assert (tmp_path / "good").read_text() == "n2\nn3\nn4\nn5\n"
