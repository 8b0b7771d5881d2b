"""The live table and its plain form, rendered to a string."""

import io

from rich.console import Console

from megarl.observe.terminal import TerminalView

RL_ROW = {
    "rollout/reward": 0.512,
    "rollout/response_length_mean": 23.45,
    "perf/tokens_per_second": 12345.6,
    "trainer/idle_ratio": 0.07,
    "generator/idle_ratio": 0.12,
    "timing_s/update_weights": 0.0352,
    "staleness/mean": 0.98,
    "timing_s/step": 2.0,
}


def _make_console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=140, force_terminal=terminal, color_system=None)


def _shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _last_table(console: Console) -> list[list[str]]:
    """The cells of the rows of the table drawn last."""
    table = _shown(console).rsplit("┡", 1)[1]
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in table.splitlines()
        if line.count("│") > 2
    ]


def test_a_terminal_shows_every_column_of_a_step():
    console = _make_console(terminal=True)
    view = TerminalView(console)
    view.update([{"step": 40, "val/accuracy": 0.25, **RL_ROW}, {"step": 41, **RL_ROW}], 100)
    view.close()
    for heading in ("step", "reward", "accuracy", "length", "tokens/s", "trainer idle"):
        assert heading in _shown(console)
    for heading in ("generator idle", "sync ms", "staleness", "ETA"):
        assert heading in _shown(console)
    common = ["23.4", "12,346", "7%", "12%", "35.2", "0.98"]
    assert _last_table(console) == [
        ["40/100", "0.512", "0.250", *common, "0:02:00"],
        ["41/100", "0.512", "-", *common, "0:01:58"],
    ]


def test_a_terminal_keeps_the_last_fifteen_steps():
    console = _make_console(terminal=True)
    view = TerminalView(console)
    for step in range(1, 21):
        view.update([{"step": step, **RL_ROW}], 20)
    view.close()
    assert [cells[0] for cells in _last_table(console)] == [f"{k}/20" for k in range(6, 21)]


def test_a_step_that_comes_again_replaces_what_followed_it():
    console = _make_console(terminal=True)
    view = TerminalView(console)
    view.update([{"step": step, **RL_ROW} for step in (1, 2, 3)], 9)
    view.update([{"step": 2, **RL_ROW, "rollout/reward": 0.75}], 9)
    view.close()
    assert [cells[:2] for cells in _last_table(console)] == [["1/9", "0.512"], ["2/9", "0.750"]]


def test_elsewhere_each_step_is_one_plain_line():
    console = _make_console(terminal=False)
    view = TerminalView(console)
    view.update([{"step": 1, **RL_ROW}], 10)
    view.update([], 10)
    view.update([{"step": 2, "val/accuracy": 0.5, "timing_s/step": 4.0, "actor/loss": None}], 10)
    view.close()
    assert _shown(console).splitlines() == [
        "step 1/10  reward 0.512  length 23.4  tokens/s 12,346  trainer idle 7%  "
        "generator idle 12%  sync ms 35.2  staleness 0.98  ETA 0:00:18",
        "step 2/10  accuracy 0.500  ETA 0:00:24",  # 8 steps at the mean of 2 s and 4 s
    ]


def test_supervised_training_has_its_own_columns():
    console = _make_console(terminal=False)
    row = {"step": 3, "sft/loss": 1.23456, "actor/lr": 1e-4, "perf/tokens_per_second": 900.0}
    TerminalView(console).update([row], 10)
    assert _shown(console) == "step 3/10  loss 1.2346  lr 1.00e-04  tokens/s 900\n"
