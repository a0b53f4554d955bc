"""Fixtures: a cluster of namespaces on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.slurm import NODES, Slurm, why_no_slurm

from tools.cluster.netns import Cluster, why_not

LONGEST = (
    "test_strangers_long",
    "test_launched_hosts",
    "test_join_leave",
    "test_host_lost",
    "test_slurm_run",
    "test_episode_hosts_by_ssh",
    "test_quickstart",
    "test_partitions",
    "test_clocks",
)
"""Modules whose tests take minutes."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest tests first, so that with several workers none ends long after the others."""
    if hasattr(config, "workerinput"):
        order = {name: at for at, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip with the reason if no cluster can be made."""
    if reason := why_not():
        pytest.skip(f"no cluster of namespaces here: {reason}")


@pytest.fixture
def cluster(namespaces: None, tmp_path: Path) -> Iterator[Cluster]:
    """The head and the hosts a, b and c. They share only ``tmp_path/shared`` of the test's folder."""
    (tmp_path / "shared").mkdir()
    with Cluster(shared=[tmp_path / "shared"]) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Under /tmp, which differs on each host but the head."""
    made = tmp_path / "alone"
    made.mkdir()
    return made


@pytest.fixture
def slurm(namespaces: None, tmp_path: Path) -> Iterator[Slurm]:
    """SLURM on the nodes n1 and n2, with commands on the head; all of them share ``slurm.shared``."""
    if reason := why_no_slurm():
        pytest.skip(f"no SLURM here: {reason}")
    (tmp_path / "shared").mkdir()
    with Cluster(NODES, shared=[tmp_path / "shared"]) as made:
        yield Slurm(made, tmp_path / "shared")
