"""The versions that the parameter server holds: sealed memory segments, kept open here.

A publisher may close its segments, or die, once its publication is answered: segments held here stay readable
through this process until it is released. The kernel frees a segment when the last process lets go of it.

A view of a segment keeps its mapping, and with it the pages, for as long as it lives: ZeroMQ may still be sending
from a version that was released. So nothing here is unmapped by hand; mappings go with their last view.

Fails with WeightsCorrupt for a segment that is gone, of another size, or could still be changed; with VersionGone for
a version that was released.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

import msgspec

from asyncrl.errors import InvalidRequest, VersionGone
from asyncrl.messages.weights import Delta, Manifest
from asyncrl.weights.segments import map_segment, open_segment, path_of, verify_bytes

WHOLE = -1
"""Base that stands for no delta: the bucket itself."""


class HeldSnapshot:
    """One held version; ``manifest`` leads to the segments through this process. May be used from several threads."""

    def __init__(self, manifest: Manifest, descriptors: Mapping[tuple[int, int], int]) -> None:
        self.manifest = manifest
        self._descriptors = dict(descriptors)
        """Descriptor of each segment, by bucket and base of its delta, or WHOLE."""
        self._views: dict[tuple[int, int], memoryview] = {}
        self._lock = threading.Lock()
        self._released = False

    def bytes_of(self, bucket: int, base: int = WHOLE) -> memoryview:
        """Bytes of a bucket, or of its delta against version ``base``: read-only, not copied.

        Raises InvalidRequest where there is no such thing, VersionGone once the snapshot has been released.
        """
        with self._lock:
            if self._released:
                raise VersionGone(self.manifest.version)
            key = (bucket, base)
            if key not in self._descriptors:
                raise InvalidRequest(
                    f"version {self.manifest.version} has no bucket {bucket}"
                    + ("" if base == WHOLE else f" with a delta against version {base}")
                )
            if key not in self._views:
                found = self.manifest.buckets[bucket]
                size = found.size if base == WHOLE or found.delta is None else found.delta.size
                self._views[key] = memoryview(map_segment(self._descriptors[key], size))
            return self._views[key]

    def verify(self) -> None:
        """Compare every bucket with its checksum. Raises WeightsCorrupt, and VersionGone once released; blocks."""
        for index, bucket in enumerate(self.manifest.buckets):
            view = self.bytes_of(index)
            for _ in verify_bytes(view, bucket.checksum, version=self.manifest.version, index=index):
                pass

    def with_deltas(self, deltas: Mapping[int, tuple[Delta, int]]) -> HeldSnapshot:
        """This version with a delta (and the descriptor of its segment) for these buckets.

        The descriptors of both go over to the result; this object is as released. Raises VersionGone if it was before.
        """
        buckets = [
            msgspec.structs.replace(bucket, delta=deltas[index][0]) if index in deltas else bucket
            for index, bucket in enumerate(self.manifest.buckets)
        ]
        encoded = {(index, delta.base): descriptor for index, (delta, descriptor) in deltas.items()}
        assert not encoded.keys() & self._descriptors.keys(), "encoded twice"
        with self._lock:
            if self._released:
                raise VersionGone(self.manifest.version)
            self._released = True
            self._views.clear()
            return HeldSnapshot(msgspec.structs.replace(self.manifest, buckets=buckets), self._descriptors | encoded)

    def release(self) -> None:
        """Let go of the segments. May be repeated. A GiB that nobody else holds takes some 0.1 s."""
        with self._lock:
            if not self._released:
                self._released = True
                self._views.clear()
                for descriptor in self._descriptors.values():
                    os.close(descriptor)


def hold(manifest: Manifest) -> HeldSnapshot:
    """Open every segment of a publication. Raises WeightsCorrupt."""
    descriptors: dict[tuple[int, int], int] = {}
    try:
        for index, bucket in enumerate(manifest.buckets):
            descriptors[index, WHOLE] = open_segment(bucket, version=manifest.version, index=index)
    except BaseException:
        for descriptor in descriptors.values():
            os.close(descriptor)
        raise
    buckets = [
        msgspec.structs.replace(bucket, path=path_of(descriptors[index, WHOLE]), delta=None)
        for index, bucket in enumerate(manifest.buckets)
    ]
    return HeldSnapshot(msgspec.structs.replace(manifest, buckets=buckets), descriptors)
