"""The memory of a worker and its limits.

There are two limits, because neither catches everything. The worker limits its private memory (RLIMIT_DATA, which its
children inherit), so the user's code gets a MemoryError at the allocation that is too much; reserved memory does not
count. The actor measures the worker and all its descendants together, with shared memory, and kills. Invariant: a
measurement never fails but may see less. A process that has ended holds nothing; on a kernel without lists of children
only the worker is seen.
"""

from __future__ import annotations

import contextlib
import os
import resource

REPORT_BYTES = 32 << 20
"""Bytes beyond the limit, for the report that it was reached."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryLimit:
    """Lets this process take ``more_bytes`` of private memory beyond what it holds, and a reserve for its report."""

    def __init__(self, more_bytes: int) -> None:
        self.more_bytes = more_bytes
        self._at_start = _private_bytes()
        limit = self._at_start + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        ceiling = limit + REPORT_BYTES
        if hard != resource.RLIM_INFINITY:
            ceiling = min(ceiling, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (min(limit, ceiling), ceiling))

    def spent(self) -> bool:
        """Whether more than half of it is in use: what fails then may have failed because of that."""
        return _private_bytes() - self._at_start > self.more_bytes // 2

    def open_reserve(self) -> None:
        """Give this process the reserve for its report."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def resident_bytes(pids: list[int]) -> int:
    """Bytes in physical memory, over all of ``pids``; what they share counts once for each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            total += int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES
    return total


def proportional_bytes(pids: list[int]) -> int:
    """Bytes as in resident_bytes, but each page counts once, divided among its holders. Slow for a large process."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
                if line.startswith(b"Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def held_beyond(pid: int, limit: int) -> tuple[int, int] | None:
    """Bytes that a process and its descendants hold, and the number of these, where that is more than ``limit``."""
    pids = family(pid)
    # Shared pages count more than once in the first, which costs next to nothing.
    if resident_bytes(pids) > limit and (held := proportional_bytes(pids)) > limit:
        return held, len(pids) - 1
    return None


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    # The list grows while it is gone through.
    for one in found:
        # Each thread has children of its own.
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                with contextlib.suppress(OSError):
                    found += map(int, _read(f"/proc/{one}/task/{thread}/children").split())
    return found


def _read(path: str) -> bytes:
    # A pool reads these files several times a second, and pathlib takes longer than the kernel.
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _private_bytes() -> int:
    """Bytes that RLIMIT_DATA counts of this process."""
    with contextlib.suppress(OSError):
        for line in _read("/proc/self/status").splitlines():
            if line.startswith(b"VmData:"):
                return int(line.split()[1]) << 10
    return 0
