"""The memory of a worker and its limits.

There are two limits, because neither catches everything. A reward worker limits its private memory (RLIMIT_DATA, which
its children inherit), so the user's code gets a MemoryError at the allocation that exceeds it. Address space that is
only reserved does not count. The actor measures the resident memory of any worker and all its descendants together,
with shared memory, and kills them above its limit. Invariant: a measurement never fails but may be too low. A process
that has ended counts as 0. On a kernel without lists of children only the worker is measured.
"""

from __future__ import annotations

import contextlib
import os
import resource

REPORT_BYTES = 32 << 20
"""Memory beyond the limit (bytes), reserved for the worker's answer, which says that the limit was reached."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryLimit:
    """Limits this process to ``more_bytes`` of private memory beyond the present, with a reserve for its answer."""

    def __init__(self, more_bytes: int) -> None:
        self.more_bytes = more_bytes
        self._bytes_at_start = _private_bytes()
        limit = self._bytes_at_start + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        ceiling = limit + REPORT_BYTES
        if hard != resource.RLIM_INFINITY:
            ceiling = min(ceiling, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (min(limit, ceiling), ceiling))

    def spent(self) -> bool:
        """Whether more than half of the limit is in use, so that an error may be due to it.

        Libraries with allocators of their own report a lack of memory by errors of other types than MemoryError.
        """
        return _private_bytes() - self._bytes_at_start > self.more_bytes // 2

    def open_reserve(self) -> None:
        """Raise the limit by the reserve."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def resident_bytes(pids: list[int]) -> int:
    """Sum of the resident memory of ``pids`` (bytes). A page that several share counts for each of them."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            total += int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES
    return total


def proportional_bytes(pids: list[int]) -> int:
    """Like resident_bytes, but a shared page is divided among its holders (PSS). Slow for a large process."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
                if line.startswith(b"Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def held_beyond(pid: int, limit: int) -> tuple[int, int] | None:
    """If a process and its descendants hold more than ``limit`` bytes: (bytes, number of descendants), else None."""
    pids = family(pid)
    # The first measure is cheap and never below the second, so the slow one is needed only above the limit.
    if resident_bytes(pids) > limit and (held := proportional_bytes(pids)) > limit:
        return held, len(pids) - 1
    return None


def family(pid: int) -> list[int]:
    """Return the pids of a process and its descendants."""
    pids = [pid]
    # The list grows during the loop.
    for parent in pids:
        # Each thread has children of its own.
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):
                    pids += map(int, _read(f"/proc/{parent}/task/{thread}/children").split())
    return pids


def _read(path: str) -> bytes:
    # Not by pathlib, which takes longer than the kernel: a pool reads these files several times a second.
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _private_bytes() -> int:
    """The memory of this process that RLIMIT_DATA limits (bytes)."""
    with contextlib.suppress(OSError):
        for line in _read("/proc/self/status").splitlines():
            if line.startswith(b"VmData:"):
                return int(line.split()[1]) << 10
    return 0
