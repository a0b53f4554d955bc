"""A host whose wall clock steps back, as by NTP or when a virtual machine is resumed, while a run lives on it."""

import os
import signal
import subprocess
import sys
import time

import pytest
from launcher.launched import wait_until

from tools.wall_clocks import LOOK_S, WallClocks

BACK_S = 7200.0


@pytest.mark.slow
def test_who_is_started_after_the_clock_has_stepped_back_takes_its_place(stub, tmp_path, monkeypatch):
    """One restart each, which is all that they may have: whoever it is, its successor is the larger incarnation."""
    clocks = WallClocks(tmp_path)
    monkeypatch.setenv("PYTHONPATH", clocks.path)
    learner = {"backend": "sim", "steps": 3, "ranks": 2}
    behaviour = {"learner/0": {"finish": 3, "finish_on": "enough"}}
    run = stub(behaviour, {"learner": learner}, max_restarts=1, heartbeat_s=0.2)
    run.wait_to_show("step 3/3")
    names = ("controller/0", "reward/0", "learner/1")
    before = {name: run.actor(name) for name in names}
    clocks.set(-BACK_S)
    time.sleep(2 * LOOK_S)
    told = subprocess.run([sys.executable, "-c", "import time; print(time.time())"], capture_output=True, check=True)
    assert float(told.stdout) == pytest.approx(time.time() - BACK_S, abs=60), "it is what other processes are told"
    for name in names:
        os.kill(before[name], signal.SIGKILL)
        wait_until(lambda name=name: run.actor(name) != before[name], f"another {name}")
        # Of the controller nothing is shown.
        if name != "controller/0":
            run.wait_to_show(f"{name} is ready again")
    (run.run_dir / "enough").write_text("")
    code, shown = run.end()
    assert code == 0, shown
    assert all(sum(f"{name} died (" in line for line in shown) == 1 for name in names), shown
