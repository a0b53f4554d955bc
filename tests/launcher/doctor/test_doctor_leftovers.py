"""Leftovers of dead runs, on real folders, locks and processes. I7: the doctor removes these, and no more."""

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest
from run_settings import simulated_run

from asyncrl.config.load import config_to_json
from asyncrl.core.files import are_locks_shared
from asyncrl.launcher.doctor import leftovers
from asyncrl.launcher.doctor.leftovers import (
    Process,
    check_leftovers,
    find_leftovers,
    orphans,
    read_processes,
    remove,
)
from tools.live_run import pid_lives
from tools.waiting import wait_until

ORPHAN = """
import os, time, setproctitle
parent = os.getpid()
if os.fork():
    os._exit(0)
os.setsid()
while os.getppid() == parent:
    time.sleep(0.01)
setproctitle.setproctitle("asyncrl rollouter/0 the-doctors-own-test")
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_scratch(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(leftovers.tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def no_processes(monkeypatch):
    monkeypatch.setattr(leftovers, "read_processes", dict)


def make_run(runs, name, **checkpoint):
    run = runs / name
    (run / "private").mkdir(parents=True)
    (run / "private" / "lock").touch()
    (run / "private" / "secret.json").write_text("{}")
    (run / "config.json").write_text(config_to_json(simulated_run(checkpoint=checkpoint)))
    for name in ("v00000002", ".v00000003.partial-17", ".dead-v00000001-5"):
        (run / "checkpoints" / name).mkdir(parents=True)
    return run


@contextmanager
def held(run, private="private"):
    lock = os.open(run / private / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def names(found, runs):
    return sorted(str(one.path.relative_to(runs)) for one in found)


def test_i7_certainly_dead_leftovers_are_named_and_then_removed(tmp_path, no_processes):
    runs = tmp_path / "runs"
    dead, living, part_living = (make_run(runs, name) for name in ("dead", "living", "part-living"))
    (part_living / "private-1").mkdir()
    (part_living / "private-1" / "lock").touch()
    expected = [
        "dead/checkpoints/.dead-v00000001-5",
        "dead/checkpoints/.v00000003.partial-17",
        "dead/private",
        "part-living/private",
    ]
    with held(living), held(part_living, "private-1"):
        assert names(find_leftovers(runs, is_head=True), runs) == expected
        found = check_leftovers(runs, is_head=True, fix=False)
        assert found.result == "warn" and "--fix" in found.fix
        assert all(str(runs / name) in found.detail for name in expected)
        assert (dead / "private").exists()
        found = check_leftovers(runs, is_head=True, fix=True)
        assert found.result == "ok" and found.detail.startswith("removed ")
        assert all(not (runs / name).exists() for name in expected)
        assert (dead / "checkpoints" / "v00000002").is_dir() and (dead / "config.json").is_file()
        assert (living / "private" / "secret.json").exists()
        assert (living / "checkpoints" / ".v00000003.partial-17").exists()
        assert (part_living / "checkpoints" / ".v00000003.partial-17").exists()
        assert check_leftovers(runs, is_head=True, fix=True).detail == "none"


def test_a_run_that_starts_during_the_cleanup_keeps_its_files(tmp_path, no_processes):
    run = make_run(tmp_path / "runs", "a")
    found = find_leftovers(tmp_path / "runs", is_head=True)
    with held(run):
        assert not any(remove(one) for one in found)
    assert all(one.path.exists() for one in found)


def test_only_the_head_looks_for_unfinished_checkpoints(tmp_path, no_processes):
    runs = tmp_path / "runs"
    run = make_run(runs, "a")
    partial = "a/checkpoints/.v00000003.partial-17"
    assert names(find_leftovers(runs, is_head=False), runs) == ["a/private"]
    assert partial in names(find_leftovers(runs, is_head=True), runs)
    # The part of a run whose head is elsewhere and may be live.
    (run / "part_of_run").write_text("id")
    assert names(find_leftovers(runs, is_head=True), runs) == ["a/private"]
    assert find_leftovers(None, is_head=True) == []


def test_leftovers_that_may_be_in_use_are_only_named(tmp_path, no_processes):
    runs = tmp_path / "runs"
    run = make_run(runs, "a", dir=str(tmp_path / "elsewhere"))
    outside = tmp_path / "elsewhere" / "a" / ".v00000003.partial-17"
    outside.mkdir(parents=True)
    (run / "private" / "lock").unlink()
    found = check_leftovers(runs, is_head=True, fix=True)
    assert found.result == "warn" and "yourself" in found.fix and "removed" not in found.detail
    assert str(outside) in found.detail and "without a lock" in found.detail
    assert outside.exists() and (run / "private").exists()


@pytest.mark.parametrize(
    ("options", "shared"),
    [("rw,vers=4.2,local_lock=none", True), ("rw,vers=3,local_lock=all", False), ("rw,localflock", False)],
)
def test_leftovers_stay_if_other_hosts_do_not_see_the_locks(tmp_path, no_processes, monkeypatch, options, shared):
    mounts = f"20 1 8:1 / / rw,relatime - ext4 /dev/sda rw\n21 20 0:40 / {tmp_path} rw - nfs4 server:/x {options}\n"
    assert are_locks_shared(tmp_path / "runs", mounts) is shared
    assert are_locks_shared(tmp_path.parent, mounts)
    make_run(tmp_path / "runs", "a")
    monkeypatch.setattr(leftovers, "are_locks_shared", lambda path: are_locks_shared(path, mounts))
    found = check_leftovers(tmp_path / "runs", is_head=True, fix=True)
    assert found.result == ("ok" if shared else "warn")
    assert (tmp_path / "runs" / "a" / "private").exists() is not shared


def test_scratch_folders_of_engines_are_removed_with_their_process(tmp_path, no_processes):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead = tmp_path / "tmp" / f"asyncrl-engine-{ended.stdout.strip()}-x"
    mine = tmp_path / "tmp" / f"asyncrl-engine-{os.getpid()}-x"
    dead.mkdir()
    mine.mkdir()
    # Its process may be in another container, and invisible here.
    unseen = dead.with_name(f"{dead.name}y")
    unseen.mkdir()
    with (unseen / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert check_leftovers(None, is_head=True, fix=True).detail == f"removed {dead}"
        assert mine.exists() and unseen.exists() and not dead.exists()
    assert check_leftovers(None, is_head=True, fix=True).detail == f"removed {unseen}"


ACTOR, WORKER, ENGINE = "asyncrl rollouter/0 trial", "asyncrl reward worker", "VLLM::EngineCore"
GUARD, AGENT = "python -m asyncrl.launcher.node.guard p 3", "python -m asyncrl.launcher.node.agent 4 3"
KEEPER = "/bin/python -u -m asyncrl.workers.keeper 7"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(9, 1, ACTOR), (10, 9, WORKER)], [(9, True), (10, True)]),
        ([(9, 1, "asyncrl episodes worker")], [(9, True)]),
        ([(9, 1, KEEPER)], [(9, True)]),
        ([(9, 1, ENGINE)], [(9, False)]),
        ([(5, 1, "systemd --user"), (9, 5, ACTOR)], [(9, True)]),
        ([(5, 1, GUARD), (9, 5, ACTOR)], []),
        ([(5, 1, AGENT), (9, 5, ACTOR), (10, 9, WORKER)], []),
        ([(5, 1, "python -m pytest"), (9, 5, WORKER)], []),
        ([(9, 1, "asyncrl is what I read about")], []),
        # Its parent is in another container.
        ([(9, 0, ACTOR)], []),
    ],
)
def test_only_processes_without_guard_and_starter_are_orphans(rows, expected):
    names = {"systemd --user": "systemd", "asyncrl is what I read about": "less"}
    there = [(1, 0, "/sbin/init"), *rows] if rows[0][1] else rows
    family = {
        pid: Process(pid, parent, 0.0, title, "systemd" if pid == 1 else names.get(title, "asyncrl"))
        for pid, parent, title in there
    }
    assert [(process.pid, certain) for process, certain in orphans(family)] == expected


def test_i7_an_orphan_is_killed_and_nothing_else():
    starter = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    pid = int(starter.stdout.readline())
    try:
        assert starter.wait(30) == 0
        process = psutil.Process(pid)
        if process.ppid() != 1:
            pytest.skip("orphans do not go to process 1 here")
        mine = [one for one in find_leftovers(None, is_head=True) if one.process and one.process.pid == pid]
        assert len(mine) == 1 and mine[0].certain and "rollouter/0 the-doctors-own-test" in mine[0].what
        # Another process may have the number by now.
        other = Process(pid, 1, mine[0].process.started - 1, mine[0].process.title, "")
        assert not remove(dataclasses.replace(mine[0], process=other))
        assert process.is_running()
        assert remove(mine[0])
        wait_until(lambda: not pid_lives(pid), "its end")
    finally:
        starter.stdout.close()
        if psutil.pid_exists(pid) and pid in read_processes():
            os.kill(pid, signal.SIGKILL)
