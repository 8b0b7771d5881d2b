from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from launch.liveness import Watchdog
from megarl.progress import Heartbeat, Progress, Status, read_progress, write_account


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _make_word(beat: int, what: str, *, step: int = 3, waiting: bool = False) -> Progress:
    status = Status(label="trainer.0", step=step, what=what, since=0.0, waiting=waiting)
    return Progress(beat=beat, status=status)


def _watch(words_of_rank, seconds: int, *, judge_busy: bool = True) -> tuple[Watchdog, _Clock]:
    """Let a watchdog with a timeout of 20 s look each second at ``words_of_rank(rank, second)``."""
    clock = _Clock()
    watchdog = Watchdog((0, 1), 20.0, judge_busy=judge_busy, clock=clock)
    for second in range(seconds):
        clock.now += 1.0
        watchdog.look({rank: words_of_rank(rank, second) for rank in (0, 1)})
    return watchdog, clock


def _one_waits_for(other):
    def words(rank: int, second: int) -> Progress | None:
        return _make_word(second, "waiting", waiting=True) if rank == 0 else other(second)

    return words


def test_a_rank_whose_heartbeat_stopped_is_silent_and_its_waiter_is_not() -> None:
    words = _one_waits_for(lambda second: _make_word(min(second, 5), f"span {min(second, 5)}"))
    assert _watch(words, 25)[0].silent() == ()
    watchdog, _ = _watch(words, 27)
    assert watchdog.silent() == (1,)
    assert "heartbeat stopped 21.0 s ago" in watchdog.describe(1)


def test_a_rank_that_beats_and_says_nothing_new_is_silent_unless_it_waits() -> None:
    words = _one_waits_for(lambda second: _make_word(second, "decode"))
    assert _watch(words, 20)[0].silent() == ()
    watchdog, _ = _watch(words, 22)
    assert watchdog.silent() == (1,)
    assert "it lives" in watchdog.describe(1)
    assert _watch(words, 500, judge_busy=False)[0].silent() == ()


def test_saying_the_same_again_is_progress() -> None:
    def words(rank: int, second: int) -> Progress:
        since = Status(label="generator.0", step=1, what="decode", since=float(second))
        return Progress(beat=second, status=since)

    assert _watch(words, 100)[0].silent() == ()


def test_before_the_first_tick_a_busy_rank_has_ten_minutes() -> None:
    words = _one_waits_for(lambda second: _make_word(second, "starting the engine", step=-1))
    assert _watch(words, 590)[0].silent() == ()
    assert _watch(words, 602)[0].silent() == (1,)


def test_a_rank_that_never_joins_is_suspected_when_a_peer_gives_up() -> None:
    watchdog, _ = _watch(_one_waits_for(lambda second: None), 21)
    assert watchdog.silent() == ()
    assert watchdog.suspects() == (1,)
    assert watchdog.describe(1) == "has not joined after 21.0 s"
    assert _watch(_one_waits_for(lambda second: None), 601)[0].silent() == (1,)


def test_after_an_expired_wait_the_suspect_is_who_lost_its_heartbeat_before_who_is_busy() -> None:
    def words(rank: int, second: int) -> Progress:
        return _make_word(min(second, 12) if rank == 1 else second, "train")

    assert _watch(words, 18)[0].suspects() == (1,)
    assert _watch(words, 13)[0].suspects() == (0, 1)  # both may stand in one collective


def _store(port: int = 0) -> TCPStore:
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=port == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=20),
    )


def test_a_rank_that_gives_up_writes_down_who_lives(tmp_path: Path) -> None:
    store = _store()
    said = Status(label="trainer.0", step=7, what="waiting in channel 'batch'", since=0.0)
    living, dead = (Heartbeat(_store(store.port), rank, lambda: said) for rank in (0, 1))
    living.start()
    dead.publish()
    first = read_progress(store, 0)
    try:
        path = tmp_path / "logs" / "failure.trainer.0.txt"
        labels = {0: "trainer.0", 1: "generator.0", 2: "reward.0"}
        write_account(path, store, labels, "no batch came")
        later = read_progress(store, 0)
    finally:
        living.stop()
    assert first is not None
    assert later is not None
    assert later.beat > first.beat
    assert later.status == said
    lines = path.read_text().splitlines()
    assert lines[1] == "no batch came"
    assert "channel 'batch'" in lines[3]
    assert "NO HEARTBEAT" not in lines[3]
    assert "NO HEARTBEAT" in lines[4]
    assert lines[5] == "  rank 2 (reward.0): never joined"
