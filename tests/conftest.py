"""Which tests stay together where two workers of pytest-xdist share them, as `make test` has it.

A file's tests do, for the fixtures that they share, and all that use a Slurm, for its daemons. Whole runs
are apart, as each takes many seconds, but for those that look at one run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling


def group_of(test: str) -> str:
    """Return the name of what ``test``, a node id, belongs to."""
    file = test.split("::")[0]
    folder = file.rpartition("/")[0]
    if folder == "tests/slurm":
        return folder
    if folder == "tests/e2e" and not file.endswith("test_quickstart.py"):
        return test
    return file


# Not by marks and --dist=loadgroup: version 3.8 loses its groups under pytest 9.2.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class _Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return _Scheduling(config, log)
