"""Staging: a published version in sealed memory, verified, and held open until it is loaded.

The bytes that a Staged version names cannot change any more: their memory is sealed, was verified against the
manifest after the seals were seen, and stays open here, so that the publisher may die without harm. A process of this
user that loads it maps the same pages and need not verify them again.

A segment that is made here, out of chunks or of a delta, is sealed and verified before it counts as well.

Fails with WeightsCorrupt, before anything is handed to an engine.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from asyncrl.errors import WeightsCorrupt
from asyncrl.messages.weights import Bucket, Delta, Manifest, TensorSpec
from asyncrl.weights.delta import decode
from asyncrl.weights.segments import (
    ALIGNMENT,
    ITEM_BYTES,
    Segment,
    map_segment,
    open_segment,
    path_of,
    size_of,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each parameter, by name."""


def layout_of(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Layout that the manifest holds. Raises WeightsCorrupt where it contradicts itself.

    Each name occurs once, each tensor lies aligned within its bucket, and none overlaps another.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index, bucket in enumerate(manifest.buckets):
        if not bucket.size:
            raise WeightsCorrupt("it is empty", version=manifest.version, bucket=index)
        end = 0
        # An empty tensor may lie where the next one begins. It comes first, or it would seem to lie inside that one.
        for spec in sorted(bucket.tensors, key=lambda spec: (spec.offset, math.prod(spec.shape))):
            problem = _spec_problem(spec, bucket, end)
            if problem is None and spec.name in found:
                problem = "occurs twice"
            if problem is not None:
                raise WeightsCorrupt(f"{spec.name} {problem}", version=manifest.version, bucket=index)
            found[spec.name] = (spec.dtype, spec.shape)
            end = spec.offset + size_of(spec)
    return found


def _spec_problem(spec: TensorSpec, bucket: Bucket, end: int) -> str | None:
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
    """Compare a version's layout with the expected one; raises WeightsCorrupt naming the first few differences.

    ``optional`` names may be absent on either side. ``dtypes`` False compares shapes only.
    """
    missing = expected.keys() - found.keys() - optional
    unknown = found.keys() - expected.keys() - optional
    changed = [
        f"{name} is {_shown(found[name])} instead of {_shown(expected[name])}"
        for name in found.keys() & expected.keys()
        if found[name][1] != expected[name][1] or (dtypes and found[name][0] != expected[name][0])
    ]
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
    return f"{entry[0]} {list(entry[1])}"


def _few(names: Sequence[str] | set[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (", ..." if len(ordered) > 3 else "")


class StagedVersion:
    """A verified version, held open. ``manifest`` names the descriptors of this process."""

    def __init__(self, manifest: Manifest, layout: Layout, descriptors: list[int]) -> None:
        self.layout = layout
        self.manifest = msgspec.structs.replace(
            manifest,
            buckets=[
                msgspec.structs.replace(bucket, path=path_of(descriptor), delta=None)
                for bucket, descriptor in zip(manifest.buckets, descriptors, strict=True)
            ],
        )
        # A result that nobody came to fetch (the waiting task was cancelled) closes itself.
        self._finalizer = weakref.finalize(self, _close_all, descriptors)

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self.manifest.version

    def close(self) -> None:
        """Let the memory go. May be repeated. A GiB that nobody else holds takes some 0.1 s."""
        self._finalizer()


def delta_against(base: StagedVersion | None, bucket: Bucket, index: int) -> Delta | None:
    """The bucket's delta, if it can be applied to the version that is held here."""
    delta = bucket.delta
    if base is None or delta is None or delta.base != base.version or index >= len(base.manifest.buckets):
        return None
    held = base.manifest.buckets[index]
    same = held.size == bucket.size and held.tensors == bucket.tensors
    return delta if same and 0 < delta.size <= bucket.size else None


def seal_verified(segment: Segment, bucket: Bucket, *, version: int, index: int) -> int:
    """Seal the written segment, compare it with the manifest, and return the descriptor. Raises WeightsCorrupt.

    The segment is the descriptor's from here on, or gone.
    """
    try:
        found = segment.seal(bucket.tensors)
        if (found.size, found.checksum) != (bucket.size, bucket.checksum):
            raise WeightsCorrupt(
                f"its {found.size} bytes have the checksum {found.checksum:#018x}, instead of {bucket.size} bytes with "
                f"{bucket.checksum:#018x}",
                version=version,
                bucket=index,
            )
    except BaseException:
        segment.discard()
        raise
    return segment.fd


def apply_delta(encoded: Buffer, base: StagedVersion, bucket: Bucket, *, version: int, index: int) -> int:
    """Decode a delta against ``base`` into a segment of this process, and verify it.

    Returns its descriptor. Raises WeightsCorrupt.
    """
    held = open_segment(base.manifest.buckets[index], version=base.version, index=index)
    try:
        before = map_segment(held, bucket.size)
    finally:
        os.close(held)
    segment = Segment("asyncrl-weights", bucket.size)
    try:
        decode(encoded, before, segment.memory)
    except BaseException as error:
        segment.discard()
        if isinstance(error, ValueError):
            problem = f"its delta against version {base.version} cannot be read: {error}"
            raise WeightsCorrupt(problem, version=version, bucket=index) from None
        raise
    return seal_verified(segment, bucket, version=version, index=index)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
