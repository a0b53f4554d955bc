"""One actor's process: started in its own session, with its own log and environment.

Invariant: after ``wait``, no process of the actor's group or session is left, except those in ``stuck``. The session
includes wardens, each the parent of a process that runs users' code (workers/warden.py). When the actor dies, its
leftovers become children of the agent. The agent first sends them the signal END, on which a warden ends users' code.
Only a warden finds what this code has started in other sessions. After ``warden.END_S`` the agent kills what is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.rpc.linux import (
    LOOK_AGAIN_S,
    children_of,
    group_members,
    kill_child,
    kill_group,
    reap_child,
)
from asyncrl.workers import warden

LEFTOVERS_S = 10.0
"""Seconds for the leftovers of a process to end, longer than ``warden.END_S``. Later ones are in ``stuck``."""
HINT_BYTES = 8192
"""Bytes at the end of a log that ``last_words`` searches."""
HINT_CHARACTERS = 300


def environment_of(host: Mapping[str, str], actor: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an actor's process: the host's variables, overridden by the actor's own. Pure.

    If the host does not set CUDA_VISIBLE_DEVICES, its GPUs have the numbers of the driver, in the order of the bus. So
    CUDA must use that order; by default it counts the fastest first.
    """
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if "CUDA_VISIBLE_DEVICES" not in host else {}
    return {**order, **host, **actor}


@dataclass(slots=True)
class Child:
    """A process that the agent has spawned. No other process can get its pid until ``wait`` has reaped it."""

    name: str
    incarnation: int
    pid: int
    log: Path
    log_start: int
    """Offset in the log at which this process began to write (bytes)."""
    _pidfd: int
    stuck: list[int] = field(default_factory=list)
    """Pids of leftovers that did not end within LEFTOVERS_S: held by the kernel, or of another user, as by sudo."""
    _reaped: bool = False

    @classmethod
    def spawn(cls, name: str, incarnation: int, argv: list[str], env: Mapping[str, str], log: Path) -> Child:
        """Start ``argv`` in a session of its own; both its outputs are appended to ``log``. Raises OSError."""
        log_start = log.stat().st_size if log.exists() else 0
        pid = os.posix_spawn(
            argv[0],
            argv,
            env,
            setsid=True,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
        )
        try:
            return cls(name, incarnation, pid, log, log_start, os.pidfd_open(pid))
        except OSError:
            # Without a pidfd the end of the process would not be noticed.
            kill_group(pid)
            os.waitpid(pid, 0)
            raise

    async def wait(self, others: Collection[int]) -> int:
        """Wait for the process to end, then end and reap its leftovers. Returns its exit code, negative for a signal.

        Leftovers are the members of its group and session, which become children of the agent, a subreaper. They get
        END, and are killed after ``warden.END_S``. Those left after LEFTOVERS_S are recorded in ``stuck``. ``others``
        are the pids of the host's other actors. They lead sessions of their own, so their groups need no look-up. No
        other code may wait for the process.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        exit_code = reap_child(self.pid)
        self._reaped = True
        # While the group or session has members, the kernel gives its id, ``self.pid``, to no other process.
        began, signalled = loop.time(), set[int]()
        while orphans := group_members([p for p in children_of(os.getpid()) if p not in others], self.pid):
            waited_s = loop.time() - began
            if waited_s >= LEFTOVERS_S:
                self.stuck = orphans
                break
            for pid in orphans:
                if waited_s >= warden.END_S:
                    kill_child(pid)
                elif pid not in signalled:
                    # A process that is not a warden ends by the default action of the signal.
                    warden.end(pid)
                    signalled.add(pid)
                reap_child(pid)
            await asyncio.sleep(LOOK_AGAIN_S)
        assert exit_code is not None
        return exit_code

    def kill(self) -> None:
        """Send SIGKILL to the process and its group."""
        if not self._reaped:
            kill_group(self.pid)

    def ask_for_stacks(self) -> None:
        """Send SIGUSR1, at which an actor writes its stacks to its log. Raises ProcessLookupError once it has ended."""
        if self._reaped:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signal.SIGUSR1)

    def last_words(self) -> str:
        """Return the last line of plain text in the process's log, such as the end of a traceback, without JSON lines.

        Empty if there is no such line, or if the log cannot be read.
        """
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self.log_start, end - HINT_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        words = (line.strip() for line in reversed(lines))
        return next((line for line in words if line and not line.startswith("{")), "")[:HINT_CHARACTERS]
