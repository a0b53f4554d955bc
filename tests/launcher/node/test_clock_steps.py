"""A host whose wall clock steps back, as by NTP or when a virtual machine is resumed, while a run lives on it."""

import os
import signal
import sys
import time

import pytest
from launcher.launched import Launched, wait_until

from tools.wall_clocks import LOOK_S, WallClocks

BACK_S = 7200.0


@pytest.fixture
def clocks(tmp_path, monkeypatch):
    found = WallClocks(tmp_path)
    monkeypatch.setenv("PYTHONPATH", found.path)
    return found


def test_the_clock_is_what_a_test_sets(clocks):
    """Else the others would show nothing."""
    clocks.set(-BACK_S)
    read, write = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", "import time; print(time.time(), time.time_ns())"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)],
    )
    os.close(write)
    with os.fdopen(read) as file:
        seconds, nanoseconds = file.read().split()
    assert os.waitpid(pid, 0)[1] == 0
    assert float(seconds) == pytest.approx(time.time() - BACK_S, abs=60)
    assert float(nanoseconds) / 1e9 == pytest.approx(time.time() - BACK_S, abs=60)


@pytest.mark.parametrize("name", ["reward/0", "controller/0", "learner/1"])
def test_who_is_started_after_the_clock_has_stepped_back_takes_its_place(clocks, tmp_path, name):
    """One restart, which is all that it may have: whoever it is, its successor is the larger incarnation."""
    learner = {"backend": "sim", "steps": 3, "ranks": 2}
    run = Launched(
        tmp_path,
        {"learner/0": {"finish": 3, "finish_on": "enough"}},
        {"learner": learner},
        max_restarts=1,
        heartbeat_s=0.2,
    )
    try:
        run.wait_to_show("step 3/3")
        before = run.actor(name)
        clocks.set(-BACK_S)
        time.sleep(2 * LOOK_S)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: run.actor(name) != before, f"another {name}")
        # Of the controller nothing is shown.
        if name != "controller/0":
            run.wait_to_show(f"{name} is ready again")
        (run.run_dir / "enough").write_text("")
        code, shown = run.end()
        assert code == 0, shown
        assert sum(f"{name} died (" in line for line in shown) == 1, shown
    finally:
        run.close()
