"""Linux's means for processes, with the standard library alone: descendants, age, limits, host.

A *subreaper* becomes the parent of every descendant whose own parent dies, unless a nearer ancestor is one. The
session, process group and environment do not matter. So the rule is simple: kill all children, reap them, and repeat
while children are left. Signals go only to children of this process and to members of a child's group or session. The
child has not been reaped, so its pid, group and session belong to no other program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from functools import cache
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_AGAIN_S = 0.01
"""Pause of ``end_children`` before it looks for children again (s)."""


def become_subreaper() -> None:
    """Make orphaned descendants children of this process from now on. Raises OSError."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int) -> None:
    """Have the kernel send signal ``number`` to this process when the thread that spawned it ends. Raises OSError."""
    _prctl(PR_SET_PDEATHSIG, int(number))


def children_of(pid: int) -> list[int]:
    """Pids of the children of a process, zombies included."""
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # The second field is the name in parentheses, which may hold anything; the fourth is the parent.
                fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields.split()[1]) == pid:
                children.append(int(entry))
    return children


@cache
def host_id() -> str:
    """Return an id of kernel, PID namespace and user. Processes with one id can open memory segments of one another."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"


def descriptor_limit() -> int:
    """The most files that a process may have open once it has raised its limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


def raise_descriptor_limit() -> None:
    """Let this process have as many files open as it may at most."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def age_s() -> float:
    """Seconds since this process was spawned."""
    # ``fields`` begin with the third field of proc(5). The 22nd is the start of the process, in clock ticks since boot.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2]
    spawned = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - spawned


def end_children(deadline_s: float) -> list[int]:
    """Kill and reap all children, and the orphans that become children meanwhile. This process must be a subreaper.

    Returns the pids that are left after ``deadline_s`` seconds, stuck in the kernel or of another user; normally none.
    Nothing else in this process may wait for children meanwhile.
    """
    until = time.monotonic() + deadline_s
    while True:
        for pid in children_of(os.getpid()):
            kill_child(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        if time.monotonic() >= until:
            return children_of(os.getpid())
        time.sleep(LOOK_AGAIN_S)


def kill_child(pid: int) -> None:
    """SIGKILL a child that has not been reaped. A child that runs as another user, as by sudo, is left alone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def reap_child(pid: int) -> int | None:
    """Reap a child if it has ended. Returns its exit code, negative for a signal, or None if it is alive."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def kill_group(leader: int) -> None:
    """SIGKILL the process group whose leader is a child that has not been reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # PermissionError: every member that is left runs as another user.
        os.killpg(leader, signal.SIGKILL)


def group_members(children: list[int], leader: int) -> list[int]:
    """Those of ``children`` that belong to the process group or the session of ``leader``."""
    members = []
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            if leader in (os.getpgid(pid), os.getsid(pid)):
                members.append(pid)
    return members


def session_members(leader: int) -> list[int]:
    """Pids in the session of ``leader``, except its own. The leader is a child that has not been reaped.

    A member may have any parent.
    """
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != leader:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry)) == leader:
                    members.append(int(entry))
    return members


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
