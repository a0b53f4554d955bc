"""Deltas of a held version against another one, encoded once for all replicas that have the other.

A bucket gets a delta where its layout is that of the same bucket of the base and the encoding pays (weights/delta.py).
The segments are read and written here, the buckets in parallel; that blocks for a second per GiB and core, so it is
run in a thread.

Fails with VersionGone when either version has been released, and with OSError when memory or descriptors run out;
both snapshots are then as they were.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from asyncrl.messages.weights import Bucket, Delta
from asyncrl.parameter_server.snapshots import Snapshot
from asyncrl.weights.delta import encode
from asyncrl.weights.segments import ITEM_BYTES, Segment, size_of

MAX_THREADS = 4
"""The other cores are the learner's and the engines'."""


def encode_deltas(base: Snapshot, snapshot: Snapshot) -> Snapshot:
    """``snapshot`` with deltas against ``base`` where they pay.

    All of its descriptors go over to the result, which is to be released instead of it. ``base`` may be released
    meanwhile.
    """
    pairs = {
        index: (base.bytes_of(index), snapshot.bytes_of(index))
        for index, (old, new) in enumerate(zip(base.manifest.buckets, snapshot.manifest.buckets, strict=False))
        if old.size == new.size and old.tensors == new.tensors
    }
    version = base.manifest.version
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        encodings = {
            index: pool.submit(_encode, version, old, new, item_bytes(snapshot.manifest.buckets[index]))
            for index, (old, new) in pairs.items()
        }
    try:
        results = {index: encoding.result() for index, encoding in encodings.items()}
        return snapshot.with_deltas({index: result for index, result in results.items() if result is not None})
    except BaseException:
        for encoding in encodings.values():
            if encoding.exception() is None and (made := encoding.result()) is not None:
                os.close(made[1])
        raise


def _encode(base: int, old: memoryview, new: memoryview, item_bytes: int) -> tuple[Delta, int] | None:
    encoded = encode(old, new, item_bytes)
    if encoded is None:
        return None
    segment = Segment("asyncrl-delta", len(encoded))
    try:
        segment.write(0, encoded)
        sealed = segment.seal([])
    except BaseException:
        segment.discard()
        raise
    return Delta(base=base, path=sealed.path, size=sealed.size), segment.fd


def item_bytes(bucket: Bucket) -> int:
    """Bytes of each of the numbers that take up most of the bucket."""
    sizes: Counter[int] = Counter({1: 0})
    for spec in bucket.tensors:
        sizes[ITEM_BYTES[spec.dtype]] += size_of(spec)
    return max(sizes, key=sizes.__getitem__)
