from __future__ import annotations

import fcntl
import mmap
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from segment_reading import read_manifest

from asyncrl.errors import WeightsCorrupt
from asyncrl.learner.exchange.publication import Publication, fill_buckets
from asyncrl.messages.weights import Bucket, Manifest
from asyncrl.weights.segments import ALIGNMENT, SEALS, Segment, layout


def _publish(values: np.ndarray, version: int = 3) -> Publication:
    tensors, size = layout([("a", "float32", (2, 3)), ("b", "uint8", (5,)), ("none", "bfloat16", (0, 4))])
    segment = Segment("test", size)
    segment.memory[:24] = values.tobytes()
    segment.memory[tensors[1].offset : tensors[1].offset + 5] = b"hello"
    bucket = segment.seal(tensors)
    return Publication(manifest=Manifest(version=version, buckets=[bucket]), gather_s=0.0, fds=[segment.fd])


def test_a_bucket_is_read_back_as_it_was_written() -> None:
    values = np.arange(6, dtype=np.float32)
    with _publish(values) as publication:
        found = {spec.name: (spec, bytes(view)) for spec, view in read_manifest(publication.manifest)}
        assert np.frombuffer(found["a"][1], dtype=np.float32).tolist() == values.tolist()
        assert found["a"][0].shape == (2, 3)
        assert found["b"][1] == b"hello"
        assert found["none"][1] == b""
        assert all(spec.offset % ALIGNMENT == 0 for spec, _ in found.values())


def test_a_sealed_segment_refuses_every_change() -> None:
    with _publish(np.zeros(6, dtype=np.float32)) as publication:
        [bucket] = publication.manifest.buckets
        fd = os.open(bucket.path, os.O_RDWR)
        try:
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 1)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, bucket.size + 1)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, bucket.size)
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        finally:
            os.close(fd)


def test_a_released_publication_is_gone_for_those_who_had_not_opened_it() -> None:
    publication = _publish(np.zeros(6, dtype=np.float32))
    [bucket] = publication.manifest.buckets
    late = os.open(bucket.path, os.O_RDONLY)
    publication.release()
    publication.release()
    assert os.fstat(late).st_size == bucket.size
    os.close(late)
    with pytest.raises(WeightsCorrupt, match="cannot be opened"):
        list(read_manifest(publication.manifest))


def _sealed(content: bytes, seals: int = SEALS) -> tuple[str, int]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return f"/proc/{os.getpid()}/fd/{fd}", fd


@pytest.mark.parametrize("what", ["flipped", "short", "unsealed", "file"])
def test_what_is_not_what_was_published_is_refused(what: str, tmp_path: Path) -> None:
    with _publish(np.arange(6, dtype=np.float32)) as publication:
        [bucket] = publication.manifest.buckets
        content = bytearray(Path(bucket.path).read_bytes())
        seals, says = SEALS, "checksum"
        if what == "flipped":
            content[3] ^= 1
        elif what == "short":
            content, says = content[:-1], "bytes instead of"
        elif what == "unsealed":
            seals, says = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, "not sealed"
        path, fd = _sealed(bytes(content), seals)
        if what == "file":
            (tmp_path / "bucket").write_bytes(content)
            path, says = str(tmp_path / "bucket"), "is no /proc"
        other = Bucket(path=path, size=bucket.size, checksum=bucket.checksum, tensors=bucket.tensors)
        try:
            with pytest.raises(WeightsCorrupt, match=says) as caught:
                list(read_manifest(Manifest(version=9, buckets=[bucket, other])))
        finally:
            os.close(fd)
        assert (caught.value.version, caught.value.bucket) == (9, 1)


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 150))
def test_buckets_hold_consecutive_units_within_the_limit(sizes: list[int], limit: int) -> None:
    buckets = fill_buckets(sizes, limit)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in bucket) <= limit or len(bucket) == 1 for bucket in buckets)
    # Never more than needed: two neighbours would not have fitted into one.
    assert all(sum(sizes[i] for i in first) + sizes[second[0]] > limit for first, second in pairwise(buckets))
