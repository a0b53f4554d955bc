"""Sealed memory segments: large immutable data for other processes of this host.

A segment is a memfd (anonymous memory with a file descriptor): written once, checksummed (xxh3_64), then sealed. After
that no process can change or shrink the pages that others have mapped. Processes of the same user open it as
/proc/PID/fd/N. The kernel frees it when the last process that holds it closes it or dies.

Fails with OSError when memory or descriptors run out, and with WeightsCorrupt when a segment differs from its bucket.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import xxhash

from asyncrl.core.errors import WeightsCorrupt
from asyncrl.messages.weights import Bucket, TensorSpec

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALIGNMENT = 64
"""Every tensor's offset is a multiple of this many bytes."""
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
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        size = max(self.size, 1)
        if checksum is None:
            checksum = checksum_of(self.fd, size)
        return Bucket(path=path_of(self.fd), size=size, checksum=checksum, tensors=list(tensors))

    def discard(self) -> None:
        """Free the segment, instead of ``seal`` or after ``seal`` has failed."""
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


def layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[list[TensorSpec], int]:
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


def map_segment(descriptor: int, size: int) -> mmap.mmap:
    """Map the content of a segment, read-only. The descriptor may be closed afterwards."""
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def checksum_of(descriptor: int, size: int) -> int:
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
