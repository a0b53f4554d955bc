"""Engines on CPU stay on cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.rollouter.engines.vllm import processes
from asyncrl.rollouter.engines.vllm.processes import ClaimedCores

CLAIMS = "from asyncrl.rollouter.engines.vllm import processes as p; p.NAME = {name!r}; kept = p._claim(6); "
WAITS = "print(flush=True); input()"
THREADS = (
    "import threading, sys; [threading.Thread(target=sys.stdin.read).start() for _ in range(3)]; print(flush=True)"
)


@contextmanager
def running(code):
    """A process that has printed something, until it is killed."""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline()
        yield child
        child.kill()


@pytest.fixture
def four(monkeypatch):
    """Cores 3 to 6 belong to this process, and no other process has a claim."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 4, 5, 6})
    monkeypatch.setattr(processes, "NAME", f"asyncrl-test-{os.getpid()}")


def test_each_engine_claims_its_own_cores_and_a_claim_ends_with_its_process(four):
    with running(CLAIMS.format(name=processes.NAME) + WAITS):
        first = ClaimedCores.claim(1)
        assert first is not None and first.cores == {5}
        assert ClaimedCores.claim(2) is None, "4 alone is free, and 3 is for all"
    # Too few cores are not kept.
    second = ClaimedCores.claim(2)
    assert second is not None and second.cores == {4, 6}
    assert ClaimedCores.claim(1) is None
    first.release()
    third = ClaimedCores.claim(1)
    assert third is not None and third.cores == {5}
    for claimed in (second, third):
        claimed.release()


def test_all_threads_of_a_process_are_bound_and_ended_threads_are_skipped():
    own = max(os.sched_getaffinity(0))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with running(THREADS) as child:
        ClaimedCores([own], []).bind([child.pid, gone.pid])
        threads = [int(thread.name) for thread in Path(f"/proc/{child.pid}/task").iterdir()]
        assert len(threads) == 4
        assert all(os.sched_getaffinity(thread) == {own} for thread in threads)
