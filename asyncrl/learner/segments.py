"""Sealed memory segments that carry a version of the weights to other processes of this host.

A bucket is one memfd: written once, checksummed (xxh3_64), then sealed, so that nobody can change or shrink
what others have mapped. It lives as long as somebody holds it open: the publisher until
``Publication.release``, a reader that has opened /proc/PID/fd/N for as long as it likes.

Fails: OSError when memory or descriptors run out; WeightsCorrupt when a segment is not what its manifest
says.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from asyncrl.errors import WeightsCorrupt
from asyncrl.messages import Bucket, Manifest, TensorSpec

ALIGNMENT = 64
"""Bytes to which every tensor's offset is aligned."""
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


class Segment:
    """A segment being written. ``memory`` is its content; ``seal`` ends the writing.

    Whoever has taken a view of ``memory`` (a tensor, an array) drops it before ``seal``.
    """

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            # An empty mapping is not possible.
            os.ftruncate(self.fd, max(size, 1))
            self.memory = mmap.mmap(self.fd, max(size, 1))
        except BaseException:
            os.close(self.fd)
            raise

    def seal(self, tensors: Sequence[TensorSpec]) -> Bucket:
        """Checksum, unmap, seal. The descriptor is the caller's from here on."""
        checksum = xxhash.xxh3_64_intdigest(self.memory)
        # The kernel refuses F_SEAL_WRITE while a writable mapping is left.
        self.memory.close()
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        return Bucket(
            path=f"/proc/{os.getpid()}/fd/{self.fd}",
            size=max(self.size, 1),
            checksum=checksum,
            tensors=list(tensors),
        )

    def discard(self) -> None:
        """Give up: the segment is gone. Only instead of ``seal``."""
        os.close(self.fd)


@dataclass
class Publication:
    """A published version: owns the file descriptors of its buckets until ``release``."""

    manifest: Manifest
    gather_s: float
    """Seconds from the start until everything was gathered and sealed."""
    fds: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Size of all buckets."""
        return sum(bucket.size for bucket in self.manifest.buckets)

    def release(self) -> None:
        """Close the segments; those who opened them keep them. Idempotent."""
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


def layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[list[TensorSpec], int]:
    """Place (name, dtype, shape) one after the other, aligned. Returns the specs and the size of the bucket."""
    specs, offset = [], 0
    for name, dtype, shape in tensors:
        specs.append(TensorSpec(name=name, dtype=dtype, shape=shape, offset=offset))
        offset = -(-(offset + ITEM_BYTES[dtype] * math.prod(shape)) // ALIGNMENT) * ALIGNMENT
    return specs, offset


def fill_buckets(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive units put together into buckets of at most ``limit`` bytes; a larger unit is a bucket of
    its own.
    """
    buckets: list[range] = []
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            buckets.append(range(start, i))
            start, total = i, 0
        total += size
    if start < len(sizes):
        buckets.append(range(start, len(sizes)))
    return buckets


def open_bucket(bucket: Bucket, *, version: int, index: int) -> memoryview:
    """Map a bucket read-only after checking seals, size and checksum. Raises WeightsCorrupt."""

    def corrupt(what: str) -> WeightsCorrupt:
        return WeightsCorrupt(what, version=version, bucket=index)

    try:
        fd = os.open(bucket.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise corrupt(f"{bucket.path} cannot be opened: {error.strerror}") from error
    try:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise corrupt(f"{bucket.path} is no sealed segment") from error
        if seals & SEALS != SEALS:
            raise corrupt(f"{bucket.path} is not sealed")
        size = os.fstat(fd).st_size
        if size != bucket.size:
            raise corrupt(f"{bucket.path} has {size} bytes instead of {bucket.size}")
        view = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
    checksum = xxhash.xxh3_64_intdigest(view)
    if checksum != bucket.checksum:
        raise corrupt(f"checksum {checksum:016x} instead of {bucket.checksum:016x}")
    return view


def read_manifest(manifest: Manifest) -> Iterator[tuple[TensorSpec, memoryview]]:
    """Each tensor of a manifest with its bytes, read-only, bucket by bucket.

    Raises WeightsCorrupt when a segment cannot be opened, is not sealed, differs in size or checksum, or is
    too short for a tensor.
    """
    for index, bucket in enumerate(manifest.buckets):
        view = open_bucket(bucket, version=manifest.version, index=index)
        for spec in bucket.tensors:
            end = spec.offset + ITEM_BYTES[spec.dtype] * math.prod(spec.shape)
            if end > bucket.size:
                raise WeightsCorrupt(
                    f"{spec.name} ends at byte {end} of {bucket.size}", version=manifest.version, bucket=index
                )
            yield spec, view[spec.offset : end]
