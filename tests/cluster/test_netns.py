"""A cluster of namespaces leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.cluster.netns import REPOSITORY, remove_abandoned
from tools.waiting import wait_until

MAKE_AND_DIE = f"""
import os, signal, sys
sys.path[:0] = [{str(REPOSITORY)!r}]
from tools.cluster.netns import Cluster
cluster = Cluster(["a", "b"])
cluster.ssh("a", "nohup setsid sleep 1000 >/dev/null 2>&1 &")
cluster["b"].popen(["sleep", "2000"])
if sys.argv[1] == "raise":
    with cluster:
        print(cluster.folder, os.stat(f"/proc/{{cluster['a']._init}}/ns/net").st_ino, flush=True)
        raise SystemExit("a test fails")
print(cluster.folder, os.stat(f"/proc/{{cluster['a']._init}}/ns/net").st_ino, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def living(namespace: int, folder: str) -> list[str]:
    """Processes in a network namespace or that name a folder, and mounts that name it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            if (entry / "ns/net").stat().st_ino == namespace or (os.fsencode(folder) in words):
                found.append(words.decode())
    return found + [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if folder in line]


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_i7_nothing_is_left_at_any_end_of_the_test(namespaces, how):
    links = Path("/proc/net/dev").read_text().count(":")
    died = subprocess.run([sys.executable, "-c", MAKE_AND_DIE, how], capture_output=True, text=True, timeout=60)
    assert died.returncode == (1 if how == "raise" else -signal.SIGKILL), died.stderr
    folder, namespace = died.stdout.split()
    wait_until(lambda: not living(int(namespace), folder), "the end of all processes in the hosts")
    assert Path("/proc/net/dev").read_text().count(":") == links
    assert Path(folder).exists() == (how == "kill")
    removed = remove_abandoned()
    assert (Path(folder) in removed) == (how == "kill")
    assert not Path(folder).exists()
