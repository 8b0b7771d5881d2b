"""The Slurm that all tests of this folder share: started when the first needs it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import CONTROLLER, NODE, Slurm, missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A controller; its virtual nodes do not run."""
    if lacking := missing(CONTROLLER):
        pytest.skip(f"needs {', '.join(lacking)}")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def nodes(slurm: Slurm) -> Slurm:
    """The same controller with nodes that run jobs."""
    if lacking := missing(NODE):
        pytest.skip(f"needs {', '.join(lacking)}")
    if os.geteuid() != 0:
        pytest.skip("only root can give nodes names of their own")
    slurm.start_nodes()
    return slurm
