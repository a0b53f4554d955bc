"""The versions that the parameter server holds: sealed memory segments, kept open here.

A publisher may close its segments, or die, once its publication is answered: what is held here stays readable
through this process until it is released. The kernel frees a segment when the last process lets go of it.

Fails with WeightsCorrupt for a segment that is gone, of another size, or could still be changed.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

import msgspec

from asyncrl.errors import WeightsCorrupt
from asyncrl.messages import Manifest

# Not all of these are in the fcntl module of every Python that we support.
F_GET_SEALS = 1034
SEALED = 0x0002 | 0x0004 | 0x0008
"""F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One held version; ``manifest`` leads to the segments through this process."""

    manifest: Manifest
    descriptors: tuple[int, ...]

    def release(self) -> None:
        """Let go of the segments."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def hold(manifest: Manifest) -> Snapshot:
    """Open every segment of a publication. Raises WeightsCorrupt."""
    descriptors: list[int] = []
    try:
        for index, bucket in enumerate(manifest.buckets):
            try:
                descriptor = os.open(bucket.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise WeightsCorrupt(
                    f"{bucket.path} cannot be opened: {error.strerror}",
                    version=manifest.version,
                    bucket=index,
                ) from None
            descriptors.append(descriptor)
            if os.fstat(descriptor).st_size < bucket.size:
                raise WeightsCorrupt("segment is shorter than stated", version=manifest.version, bucket=index)
            if fcntl.fcntl(descriptor, F_GET_SEALS) & SEALED != SEALED:
                raise WeightsCorrupt("segment is not sealed", version=manifest.version, bucket=index)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    buckets = [
        msgspec.structs.replace(bucket, path=f"/proc/{os.getpid()}/fd/{descriptor}")
        for bucket, descriptor in zip(manifest.buckets, descriptors, strict=True)
    ]
    return Snapshot(Manifest(version=manifest.version, buckets=buckets), tuple(descriptors))
