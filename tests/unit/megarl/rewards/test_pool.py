"""The pool survives whatever a reward function does, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.errors import ConfigError, RewardError
from megarl.rewards.pool import RewardItem, RewardPool

OBEY = "tests.unit.megarl.rewards.functions:obey"
WAIT_SECONDS = 20


@pytest.fixture
def make_pool() -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(path: str = OBEY, num_processes: int = 1, timeout_seconds: float = 20.0) -> RewardPool:
        pools.append(RewardPool(path, num_processes, timeout_seconds))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def _items(*answers: object) -> list[RewardItem]:
    return [RewardItem(prompt="p", response=f"r{i}", answer=str(a)) for i, a in enumerate(answers)]


def _wait_for_end(pid: int) -> None:
    """Wait until a process is gone (or a zombie); raise when it lives on."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([handle], [], [], WAIT_SECONDS)
    finally:
        os.close(handle)
    assert readable, f"process {pid} is still alive after {WAIT_SECONDS} s"


@pytest.mark.parametrize("num_processes", [1, 2])
def test_scores_come_back_in_the_order_of_the_items(
    make_pool: Callable[..., RewardPool], num_processes: int
) -> None:
    pool = make_pool(num_processes=num_processes)
    for size in (1, 700, 0, 3):
        result = pool.score(_items(*range(size)))
        assert result.scores == [float(i) for i in range(size)]
        assert (result.timeouts, result.errors, result.crashes) == (0, 0, 0)


def test_extra_reaches_the_function_and_extra_numbers_are_averaged(
    make_pool: Callable[..., RewardPool],
) -> None:
    items = [
        RewardItem(prompt="", response="", answer="extra", extra='{"weight": 2}', finished=True),
        RewardItem(prompt="", response="", answer="extra", extra='{"weight": 3}', finished=False),
        *_items(7),
    ]
    result = make_pool().score(items)
    assert result.scores == [2.0, 3.0, 7.0]
    assert result.metrics["reward/finished"] == 0.5
    assert result.metrics["reward/errors"] == 0.0


@pytest.mark.parametrize("stuck", ["sleep", "hold the interpreter lock"])
def test_a_stuck_call_costs_only_its_own_score(
    make_pool: Callable[..., RewardPool], stuck: str
) -> None:
    pool = make_pool(timeout_seconds=1.0)
    for _ in range(4):  # until the chunks are long
        pool.score(_items(*range(300)))
    started = time.monotonic()
    result = pool.score(_items(*range(100), stuck, *range(101, 200)))
    assert time.monotonic() - started < 10
    assert result.scores == [float(i) if i != 100 else 0.0 for i in range(200)]
    assert (result.timeouts, result.errors, result.crashes) == (1, 0, 0)
    assert result.metrics["reward/timeouts"] == 1.0
    assert pool.score(_items(5)).scores == [5.0]


@pytest.mark.parametrize("fatal", ["segfault", "exit"])
def test_a_crash_costs_only_its_own_score(make_pool: Callable[..., RewardPool], fatal: str) -> None:
    pool = make_pool(num_processes=2)
    for _ in range(4):
        pool.score(_items(*range(300)))
    result = pool.score(_items(*range(50), fatal, *range(51, 99), fatal))
    assert result.scores == [float(i) if i not in (50, 99) else 0.0 for i in range(100)]
    assert (result.timeouts, result.errors, result.crashes) == (0, 0, 2)


