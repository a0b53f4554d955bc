"""Runs whose launcher shows them on an output that takes nothing: signals act, and the exit code is the run's."""

import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest
from launcher.launched import LAUNCH_HERE, STUB, Run, config_tree

from asyncrl.launcher.run_folder.ended import read_ended
from asyncrl.launcher.run_folder.folders import RunFolder
from asyncrl.launcher.run_folder.private import is_live
from tools.waiting import wait_until

PIPE_BYTES = 4096


@pytest.fixture
def unread(tmp_path, started):
    """Launches a run of stubs whose output is a pipe that is full from the start."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(theirs, b"x" * PIPE_BYTES)

    def launch(behaviour):
        request = {
            "tree": config_tree(tmp_path),
            "argv": [sys.executable, str(STUB), json.dumps(behaviour)],
            "hosts": ["here"],
            "resume": "",
        }
        run = Run(tmp_path, [sys.executable, "-c", ""])
        run.process.wait()
        argv = [sys.executable, str(LAUNCH_HERE), json.dumps(request)]
        run.process = subprocess.Popen(argv, stdout=theirs, stderr=theirs, start_new_session=True)
        started.append(run)
        return run

    yield launch
    os.close(ours)
    os.close(theirs)


def ended(run):
    """How the run ended, once nothing of it is left."""
    wait_until(lambda: (run.run_dir / "ended.json").exists() and not is_live(run.run_dir), "the end of the run")
    return read_ended(RunFolder(path=run.run_dir, run_id=""))


def test_ctrl_c_stops_a_run_whose_output_is_not_read(unread):
    run = unread({"learner/0": {"preempted": 7}})
    wait_until(lambda: (run.run_dir / "private" / "controller.json").exists(), "the controller")
    run.actor("learner/0")
    wait_until(lambda: run.is_running, "the run")
    run.process.send_signal(signal.SIGINT)
    assert ended(run).result == "preempted"
    assert run.process.wait(120) == 75


def test_a_run_is_shown_on_an_output_that_lacks_characters(stub, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    run = stub({"learner/0": {"finish": 5}})
    code, lines = run.end()
    assert code == 0
    assert [line for line in lines if line.startswith("reward ") and " -> " in line], lines
