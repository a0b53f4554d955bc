"""Sealed memory segments that carry a version of the weights to other processes of this host.

A bucket is one memfd: written once, checksummed (xxh3_64), then sealed, so that nobody can change or shrink what
others have mapped. It lives as long as somebody holds it open: the publisher until ``Publication.release``, a reader
that has opened /proc/PID/fd/N for as long as it likes.

Fails: OSError when memory runs out; WeightsCorrupt when a segment is not what its manifest says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncrl.messages import Bucket, Manifest, TensorSpec


@dataclass
class Publication:
    """A published version: owns the file descriptors of its buckets until ``release``."""

    manifest: Manifest
    gather_s: float
    """Seconds that rank 0 spent until everything was gathered and sealed."""
    fds: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Size of all buckets."""
        return sum(bucket.size for bucket in self.manifest.buckets)

    def release(self) -> None:
        """Close the segments; those who opened them keep them. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


def read_manifest(manifest: Manifest) -> Iterator[tuple[TensorSpec, memoryview]]:
    """Each tensor of a manifest with its bytes, read-only, bucket by bucket.

    Raises WeightsCorrupt when a segment cannot be opened, is not sealed, or differs in size or checksum.
    """
    raise NotImplementedError


def open_bucket(bucket: Bucket, *, version: int, index: int) -> memoryview:
    """Map one bucket read-only after checking seals, size and checksum. Raises WeightsCorrupt."""
    raise NotImplementedError
