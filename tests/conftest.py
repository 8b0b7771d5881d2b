"""Which tests stay together where two workers share them (`make test`, pytest-xdist's loadgroup).

A file's tests do, for the fixtures that they share; whole runs are apart, as each takes many seconds, and
all tests of a Slurm share its daemons. Tests with a mark of their own are grouped by that.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the plugin reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if item.get_closest_marker("xdist_group") or folder == "e2e":
            continue
        group = folder if folder == "slurm" else item.path.relative_to(TESTS)
        item.add_marker(pytest.mark.xdist_group(str(group)))
