"""The processes that an engine started, and their end.

Only what was seen as a child or a descendant of a child is ever touched; a process number that went to somebody
else meanwhile is recognised by its start time. Blocking: run ``end`` in a thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

import psutil


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
        """Numbers of all that still live."""
        cores = [core.pid for core in self._cores if core.pid is not None and core.is_alive()]
        return cores + [pid for pid, process in self._descendants.items() if _lives(process)]

    def end(self, grace_s: float, deadline_s: float = 10.0) -> list[int]:
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
        limit = time.monotonic() + deadline_s
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
