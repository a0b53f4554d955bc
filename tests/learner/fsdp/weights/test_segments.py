"""Published segments: sealed, closed, and the size of each."""

from __future__ import annotations

import fcntl
import mmap
import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from segment_reading import read_manifest

from asyncrl.core.errors import WeightsCorrupt
from asyncrl.messages.weights import Manifest
from asyncrl.weights.held_version import HeldVersion
from asyncrl.weights.segments import SEALS, Segment, fill_buckets, layout


def _publish() -> HeldVersion:
    tensors, size = layout([("a", "float32", (2, 3))])
    segment = Segment("test", size)
    return HeldVersion(Manifest(version=3, buckets=[segment.seal(tensors)]), [segment.fd])


def test_a_sealed_segment_refuses_every_change() -> None:
    with _publish() as publication:
        [bucket] = publication.manifest.buckets
        fd = os.open(bucket.path, os.O_RDWR)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
        for change in (
            lambda: os.pwrite(fd, b"x", 0),
            lambda: os.ftruncate(fd, 1),
            lambda: os.ftruncate(fd, bucket.size + 1),
            lambda: mmap.mmap(fd, bucket.size),
            lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                change()
        os.close(fd)


def test_a_closed_version_can_no_longer_be_opened() -> None:
    publication = _publish()
    [bucket] = publication.manifest.buckets
    late = os.open(bucket.path, os.O_RDONLY)
    publication.close()
    publication.close()
    assert os.fstat(late).st_size == bucket.size
    os.close(late)
    with pytest.raises(WeightsCorrupt, match="cannot be opened"):
        list(read_manifest(publication.manifest))


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 150))
def test_buckets_hold_consecutive_units_within_the_limit(sizes: list[int], limit: int) -> None:
    buckets = fill_buckets(sizes, limit)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in bucket) <= limit or len(bucket) == 1 for bucket in buckets)
    # As few as possible: two neighbours do not fit into one.
    assert all(sum(sizes[i] for i in first) + sizes[second[0]] > limit for first, second in pairwise(buckets))
