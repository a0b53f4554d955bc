"""The guard ends a frozen agent, also if the output of the guard takes nothing or is closed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

GENEROUS_S = 60.0
# The guard starts sys.executable with -m MODULE GUARD_PID LOCK_FD PRIVATE_FOLDER BEATS_FD.
FROZEN_AGENT = """#!/bin/sh
echo $$ > "$0.pid"
echo 1 >&$6
exec sleep 600
"""
GUARD = """
import sys
from asyncrl.launcher.node import guard
sys.executable = sys.argv.pop(1)
sys.exit(guard.main())
"""


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("output", ["takes nothing", "is closed"])
def test_a_frozen_agent_is_killed_before_the_guard_reports_it(tmp_path: Path, output: str) -> None:
    agent, private = tmp_path / "agent.sh", tmp_path / "run" / "private-1"
    agent.write_text(FROZEN_AGENT)
    agent.chmod(0o755)
    private.mkdir(parents=True)
    ours, theirs = os.pipe()
    argv = [sys.executable, "-c", GUARD, str(agent), str(private), "0"]
    guard = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=theirs)
    filled = 0
    if output == "takes nothing":
        # As a terminal after Ctrl-S.
        os.set_blocking(theirs, False)
        filled = os.write(theirs, b"." * (1 << 20))
        os.set_blocking(theirs, True)
    os.close(theirs)
    if output == "is closed":
        os.close(ours)
    pid_file, until = Path(f"{agent}.pid"), time.monotonic() + GENEROUS_S
    try:
        while not pid_file.exists() or not pid_file.read_text() or lives(int(pid_file.read_text())):
            assert time.monotonic() < until, "the agent lives"
            time.sleep(0.05)
        if output == "takes nothing":
            os.read(ours, filled)
        assert guard.wait(GENEROUS_S) == 128 + 9
        if output == "takes nothing":
            reported = os.read(ours, 1 << 16).decode()
            assert reported == "guard: the agent did not beat for 1 s (supervision.silence_s) and was killed\n"
        assert not private.exists()
    finally:
        guard.kill()
        guard.wait()
        if pid_file.exists() and lives(int(pid_file.read_text())):
            os.kill(int(pid_file.read_text()), 9)
