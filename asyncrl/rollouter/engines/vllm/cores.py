"""Cores for engines that compute on CPU: each engine's threads stay on some that no other engine is bound to.

A process of the run that wakes up beside an engine would else now and then be put where the engine computes, while
other cores idle. A core is claimed by a name that one socket of the host can have, so it is free again however its
owner ends.

Invariant: no two engines of this host's network are bound to one core, and the first of the cores that a process may
use is left to everybody. Where too few are free, nothing is bound.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

NAME = "asyncrl-core"
"""A claim's name begins so, before the core's number. It is one of the kernel's own (unix(7), "abstract"), and leaves
nothing on disk."""


class ClaimedCores:
    """Some of this host's cores, until they are released."""

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