@pytest.mark.parametrize("wrong", ["raise", "nan", "text", "nothing", "no score", "reserved"])
def test_an_unusable_result_scores_zero_and_is_logged_once(
    make_pool: Callable[..., RewardPool], wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            result = pool.score(_items(1, wrong, wrong))
            assert result.scores == [1.0, 0.0, 0.0]
            assert (result.timeouts, result.errors, result.crashes) == (0, 2, 0)
    assert len(caplog.records) == 1
    assert "Traceback" in caplog.records[0].getMessage()


def test_a_batch_that_fails_wholly_raises_with_the_traceback(
    make_pool: Callable[..., RewardPool],
) -> None:
    pool = make_pool()
    with pytest.raises(RewardError, match="RuntimeError: no score for r0"):
        pool.score(_items("raise", "raise"))
    with pytest.raises(RewardError, match="exit code -11"):
        pool.score(_items("segfault"))
    assert pool.score(_items(4)).scores == [4.0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("arithmetic", "'module:function' or 'file.py:function'"),
        ("no.such.module:score", "importing no.such.module failed"),
        ("no/such/file.py:score", "no/such/file.py does not exist"),
        ("megarl.rewards.arithmetic:scoer", r"no function 'scoer', only \['score'\]"),
        ("tests.unit.megarl.rewards.functions:NOT_A_FUNCTION", "no function 'NOT_A_FUNCTION'"),
        ("tests.unit.megarl.rewards.functions:two_arguments", "prompt, response, answer, extra"),
    ],
)
def test_a_bad_path_is_refused_at_once(path: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        RewardPool(path, 1, 1.0)


def test_a_function_may_lie_in_a_file(make_pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    file = tmp_path / "math.py"  # a name that must not hide the standard library's
    file.write_text(
        "from __future__ import annotations\nimport dataclasses, math\n"
        "@dataclasses.dataclass\nclass Half:\n    value: float = math.cos(0) / 2\n"
        "def score(prompt, response, answer, extra):\n    return Half().value\n"
    )
    assert make_pool(f"{file}:score").score(_items("x")).scores == [0.5]
    file.write_text("import nothing_of_this_name\n")
    with pytest.raises(ConfigError, match="No module named 'nothing_of_this_name'"):
        RewardPool(f"{file}:score", 1, 1.0)


def test_a_module_that_ends_its_process_on_import_is_an_error(
    make_pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    file = tmp_path / "moody.py"
    file.write_text("def score(prompt, response, answer, extra):\n    return 1.0\n")
    pool = make_pool(f"{file}:score")
    assert pool.score(_items("x", "exit")).scores == [1.0, 1.0]
    file.write_text("import os\nos._exit(4)\n")
    pool._workers[0].process.kill()
    pool._workers[0].process.wait()
    with pytest.raises(RewardError, match="died while importing it, exit code 4"):
        pool.score(_items("x"))
    with pytest.raises(RewardError, match="closed"):
        pool.score(_items("x"))


def test_reward_processes_are_light_and_have_no_input(
    make_pool: Callable[..., RewardPool],
) -> None:
    assert make_pool().score(_items("torch", "input", 1)).scores == [0.0, 0.0, 1.0]


def test_long_texts_pass(make_pool: Callable[..., RewardPool]) -> None:
    text = "é\n" * 200_000  # far more than a socket buffers
    items = [RewardItem(prompt=text, response=text, answer=str(i)) for i in range(4)]
    assert make_pool().score(items).scores == [0.0, 1.0, 2.0, 3.0]


def test_a_process_that_died_between_batches_is_replaced(
    make_pool: Callable[..., RewardPool],
) -> None:
    pool = make_pool()
    pid = int(pool.score(_items("pid")).metrics["reward/pid"])
    os.kill(pid, signal.SIGKILL)
    _wait_for_end(pid)
    result = pool.score(_items(1, 2))
    assert result.scores == [1.0, 2.0]
    assert result.crashes == 0


def test_a_wish_to_stop_is_not_for_reward_processes(make_pool: Callable[..., RewardPool]) -> None:
    result = make_pool().score(_items("stop", 2))
    assert (result.scores, result.crashes) == ([1.0, 2.0], 0)


def test_close_ends_the_processes_and_what_they_started(
    make_pool: Callable[..., RewardPool],
) -> None:
    pool = make_pool()
    pids = [int(pool.score(_items(what)).metrics["reward/pid"]) for what in ("pid", "child")]
    pool.close()
    for pid in pids:
        _wait_for_end(pid)


PARENT = """
import sys, threading
from tests.unit.megarl.rewards.test_pool import OBEY, RewardPool, _items

pool = RewardPool(OBEY, 1, 600.0)
for what in ("pid", "child"):
    print(int(pool.score(_items(what)).metrics["reward/pid"]), flush=True)
pool.score(_items(sys.argv[1]))
threading.Event().wait()
"""


@pytest.mark.parametrize("what", ["sleep", "0"])
def test_nothing_outlives_a_killed_parent(what: str) -> None:
    command = [sys.executable, "-c", PARENT, what]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        try:
            pids = [int(parent.stdout.readline()) for _ in range(2)]
        finally:
            parent.kill()
        for pid in pids:
            _wait_for_end(pid)


def test_cheap_scores_are_cheap(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool("megarl.rewards.arithmetic:score")
    items = [RewardItem(prompt="1+1=?", response="1+1=2#2", answer="2")] * 512
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        pool.score(items)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.02, f"512 trivial scores took {min(seconds) * 1e3:.1f} ms at best"
