"""Hosts whose wall clocks differ and step, while a run trains over them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cluster.lost import launched as launched

from tools.waiting import wait_until
from tools.wall_clocks import WallClocks


@pytest.fixture
def clocks(cluster, monkeypatch):
    (folder,) = cluster.shared
    found = WallClocks(Path(folder))
    monkeypatch.setenv("PYTHONPATH", found.path)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead_s", [10.0, -10.0])
def test_i5_i7_actors_are_replaced_under_clocks_that_differ(clocks, cluster, launched, ahead_s):
    """Each has one restart. A rank dies, and with it the other; then a clock steps back and a replica dies."""
    for name in ("a", "b", "c"):
        clocks.set(ahead_s, name)
    run = launched(90, "--learner.ranks=2", max_restarts=1)
    run.wait_for_step(4)
    far = run.host_of("learner/1")
    assert far != "head"

    def kill(actor: str) -> None:
        (pid,) = (pid for pid, words in cluster[far].processes().items() if f"asyncrl {actor} " in words)
        os.kill(pid, signal.SIGKILL)

    def registered(actor: str) -> int:
        return run.log("controller-0").count(f'"actor": "{actor}", "address": "tcp')

    kill("learner/1")
    for rank in ("learner/0", "learner/1"):
        wait_until(lambda rank=rank: registered(rank) == 2, f"a new {rank}", 60.0)
    clocks.set(ahead_s - 3600.0, far)
    replica = next(name for name in (f"rollouter/{index}" for index in range(4)) if run.host_of(name) == far)
    run.wait_for_step(4)
    kill(replica)
    wait_until(lambda: registered(replica) == 2, f"a new {replica}", 60.0)
    run.is_exact()
    assert run.shown.count(" died (") == 3, run.shown
    run.is_gone_from("a", "b", "c")
