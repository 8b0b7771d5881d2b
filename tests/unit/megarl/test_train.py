"""What a rank reads of its environment."""

import pytest

from megarl.train import count_restarts


@pytest.mark.parametrize(
    ("environment", "restarts"),
    [
        ({}, 0),
        ({"SLURM_RESTART_COUNT": "3"}, 3),
        ({"MEGARL_RESTARTS": "1", "SLURM_RESTART_COUNT": "3"}, 1),
    ],
)
def test_restarts_are_our_launchers_or_slurms(
    environment: dict[str, str], restarts: int, monkeypatch: pytest.MonkeyPatch
):
    for name in ("MEGARL_RESTARTS", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert count_restarts() == restarts
