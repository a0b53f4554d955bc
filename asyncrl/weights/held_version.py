"""A version of the weights in sealed memory, held open by one process: the learner, the parameter server or a replica.

Invariants: the bytes cannot change, because every segment is sealed (segments.py). They stay as long as the version is
held here, even if the process that wrote them dies. The kernel frees a segment when no process has it open or mapped. A
view keeps its mapping and its pages: ZeroMQ may still send from a version that is closed. So no code here unmaps
memory.

Fails with WeightsCorrupt for a segment that is missing, too small, not sealed, or with another checksum, and for a
contradictory manifest. Fails with VersionGone for a version that is closed.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import msgspec

from asyncrl.core.errors import InvalidRequest, VersionGone, WeightsCorrupt
from asyncrl.messages.weights import Bucket, Manifest, TensorSpec
from asyncrl.weights.segments import (
    ALIGNMENT,
    ITEM_BYTES,
    checksum_of,
    compare_checksums,
    map_segment,
    open_segment,
    path_of,
    size_of,
)

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each parameter, by name."""


class HeldVersion:
    """One version, whose segments this object keeps open. May be used from several threads.

    The paths of ``manifest`` lead to the descriptors of this process.
    """

    def __init__(self, manifest: Manifest, descriptors: Sequence[int]) -> None:
        """``descriptors`` are those of the segments, in order of the buckets; this object closes them."""
        self.descriptors = list(descriptors)
        """Descriptors of the segments; empty once closed."""
        buckets = [
            msgspec.structs.replace(bucket, path=path_of(descriptor))
            for bucket, descriptor in zip(manifest.buckets, descriptors, strict=True)
        ]
        self.manifest = msgspec.structs.replace(manifest, buckets=buckets)
        self._views: dict[int, memoryview] = {}
        """Views that ``bytes_of`` has returned, by bucket."""
        self._lock = threading.RLock()
        # If the task that waits for this object is cancelled, no owner closes it. Then the finalizer does, which is
        # also dead once ``close`` has called it.
        self._finalizer = weakref.finalize(self, close_all, self.descriptors)

    @property
    def version(self) -> int:
        """Number of the version."""
        return self.manifest.version

    @property
    def bytes(self) -> int:
        """Bytes of all buckets."""
        return self.manifest.bytes

    @cached_property
    def layout(self) -> Layout:
        """As ``layout_of``."""
        return layout_of(self.manifest)

    def bytes_of(self, bucket: int) -> memoryview:
        """Map a bucket, read-only and without a copy, and keep the view until ``close``.

        Raises InvalidRequest for an unknown bucket, VersionGone once closed.
        """
        with self._lock:
            if bucket not in self._views:
                self._views[bucket] = memoryview(map_segment(self._descriptor(bucket), self._size(bucket)))
            return self._views[bucket]

    def verify(self, bucket: int) -> None:
        """Compare a bucket with its checksum; blocks. Raises as ``bytes_of``, and WeightsCorrupt."""
        # The bytes are read by a descriptor of this thread, because another thread may close the version meanwhile.
        with self._lock:
            descriptor = os.dup(self._descriptor(bucket))
        try:
            found = checksum_of(descriptor, self._size(bucket))
        finally:
            os.close(descriptor)
        compare_checksums(found, self.manifest.buckets[bucket].checksum, version=self.version, index=bucket)

    def _descriptor(self, bucket: int) -> int:
        """The descriptor of a bucket. Raises InvalidRequest, and VersionGone once closed."""
        if not self._finalizer.alive:
            raise VersionGone(self.version)
        if bucket >= len(self.descriptors):
            raise InvalidRequest(f"version {self.version} has no bucket {bucket}")
        return self.descriptors[bucket]

    def _size(self, bucket: int) -> int:
        return self.manifest.buckets[bucket].size

    def close(self) -> None:
        """Close the segments; may be repeated. Takes about 0.1 s for each GiB that no other process holds."""
        with self._lock:
            self._views.clear()
            self._finalizer()

    def __enter__(self) -> HeldVersion:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def hold(manifest: Manifest) -> HeldVersion:
    """Open every segment of a manifest, and return the held version; checksums are not compared.

    Raises WeightsCorrupt.
    """
    descriptors: list[int] = []
    try:
        for index, bucket in enumerate(manifest.buckets):
            descriptors.append(open_segment(bucket, version=manifest.version, index=index))
    except BaseException:
        close_all(descriptors)
        raise
    return HeldVersion(manifest, descriptors)


def close_all(descriptors: list[int]) -> None:
    """Close descriptors, each once."""
    while descriptors:
        os.close(descriptors.pop())


# --- names, types and shapes ---


def layout_of(manifest: Manifest) -> Layout:
    """Read the layout from a manifest. Raises WeightsCorrupt for one that is contradictory."""
    layouts: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index, bucket in enumerate(manifest.buckets):
        if not bucket.size:
            raise WeightsCorrupt("it is empty", version=manifest.version, bucket=index)
        end = 0
        # An empty tensor may have the same offset as the tensor after it. The smaller one is checked first, so this is
        # no overlap.
        for spec in sorted(bucket.tensors, key=lambda spec: (spec.offset, math.prod(spec.shape))):
            problem = _spec_problem(spec, bucket, end)
            if problem is None and spec.name in layouts:
                problem = "occurs twice"
            if problem is not None:
                raise WeightsCorrupt(f"{spec.name} {problem}", version=manifest.version, bucket=index)
            layouts[spec.name] = (spec.dtype, spec.shape)
            end = spec.offset + size_of(spec)
    return layouts


def _spec_problem(spec: TensorSpec, bucket: Bucket, end: int) -> str | None:
    """Describe the problem of a tensor in its bucket; None without one. The tensor before it ends at ``end``."""
    if spec.dtype not in ITEM_BYTES:
        return f"has the unknown dtype {spec.dtype!r}"
    if any(extent < 0 for extent in spec.shape):
        return f"has the shape {spec.shape}"
    if spec.offset % ALIGNMENT:
        return f"lies at {spec.offset}, which is not aligned to {ALIGNMENT} bytes"
    if spec.offset < end:
        return f"overlaps the tensor before it (offset {spec.offset} < {end})"
    if spec.offset + size_of(spec) > bucket.size:
        return f"reaches past the bucket's {bucket.size} bytes"
    return None


def check_complete(
    version: int,
    found: Layout,
    expected: Layout,
    *,
    optional: frozenset[str] = frozenset(),
    dtypes: bool = True,
) -> None:
    """Compare a version's layout (``found``) with the expected one.

    Raises WeightsCorrupt naming the first few differences. ``optional`` names may be absent on either side. If
    ``dtypes`` is False, only names and shapes are compared.
    """
    missing = expected.keys() - found.keys() - optional
    unknown = found.keys() - expected.keys() - optional
    changed = []
    for name in found.keys() & expected.keys():
        (dtype, shape), (expected_dtype, expected_shape) = found[name], expected[name]
        if shape != expected_shape or (dtypes and dtype != expected_dtype):
            changed.append(f"{name} is {_shown(found[name])} instead of {_shown(expected[name])}")
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(expected)} parameters are missing ({_few(missing)})")
    if unknown:
        problems.append(f"{len(unknown)} parameters are unknown to the model ({_few(unknown)})")
    if changed:
        problems.append(f"{len(changed)} parameters have changed ({_few(changed)})")
    if problems:
        raise WeightsCorrupt("; ".join(problems), version=version)


def _shown(entry: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = entry
    return f"{dtype} {list(shape)}"


def _few(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
