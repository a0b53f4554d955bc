"""A worker process, seen from its actor."""

import os
import resource

import pytest

from asyncrl.runtime.workers.confinement import UNISOLATED
from asyncrl.runtime.workers.process import WorkerProcess

TAKEN = 8
"""Descriptors that a start takes: socket pair, /dev/null, pipe, and those of subprocess."""


def opened() -> set[int]:
    # Without that of the listing.
    return {number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")}


async def test_a_worker_that_cannot_be_started_for_want_of_descriptors_leaves_none_open() -> None:
    before = opened()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(max(before) + TAKEN + 1) if number not in before]
    for spare in range(TAKEN):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                WorkerProcess(
                    "there_is_none",
                    b"",
                    confined=UNISOLATED,
                    max_frame_bytes=1,
                    max_output_bytes=1,
                    memory_key="",
                    on_output=lambda _: None,
                    on_frame=lambda *_: None,
                    on_end=lambda *_: None,
                )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert opened() == before, f"{spare} were left"
