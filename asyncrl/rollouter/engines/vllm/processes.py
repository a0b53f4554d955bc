"""The processes of a vLLM engine: ends them, binds them to CPU cores, and ends all waits when the engine dies.

``Processes`` kills only processes that it has seen as a child, or as a descendant of one. If another process has got
the PID since, the start time differs. ``Processes.end`` blocks: run it on a thread.

If an engine core dies, vLLM leaves control calls waiting for ever. So every such wait runs under a *guard* of
``Watch``, and ``declare_dead`` ends all guards at once. A guard that reaches its deadline declares the engine dead too,
because an engine that does not answer in time cannot be used. The waits then fail with EngineDied, always with the
first reason.
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
"""Beginning of the name of a claim, before the core's number. The name is that of an abstract socket (unix(7)), which
leaves nothing on disk."""

KILLED_S = 10.0
"""Longest wait (s) for the end of killed processes."""


class Processes:
    """The engine cores, which are children of this process, and their descendants."""

    def __init__(self) -> None:
        self._cores: list[BaseProcess] = []
        self._descendants: dict[int, psutil.Process] = {}
        """Descendants of the cores that were seen, by PID; they stay here after their end."""

    def adopt(self, cores: Iterable[BaseProcess]) -> None:
        """Add engine cores, and note their descendants."""
        self._cores += [core for core in cores if core not in self._cores]
        self.look()

    def look(self) -> None:
        """Note the descendants that live now, because they cannot be found once their core is dead."""
        for core in self._cores:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(core.pid).children(recursive=True):
                    self._descendants.setdefault(process.pid, process)

    @property
    def has_workers(self) -> bool:
        """Whether the cores have living descendants, which need time to remove their shared memory."""
        return any(_lives(process) for process in self._descendants.values())

    @property
    def pids(self) -> list[int]:
        """PIDs of the cores and descendants that still live."""
        cores = [core.pid for core in self._cores if core.pid is not None and core.is_alive()]
        return cores + [pid for pid, process in self._descendants.items() if _lives(process)]

    def end(self, grace_s: float) -> list[int]:
        """Wait up to ``grace_s`` seconds for the processes to end by themselves, then kill them.

        Returns the PIDs of those that still live KILLED_S later.
        """
        self.look()
        limit = time.monotonic() + grace_s
        for core in self._cores:
            core.join(max(0.0, limit - time.monotonic()))
            if core.is_alive():
                core.kill()
        # The descendants may still be cleaning up after their core has ended.
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
    """CPU cores of this host for the threads of one engine on CPU. No other such engine takes them until a release.

    Without this the kernel sometimes runs two engines on one core, while other cores idle. A claim is a socket whose
    name only one socket of the host's network can have. The kernel closes it when its owner ends, so a
    claimed core always becomes free again.

    Invariants: until a release, no two engines of this host's network are bound to the same core. The lowest core that
    a process may use is never claimed. If too few cores are free, no core is claimed.
    """

    def __init__(self, cores: Sequence[int], claims: Sequence[socket.socket]) -> None:
        self.cores = frozenset(cores)
        self._claims = claims
        """One bound socket for each core."""

    @classmethod
    def claim(cls, count: int) -> ClaimedCores | None:
        """Claim ``count`` of the cores that this process may use, from the highest number down.

        Returns None, and keeps no claim, if too few are free.
        """
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
        """Bind all threads of these processes, and the threads that they start later, to the claimed cores."""
        for pid in pids:
            # Processes and threads that have ended meanwhile are skipped.
            with contextlib.suppress(FileNotFoundError):
                for thread in list(Path(f"/proc/{pid}/task").iterdir()):
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(thread.name), self.cores)

    def release(self) -> None:
        """Give up the claims. Bound processes stay bound."""
        for claim in self._claims:
            claim.close()


def _claim(core: int) -> socket.socket | None:
    """Claim a core, and return the socket that holds the claim; None if the core is claimed already."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0{NAME}-{core}")
    except OSError:
        claim.close()
        return None
    return claim


class Watch:
    """Knows whether an engine is dead, and ends the waits for it when it dies.

    ``name`` names the engine in errors. ``on_death`` is called once, with the reason.
    """

    def __init__(self, name: str, on_death: Callable[[str], None]) -> None:
        self._name = name
        self._on_death = on_death
        self._reason: str | None = None
        self._guards: set[asyncio.Timeout] = set()

    @property
    def dead(self) -> bool:
        """Whether the engine was declared dead."""
        return self._reason is not None

    def died(self) -> EngineDied:
        """Make the error with the reason of the death."""
        assert self._reason is not None, "the engine lives"
        return EngineDied(self._name, self._reason)

    def require_alive(self) -> None:
        """Raise EngineDied if the engine was declared dead."""
        if self._reason is not None:
            raise self.died()

    def declare_dead(self, reason: str) -> None:
        """Declare the engine dead: every guarded wait ends with EngineDied. Only the first reason counts."""
        if self._reason is not None:
            return
        self._reason = reason
        for guard in self._guards:
            if not guard.expired():
                guard.reschedule(asyncio.get_running_loop().time())
        self._on_death(reason)

    @asynccontextmanager
    async def guard(self, what: str, deadline_s: float | None) -> AsyncIterator[None]:
        """Guard the wait inside the ``async with``: it ends with EngineDied as soon as the engine is declared dead.

        If the wait takes longer than ``deadline_s`` seconds, the guard declares the engine dead; None: no deadline.
        ``what`` names the awaited answer in the reason.
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
            # Changes nothing if ``declare_dead`` has ended this guard: the first reason stays.
            self.declare_dead(f"did not answer {what} within {deadline_s} s")
            raise self.died() from error
