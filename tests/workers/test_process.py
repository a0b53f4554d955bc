"""A worker process, seen from its actor."""

import asyncio
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest
from virtual import run_virtual

from asyncrl.rpc.linux import kill_child
from asyncrl.workers.confinement import UNISOLATED
from asyncrl.workers.process import Output, WorkerProcess, kill_living

TAKEN = 8
"""Descriptors that a start takes: socket pair, /dev/null, pipe, and those of subprocess."""


def started(module: str, on_end: Callable[..., None] = lambda *_: None) -> WorkerProcess:
    return WorkerProcess(
        module,
        b"",
        confined=UNISOLATED,
        max_frame_bytes=1,
        max_output_bytes=1,
        memory_key="",
        on_output=lambda _: None,
        on_frame=lambda *_: None,
        on_end=on_end,
    )


def opened() -> set[int]:
    # Without that of the listing.
    return {number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")}


async def test_a_worker_that_fails_to_start_without_descriptors_leaves_none_open() -> None:
    before = opened()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(max(before) + TAKEN + 1) if number not in before]
    for spare in range(TAKEN):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                started("there_is_none")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert opened() == before, f"{spare} were left"


def test_a_killed_worker_that_ends_slowly_is_checked_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    waitid, descendants = os.waitid, WorkerProcess.descendants

    async def main() -> float:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def slow(kind: int, pid: int, options: int) -> os.waitid_result | None:
            looked.append("process")
            # The process may take real time to end, in which virtual time would jump on.
            return waitid(kind, pid, options & ~os.WNOHANG) if loop.time() >= 20.0 else None

        def counted(worker: WorkerProcess) -> list[psutil.Process]:
            looked.append("descendants")
            return descendants(worker)

        monkeypatch.setattr(os, "waitid", slow)
        monkeypatch.setattr(WorkerProcess, "descendants", counted)
        worker = started("asyncrl.workers.keeper", lambda *_: ended.set())
        worker.kill("took too long")
        await ended.wait()
        return loop.time()

    assert run_virtual(main()) >= 20.0
    assert looked.count("descendants") <= 21
    assert looked.count("process") < 1000


def test_a_character_that_is_printed_in_two_parts_is_one() -> None:
    output = Output(limit=7)

    def taken(printed: bytes, *, end_of_call: bool = False) -> tuple[str, int]:
        os.write(output.write_fd, printed)
        output.drain()
        return output.take(end_of_call=end_of_call)

    try:
        assert [taken(b"a\xe6\x97"), taken(b"\xa5"), taken(b"b")] == [("a", 0), ("日", 0), ("b", 0)]
        # Output beyond the limit is lost, and the next call starts with its own.
        assert [taken("日".encode()), taken(b"", end_of_call=True), taken(b"c")] == [("", 0), ("\ufffd", 1), ("c", 0)]
    finally:
        output.started()
        output.close()


def test_a_process_that_may_not_be_killed_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that has changed its user by sudo: the others are killed, and nothing fails."""

    def refused(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        helper = psutil.Process(child.pid)
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", refused)
            assert kill_living([helper]) == []
            kill_child(child.pid)
        assert kill_living([helper]) == [helper]
    finally:
        child.kill()
        child.wait()
