"""The versions that the parameter server holds: sealed memory segments, kept open here.

A publisher may close its segments, or die, once its publication is answered: what is held here stays readable
through this process until it is released. The kernel frees a segment when the last process lets go of it.

Fails with WeightsCorrupt for a segment that is gone, of another size, or could still be changed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec

from asyncrl.messages import Manifest
from asyncrl.wire.segments import open_segment


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
            descriptors.append(open_segment(bucket, version=manifest.version, index=index))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    buckets = [
        msgspec.structs.replace(bucket, path=f"/proc/{os.getpid()}/fd/{descriptor}")
        for bucket, descriptor in zip(manifest.buckets, descriptors, strict=True)
    ]
    return Snapshot(Manifest(version=manifest.version, buckets=buckets), tuple(descriptors))
