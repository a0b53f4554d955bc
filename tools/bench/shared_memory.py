"""Shared memory against memcpy: a version's bytes from one array, through a sealed segment, into another array.

asyncrl's side is the publication path: a new segment is made and filled, checksummed and sealed; then it is opened
as a reader opens it, its seals and its checksum verified, mapped and copied out. The floor carries the same bytes
with the same two copies through an anonymous shared mapping of its own, which has no name, no seal, no checksum, and is
mapped once. Each side takes its memory from the system afresh, for a sealed segment is never written to again.

A further figure without a target is one copy between two existing arrays, which allocates no memory.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np

from asyncrl.messages.weights import Bucket
from asyncrl.weights.segments import Segment, layout, open_segment, verify_segment
from tools.bench.paired import Side, compare, measure_pairs
from tools.bench.report import Report, Target


async def measure(report: Report, size: int, pairs: int) -> None:
    """Bytes a second of each side."""
    source = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    target = np.ones(size, np.uint8)

    def side(carry: Callable[[np.ndarray, np.ndarray], None]) -> Side:
        async def once() -> float:
            began = time.perf_counter()
            carry(source, target)
            return size / (time.perf_counter() - began)

        return once

    segment, mapping, copy = side(through_segment), side(through_mapping), side(one_copy)
    found = compare(await measure_pairs(segment, mapping, pairs))
    assert np.array_equal(source, target)
    report.comparison(
        "shared_memory_vs_memcpy", found, unit="bytes/s", sides=("segment", "memcpy"), target=Target(">=", 0.6)
    )
    found = compare(await measure_pairs(segment, segment, pairs))
    report.same("shared_memory_vs_memcpy", found)
    found = compare(await measure_pairs(segment, copy, pairs))
    report.comparison("shared_memory_vs_one_copy", found, unit="bytes/s", sides=("segment", "np.copyto"))


def _map(bucket: Bucket) -> mmap.mmap:
    """Map a bucket as an engine does: seals and size, checksum, mapping."""
    descriptor = open_segment(bucket, version=0, index=0)
    try:
        for _ in verify_segment(descriptor, bucket, version=0, index=0):
            pass
        return mmap.mmap(descriptor, bucket.size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def through_segment(source: np.ndarray, target: np.ndarray) -> None:
    """Publish, open, read."""
    specs, size = layout([("weights", "uint8", source.shape)])
    segment = Segment("asyncrl-bench", size)
    place = np.frombuffer(segment.memory, np.uint8)
    np.copyto(place, source)
    del place
    try:
        bucket = segment.seal(specs)
        np.copyto(target, np.frombuffer(_map(bucket), np.uint8))
    finally:
        os.close(segment.fd)


def one_copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy between arrays that exist already."""
    np.copyto(target, source)


def through_mapping(source: np.ndarray, target: np.ndarray) -> None:
    """Copy in and out of memory that another process could share."""
    with mmap.mmap(-1, source.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as mapping:
        place = np.frombuffer(mapping, np.uint8)
        np.copyto(place, source)
        np.copyto(target, place)
        del place
