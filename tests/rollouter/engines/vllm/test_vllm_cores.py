"""Engines on CPU stay on cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.rollouter.engines.vllm import processes
from asyncrl.rollouter.engines.vllm.processes import ClaimedCores

THREADS = (
    "import threading, sys; [threading.Thread(target=sys.stdin.read).start() for _ in range(3)]; print(flush=True)"
)


@pytest.fixture
def four(monkeypatch):
    """Cores 3 to 6 are this process's, and no other's claims are met."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 4, 5, 6})
    monkeypatch.setattr(processes, "NAME", f"asyncrl-test-{os.getpid()}")
    return


def test_no_two_engines_have_a_core_and_the_first_is_left_to_all(four):
    first = ClaimedCores.claim(2)
    assert first is not None and first.cores == {5, 6}
    assert ClaimedCores.claim(2) is None, "4 alone is free, and 3 is for all"
    # What was not enough is not kept.
    second = ClaimedCores.claim(1)
    assert second is not None and second.cores == {4}
    assert ClaimedCores.claim(1) is None
    first.release()
    third = ClaimedCores.claim(1)
    assert third is not None and third.cores == {6}
    for claimed in (second, third):
        claimed.release()


def test_a_claim_ends_with_its_process(four):
    code = f"from asyncrl.rollouter.engines.vllm import processes as p; p.NAME = {processes.NAME!r}; kept = p._claim(6)"
    code += "; print(flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None and other.stdout is not None
    assert other.stdout.readline()
    beside = ClaimedCores.claim(1)
    assert beside is not None and beside.cores == {5}
    other.kill()
    other.wait()
    other.stdin.close()
    other.stdout.close()
    after = ClaimedCores.claim(1)
    assert after is not None and after.cores == {6}
    for claimed in (beside, after):
        claimed.release()


def test_all_threads_of_a_process_are_bound_and_one_that_is_gone_is_no_fault():
    own = max(os.sched_getaffinity(0))
    child = subprocess.Popen([sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ClaimedCores([own], []).bind([child.pid, gone.pid])
    threads = [int(thread.name) for thread in Path(f"/proc/{child.pid}/task").iterdir()]
    assert len(threads) == 4
    assert all(os.sched_getaffinity(thread) == {own} for thread in threads)
    child.stdin.close()
    child.stdout.close()
    child.wait()
