"""Users' processes in sessions of their own that ignore signals: none outlives its warden."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.workers import warden
from tools.live_run import pid_lives
from tools.waiting import wait_until

CHILDREN = 6
LEAVES = f"""
import os, signal, sys, time
from pathlib import Path
folder, then = Path(sys.argv[1]), sys.argv[2]
for number in range({CHILDREN}):
    if not os.fork():
        for deaf_to in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(deaf_to, signal.SIG_IGN)
        if number % 2:
            os.setsid()
        # Below another process of its own, which ends.
        if number % 3 == 0 and os.fork():
            os._exit(0)
        (folder / f"child-{{os.getpid()}}").touch()
        time.sleep(1000)
        os._exit(0)
while len(list(folder.glob("child-*"))) < {CHILDREN}:
    time.sleep(0.01)
(folder / f"worker-{{os.getpid()}}").touch()
match then:
    case "exit": sys.exit(3)
    case "crash": os.kill(os.getpid(), signal.SIGSEGV)
    case "kill its group": os.killpg(0, signal.SIGKILL)
    case "stay": time.sleep(1000)
"""
STARTS = """
import subprocess, sys, time
from asyncrl.workers import warden
process = subprocess.Popen([sys.executable, *warden.command(*sys.argv[1:])])
print(process.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "leaves.py").write_text(LEAVES)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for pid in living(tmp_path):
        os.kill(pid, signal.SIGKILL)


def living(folder: Path) -> list[int]:
    """Pids of the worker and of its children that have not ended."""
    pids = [int(path.name.partition("-")[2]) for path in [*folder.glob("child-*"), *folder.glob("worker-*")]]
    return list(filter(pid_lives, pids))


def start(folder: Path, then: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, *warden.command("leaves", str(folder), then)])
    wait_until(lambda: list(folder.glob("worker-*")))
    return process


@pytest.mark.parametrize(
    ("then", "code"), [("exit", 3), ("crash", -signal.SIGSEGV), ("kill its group", -signal.SIGKILL)]
)
def test_a_warden_ends_with_its_worker_and_leaves_nothing(folder: Path, then: str, code: int) -> None:
    process = start(folder, then)
    assert process.wait(60) == code
    assert living(folder) == []


def test_a_warden_ends_all_processes_on_request_and_ignores_signals_to_the_whole_job(folder: Path) -> None:
    process = start(folder, "stay")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.1)
    assert process.poll() is None and len(living(folder)) == CHILDREN + 1
    warden.end(process.pid)
    assert process.wait(60) == -signal.SIGKILL
    assert living(folder) == []
    warden.end(process.pid)


def test_a_warden_ends_all_processes_when_its_parent_is_killed(folder: Path) -> None:
    argv = [sys.executable, "-c", STARTS, "leaves", str(folder), "stay"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: list(folder.glob("worker-*")))
        assert len(living(folder)) == CHILDREN + 1
        parent.kill()
    wait_until(lambda: not living(folder) and not psutil.pid_exists(pid))


def test_a_warden_starts_no_worker_for_a_dead_parent(folder: Path) -> None:
    argv = warden.command("leaves", str(folder), "stay")
    argv[2] = str(os.getppid())
    assert subprocess.run([sys.executable, *argv], timeout=60).returncode == 0
    assert not list(folder.glob("worker-*"))


def test_a_killed_warden_takes_its_worker_along(folder: Path) -> None:
    """Its children then belong to the next subreaper."""
    process = start(folder, "stay")
    (worker,) = [int(path.name.partition("-")[2]) for path in folder.glob("worker-*")]
    process.kill()
    process.wait()
    wait_until(lambda: worker not in living(folder))


def test_a_warden_keeps_no_file_of_its_worker_open(folder: Path) -> None:
    read, write = os.pipe()
    argv = [sys.executable, *warden.command("leaves", str(folder), "stay")]
    process = subprocess.Popen(argv, stdout=write, pass_fds=[write])
    wait_until(lambda: list(folder.glob("worker-*")))
    links = {os.readlink(f"/proc/{process.pid}/fd/{name}") for name in os.listdir(f"/proc/{process.pid}/fd")}
    assert links == {os.devnull}
    for each in (read, write):
        os.close(each)
    warden.end(process.pid)
    process.wait(60)
