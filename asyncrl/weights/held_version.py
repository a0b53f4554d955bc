"""A version of the weights in sealed memory, held open by one process: the learner, the parameter server or a replica.

A version is a list of segments, one for each bucket. A segment is a memfd (anonymous memory with a file descriptor):
written once, sealed, with a checksum (xxh3_64). Processes of the same user open it as /proc/PID/fd/N.

Invariants: the bytes cannot change, because no process can change or shrink a sealed segment. They stay as long as the
version is held here, even if the process that wrote them dies. The kernel frees a segment when no process has it open
or mapped. A view keeps its mapping and its pages: ZeroMQ may still send from a version that is closed. So no code here
unmaps memory.

Fails with WeightsCorrupt for a segment that is missing, too small, not sealed, or with another checksum, and for a
contradictory manifest. Fails with VersionGone for a version that is closed, with InvalidRequest for an unknown bucket,
and with OSError when memory or descriptors run out.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import re
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import xxhash

from asyncrl.core.errors import InvalidRequest, VersionGone, WeightsCorrupt
from asyncrl.messages.weights import Bucket, Manifest, TensorSpec

if TYPE_CHECKING:
    from typing_extensions import Buffer

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each parameter, by name."""
ALIGNMENT = 64
"""Every tensor's offset is a multiple of this many bytes."""
SEAL_TRIES = 10
"""Most tries to seal. The kernel refuses a seal (EBUSY) while a page of the memory is in use, as by a read. Before that
it waits some 0.15 s."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
CHUNK_BYTES = 512 << 10
"""Bytes that a checksum reads in one step. They fit in a core's cache."""

_PATH = re.compile(r"/proc/\d+/fd/\d+")


# --- segments ---


class Segment:
    """A new segment, to be written and then sealed. Bytes that are never written are zeros."""

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            # An empty segment cannot be mapped.
            os.ftruncate(self.fd, max(size, 1))
        except BaseException:
            os.close(self.fd)
            raise

    def write(self, offset: int, data: Buffer) -> None:
        """Write ``data`` at byte ``offset``; releases the interpreter's lock. Raises OSError when memory runs out.

        In a mapping, each new page would cost a page fault, which takes longer than the copy.
        """
        left = memoryview(data).cast("B")
        assert offset + left.nbytes <= self.size, "past the end"
        while left:
            written = os.pwrite(self.fd, left, offset)
            left, offset = left[written:], offset + written

    def seal(self, tensors: Sequence[TensorSpec], checksum: int | None = None) -> Bucket:
        """Seal the segment and return the bucket; the caller must close ``fd`` from here on.

        ``checksum`` is that of all bytes, if the caller has it; else they are read again.
        """
        for tries_left in reversed(range(SEAL_TRIES)):
            try:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
                break
            except OSError as error:
                if error.errno != errno.EBUSY or not tries_left:
                    raise
        size = max(self.size, 1)
        if checksum is None:
            checksum = _checksum_of(self.fd, size)
        return Bucket(path=path_of(self.fd), size=size, checksum=checksum, tensors=list(tensors))

    def discard(self) -> None:
        """Free a segment that does not become part of a version."""
        os.close(self.fd)


def seal_verified(segment: Segment, bucket: Bucket, *, version: int, index: int) -> int:
    """Seal a written segment and return its descriptor.

    If its checksum is not that of the manifest's ``bucket``, discards the segment and raises WeightsCorrupt.
    """
    try:
        found = segment.seal(bucket.tensors)
        compare_checksums(found.checksum, bucket.checksum, version=version, index=index)
    except BaseException:
        segment.discard()
        raise
    return segment.fd


def path_of(descriptor: int) -> str:
    """Return the path by which other processes of this user can open a descriptor of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def place_tensors(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[list[TensorSpec], int]:
    """Place tensors, given as (name, dtype, shape), one after the other in a bucket, each one aligned.

    Returns their specs and the size of the bucket in bytes.
    """
    specs, offset = [], 0
    for name, dtype, shape in tensors:
        spec = TensorSpec(name=name, dtype=dtype, shape=shape, offset=offset)
        specs.append(spec)
        offset = -(-(offset + size_of(spec)) // ALIGNMENT) * ALIGNMENT
    return specs, offset


def fill_buckets(sizes: Sequence[int], limit: int) -> list[range]:
    """Divide consecutive units of these sizes into buckets of at most ``limit`` bytes. Returns ranges of indices.

    A unit that is larger than the limit becomes a bucket of its own.
    """
    starts, total = [0], 0
    for i, size in enumerate(sizes):
        if i > starts[-1] and total + size > limit:
            starts.append(i)
            total = 0
        total += size
    return [range(start, end) for start, end in pairwise([*starts, len(sizes)])] if sizes else []


def size_of(spec: TensorSpec) -> int:
    """Bytes of a tensor."""
    return ITEM_BYTES[spec.dtype] * math.prod(spec.shape)


def open_segment(bucket: Bucket, *, version: int, index: int) -> int:
    """Open a bucket's segment, check its seals and size, and return the descriptor. Raises WeightsCorrupt."""
    if not _PATH.fullmatch(bucket.path):
        raise WeightsCorrupt(f"{bucket.path!r} is not a /proc/PID/fd/N", version=version, bucket=index)
    try:
        # O_NONBLOCK: opening must not wait if another kind of file is behind the path.
        descriptor = os.open(bucket.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise WeightsCorrupt(
            f"{bucket.path} cannot be opened: {error.strerror}; did its publisher die, or is it another user's?",
            version=version,
            bucket=index,
        ) from error
    problem = _seal_problem(descriptor, bucket.size)
    if problem:
        os.close(descriptor)
        raise WeightsCorrupt(problem, version=version, bucket=index)
    return descriptor


def _seal_problem(descriptor: int, size: int) -> str:
    """Return why this is no sealed memory of at least ``size`` bytes, or an empty text."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & SEALS != SEALS:
        return "its memory is not sealed against change"
    found = os.fstat(descriptor).st_size
    return f"holds {found} bytes instead of {size}" if found < size else ""


def _checksum_of(descriptor: int, size: int) -> int:
    """Compute the checksum of a segment's first ``size`` bytes.

    Reads into a small buffer, which is faster than a mapping of all pages. Raises OSError.
    """
    digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(CHUNK_BYTES, size)))
    done = 0
    while done < size and (count := os.preadv(descriptor, [buffer[: size - done]], done)):
        digest.update(buffer[:count])
        done += count
    return digest.intdigest()


def compare_checksums(found: int, checksum: int, *, version: int, index: int) -> None:
    """Raise WeightsCorrupt if the checksum of a bucket's bytes is another than that of its manifest."""
    if found != checksum:
        raise WeightsCorrupt(
            f"its checksum is {found:#018x} instead of {checksum:#018x}", version=version, bucket=index
        )


# --- versions ---


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
                descriptor, size = self._descriptor(bucket), self._size(bucket)
                self._views[bucket] = memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ))
            return self._views[bucket]

    def verify(self, bucket: int) -> None:
        """Compare a bucket with its checksum; blocks. Raises as ``bytes_of``, and WeightsCorrupt."""
        # The bytes are read by a descriptor of this thread, because another thread may close the version meanwhile.
        with self._lock:
            descriptor = os.dup(self._descriptor(bucket))
        try:
            found = _checksum_of(descriptor, self._size(bucket))
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
