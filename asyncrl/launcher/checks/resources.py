"""Checks of a host's resources: disk space, memory, /dev/shm, open files.

A folder that does not exist yet is judged by its nearest parent that does. The file of a trial has no name, so
nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

import psutil

from asyncrl.core.disk import free_bytes, full_errno, in_bytes, in_words, nearest_folder
from asyncrl.launcher.checks.findings import Finding, fail, ok, warn
from asyncrl.launcher.checks.needs import Need

TRIAL_BYTES = 4096
CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")
LEAST_SHM_BYTES = 32 << 20
WANTED_SHM_BYTES = 1 << 30
"""More than the 64 MiB that a container has by default, which NCCL and torch soon fill."""


# --- disks ---


def write_problem(path: Path) -> OSError | None:
    """Write a small file in ``path``, or in its nearest parent. Returns the error; None if writing works."""
    folder = nearest_folder(path)
    if not folder.is_dir():
        return NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    try:
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(TRIAL_BYTES))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        return OSError(error.errno, f"cannot be written to: {error.strerror or error}", str(folder))
    return None


def same_disk(one: Path, other: Path) -> bool:
    """Whether both paths are on one disk; False if unknown."""
    with contextlib.suppress(OSError):
        return nearest_folder(one).stat().st_dev == nearest_folder(other).stat().st_dev
    return False


def check_folder(check: str, key: str, path: Path, need: Need) -> Finding:
    """Check that files can be written at ``path``, which the configuration's ``key`` sets, and that ``need`` fits."""
    larger = f"make room, or set {key} to a larger disk"
    if problem := write_problem(path):
        fix = larger if full_errno(problem) else f"give this user the right to write there, or set {key} to another"
        return fail(check, f"{path}: {in_words(problem, path)}", fix, key=key)
    free = free_bytes(path)
    if free is None:
        return ok(check, f"{path}: the free room is unknown", key=key)
    text = f"{path} has {in_bytes(free)} free"
    if need.wanted:
        text += f"; about {in_bytes(need.wanted)} are needed until the end"
        text += f" ({', '.join(need.made_of)})" if need.made_of else ""
        text += f", and at least {in_bytes(need.least)}" if need.least else ""
    if free >= need.wanted:
        return ok(check, text, key=key)
    if check == "checkpoint_dir":
        larger += "; checkpoint.keep and checkpoint.keep_every_steps say how many are kept"
    return (fail if free < need.least else warn)(check, text, larger, key=key)


# --- memory ---


def memory_bytes() -> tuple[int, int]:
    """Return (total, available) memory of this host, or of a control group of this process if that has less."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _group_limits():
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _group_limits() -> list[tuple[int, int]]:
    """Return (limit, used) in bytes of every control group that contains this process and has a limit."""
    limits = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # cgroup v2 has one tree for all controllers, and its line names none.
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes")
        root, limit, used = names if controllers else ("", "memory.max", "memory.current")
        group = Path(CGROUP, root, path.lstrip("/"))
        for folder in (group, *group.parents):
            if not folder.is_relative_to(CGROUP):
                break
            # Without a limit the file holds the word "max".
            with contextlib.suppress(OSError, ValueError):
                limits.append((int((folder / limit).read_text()), int((folder / used).read_text())))
    return limits


def judge_memory(total: int, available: int, need: Need) -> Finding:
    """Judge the memory, in bytes.

    It fails only if ``need.least`` exceeds the total, because other processes may free what they use now.
    """
    text = f"{in_bytes(available)} of {in_bytes(total)} available; about {in_bytes(need.wanted)} are needed"
    if need.least > total:
        fix = "take a host with more memory, fewer actors there, a smaller model or rollout.vllm.cpu_kv_cache_bytes"
        return fail("memory", text, fix)
    if need.wanted > available:
        return warn("memory", text, "end other processes that use this host's memory, or take a larger host")
    return ok("memory", text)


def shm_bytes() -> tuple[int, int] | None:
    """Return (size, free) of /dev/shm; None if it is missing or cannot be written to."""
    try:
        room = os.statvfs(SHM)
    except OSError:
        return None
    if not os.access(SHM, os.W_OK | os.X_OK):
        return None
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def judge_shm(found: tuple[int, int] | None) -> Finding:
    """Judge (size, free) of /dev/shm, where torch, NCCL and vLLM put messages. Weights are not there, but in memfds."""
    if found is None:
        return fail("shm", f"{SHM} is missing or cannot be written to", f"mount a tmpfs at {SHM}, mode 1777")
    size, free = found
    fix = "give the container more, as by --shm-size=8g or --ipc=host, or remount it larger; remove old files from it"
    text = f"{SHM} has {in_bytes(free)} of {in_bytes(size)} free"
    if free < LEAST_SHM_BYTES:
        return fail("shm", text, fix)
    if free < WANTED_SHM_BYTES:
        return warn("shm", f"{text}; {in_bytes(WANTED_SHM_BYTES)} are wanted", fix)
    return ok("shm", text)


# --- open files ---


def judge_descriptors(hard: int, need: Need) -> Finding:
    """Judge the hard limit of open files by the need of the actor that opens most. Pure."""
    text = f"a process may open {hard} files (ulimit -Hn); the largest actor needs about {need.least}"
    text += f", and {need.wanted} with room to spare"
    fix = (
        f"raise the hard limit of open files to {need.wanted}: ulimit -Hn, nofile in /etc/security/limits.conf, or "
        "LimitNOFILE of sshd or slurmd"
    )
    if hard >= need.wanted:
        return ok("descriptors", text)
    return (fail if hard < need.least else warn)("descriptors", text, fix)
