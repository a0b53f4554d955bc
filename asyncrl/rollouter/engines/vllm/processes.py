"""The processes that an engine started: the cores that they are bound to, the watch over their life, and their end.

Only what was seen as a child or a descendant of a child is ever touched; a process number that went to another
else meanwhile is recognised by its start time. Blocking: run ``end`` in a thread.

vLLM leaves control calls waiting for ever when its engine core dies. Here every such wait stands under a guard of
``Watch``, and ``declare_dead`` ends all guards at once; so does a guard's own deadline, because an engine that does not
answer in time is as good as dead. No task is needed for it. Fails with EngineDied, always with the first reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from asyncrl.core.errors import EngineDied

NAME = "asyncrl-core"
"""A claim's name begins so, before the core's number. It is one of the kernel's own (unix(7), "abstract"), and leaves
nothing on disk."""

KILLED_S = 10.0
"""Longest wait for a process that was killed."""


class Processes:
    """Engine cores (direct children) and everything below them."""

    def __init__(self) -> None:
        self._cores: list[BaseProcess] = []
        self._descendants: dict[int, psutil.Process] = {}

    def adopt(self, cores: Iterable[BaseProcess]) -> None:
        """Take charge of these children."""
        self._cores += [core for core in cores if core not in self._cores]
        self.look()

    def look(self) -> None:
        """Note the descendants that live now: once their core is dead they can no longer be found."""
        for core in self._cores:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(core.pid).children(recursive=True):
                    self._descendants.setdefault(process.pid, process)

    @property
    def workers(self) -> bool:
        """Whether the cores have processes of their own, which need time to remove what they share."""
        return any(_lives(process) for process in self._descendants.values())

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes that still live."""
        cores = [core.pid for core in self._cores if core.pid is not None and core.is_alive()]
        return cores + [pid for pid, process in self._descendants.items() if _lives(process)]

    def end(self, grace_s: float) -> list[int]:
        """Wait ``grace_s`` for them to end by themselves, then kill them; returns the survivors' numbers."""
        self.look()
        limit = time.monotonic() + grace_s
        for core in self._cores:
            core.join(max(0.0, limit - time.monotonic()))
            if core.is_alive():
                core.kill()
        # Descendants that are left may be cleaning up after their core.
        while time.monotonic() < limit and any(_lives(process) for process in self._descendants.values()):
            time.sleep(0.01)
        for process in self._descendants.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        limit = time.monotonic() + KILLED_S
        for core in self._cores:
            core.join(max(0.0, limit - time.monotonic()))
        while self.pids and time.monotonic() < limit:
            time.sleep(0.01)
        return self.pids


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class ClaimedCores:
    """Some of this host's cores, until they are released: for the threads of one engine that computes on CPU.

    A process of the run that wakes up beside an engine would else now and then be put where the engine computes, while
    other cores idle. A core is claimed by a name that one socket of the host can have, so it is free again however its
    owner ends. Invariant: no two engines of this host's network are bound to one core, and the first of the cores that
    a process may use is left to all processes. Where too few are free, nothing is bound.
    """

    def __init__(self, cores: Sequence[int], claims: Sequence[socket.socket]) -> None:
        self.cores = frozenset(cores)
        self._claims = claims

    @classmethod
    def claim(cls, count: int) -> ClaimedCores | None:
        """Claim ``count`` of the cores that this process may use, the last ones first; None where too few are free."""
        cores: list[int] = []
        claims: list[socket.socket] = []
        for core in sorted(os.sched_getaffinity(0), reverse=True)[:-1]:
            if len(cores) < count and (claim := _claim(core)) is not None:
                cores.append(core)
                claims.append(claim)
        claimed = cls(cores, claims)
        if len(cores) == count:
            return claimed
        claimed.release()
        return None

    def bind(self, pids: Iterable[int]) -> None:
        """Keep all threads of these processes, and those that they begin, on the cores."""
        for pid in pids:
            # A thread or process that has ended meanwhile needs none.
            with contextlib.suppress(FileNotFoundError):
                for thread in list(Path(f"/proc/{pid}/task").iterdir()):
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(thread.name), self.cores)

    def release(self) -> None:
        """Let others have the cores; processes that were bound stay so."""
        for claim in self._claims:
            claim.close()


def _claim(core: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0{NAME}-{core}")
    except OSError:
        claim.close()
        return None
    return claim


class Watch:
    """Life and death of one engine. ``on_death`` is called once, with the reason."""

    def __init__(self, name: str, on_death: Callable[[str], None]) -> None:
        self._name = name
        self._on_death = on_death
        self._reason: str | None = None
        self._guards: set[asyncio.Timeout] = set()

    @property
    def dead(self) -> bool:
        """Whether it was declared dead."""
        return self._reason is not None

    def died(self) -> EngineDied:
        """The error that says why."""
        assert self._reason is not None, "the engine lives"
        return EngineDied(self._name, self._reason)

    def require_alive(self) -> None:
        """Raise EngineDied if it was declared dead."""
        if self._reason is not None:
            raise self.died()

    def declare_dead(self, reason: str) -> None:
        """End every guarded wait with EngineDied. Only the first reason counts."""
        if self._reason is not None:
            return
        self._reason = reason
        for guard in self._guards:
            if not guard.expired():
                guard.reschedule(asyncio.get_running_loop().time())
        self._on_death(reason)

    @asynccontextmanager
    async def guard(self, what: str, deadline_s: float | None) -> AsyncIterator[None]:
        """Wait inside for ``what`` no longer than ``deadline_s`` or the engine's life.

        None leaves the end to ``declare_dead``.
        """
        self.require_alive()
        try:
            async with asyncio.timeout(deadline_s) as guard:
                self._guards.add(guard)
                try:
                    yield
                finally:
                    self._guards.discard(guard)
        except TimeoutError as error:
            if not guard.expired():
                raise
            # Where it was this guard that ended because of another reason, that one stays.
            self.declare_dead(f"did not answer {what} within {deadline_s} s")
            raise self.died() from error
