"""Held versions: seals, checksums and layouts are checked before any weights reach an engine."""

from __future__ import annotations

import errno
import fcntl
import gc
import math
import mmap
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from published_weights import held, open_memory, stage
from tiny_models import Publisher

from asyncrl.core.errors import WeightsCorrupt
from asyncrl.messages.weights import Bucket, Manifest, TensorSpec
from asyncrl.weights import held_version
from asyncrl.weights.held_version import (
    ITEM_BYTES,
    SEALS,
    Segment,
    check_complete,
    fill_buckets,
    layout_of,
    path_of,
    size_of,
)


@pytest.fixture
def publisher():
    made = Publisher()
    yield made
    made.close()


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(100.0),
        "b": torch.ones(3, 5, dtype=torch.bfloat16),
        "c": torch.zeros(7, dtype=torch.uint8),
    }


def bucket(**fields: Any) -> Bucket:
    defaults = {"path": "/proc/1/fd/0", "size": 256, "checksum": 0, "tensors": []}
    return Bucket(**(defaults | fields))


def manifest(*specs: TensorSpec, size: int = 256) -> Manifest:
    return Manifest(version=4, buckets=[bucket(size=size, tensors=list(specs))])


def test_a_segment_whose_pages_are_in_use_is_sealed_once_they_are_free(monkeypatch):
    segment = Segment("read", 8)
    segment.write(0, bytes(8))
    end, begin = os.pipe()
    # The pipe holds the page itself.
    os.splice(segment.fd, begin, 8, offset_src=0)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(held_version, "SEAL_TRIES", 2)
            with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
                segment.seal([])
        reader = threading.Timer(0.3, os.read, (end, 8))
        reader.start()
        segment.seal([])
        reader.join()
        assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) == SEALS
    finally:
        for descriptor in (segment.fd, end, begin):
            os.close(descriptor)


def test_a_sealed_segment_refuses_every_change(publisher):
    [sealed, *_] = publisher.publish(3, tensors()).buckets
    fd = os.open(sealed.path, os.O_RDWR)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
    for change in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 1),
        lambda: os.ftruncate(fd, sealed.size + 1),
        lambda: mmap.mmap(fd, sealed.size),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()
    os.close(fd)


def test_a_held_version_outlives_its_publisher(publisher):
    published = publisher.publish(3, tensors())
    staged = stage(published)
    publisher.close()
    assert staged.layout == {"a": ("float32", (100,)), "b": ("bfloat16", (3, 5)), "c": ("uint8", (7,))}
    for ours, theirs in zip(staged.manifest.buckets, published.buckets, strict=True):
        assert ours.path != theirs.path
        assert ours.tensors == theirs.tensors
        assert xxhash.xxh3_64_intdigest(Path(ours.path).read_bytes()) == theirs.checksum
    late = os.open(staged.manifest.buckets[0].path, os.O_RDONLY)
    staged.close()
    staged.close()
    assert not any(os.path.exists(ours.path) for ours in staged.manifest.buckets)
    assert os.fstat(late).st_size == staged.manifest.buckets[0].size
    os.close(late)
    # A version that its owner never received closes itself.
    publisher = Publisher()
    paths = [each.path for each in stage(publisher.publish(3, tensors())).manifest.buckets]
    publisher.close()
    assert not any(os.path.exists(path) for path in paths)


def test_a_bucket_is_mapped_for_the_time_of_its_check_only():
    with held(4, [b"first", b"second", b"third"]) as version:
        before = open_memory()
        for bucket in range(3):
            version.verify(bucket)
            assert open_memory() == before
        content = version.bytes_of(1)
        version.verify(1)
        # A mapping has a descriptor of its own.
        assert (open_memory() - before, bytes(content)) == (2, b"second")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b, _: {"checksum": b.checksum ^ 1}, "its checksum is"),
        (lambda b, _: {"size": b.size + 64}, "bytes instead of"),
        (lambda b, unsealed: {"path": path_of(unsealed.fd)}, "not sealed"),
        (lambda b, _: {"path": "/proc/self/fd/../../1/environ"}, "is not a /proc/PID/fd/N"),
        (lambda b, _: {"path": f"/proc/{os.getpid()}/fd/99999"}, "cannot be opened"),
    ],
)
def test_wrong_buckets_are_refused(publisher, change, words):
    first, second = publisher.publish(3, tensors()).buckets
    unsealed = Segment("test-weights", second.size)
    fields = {"path": second.path, "size": second.size, "checksum": second.checksum, "tensors": second.tensors}
    wrong = Bucket(**(fields | change(second, unsealed)))
    # Objects of other tests must not be closed in between.
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightsCorrupt, match=words) as caught:
        stage(Manifest(version=3, buckets=[first, wrong]))
    assert (caught.value.version, caught.value.bucket) == (3, 1)
    assert set(os.listdir("/proc/self/fd")) == before
    unsealed.discard()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (manifest(TensorSpec("x", "float33", (2,), 0)), "unknown dtype"),
        (manifest(TensorSpec("x", "float32", (2,), 32)), "not aligned"),
        (manifest(TensorSpec("x", "float32", (65,), 0)), "reaches past"),
        (manifest(TensorSpec("x", "float32", (-1, 2), 0)), "has the shape"),
        (manifest(TensorSpec("x", "float32", (17,), 0), TensorSpec("y", "float32", (2,), 64)), "overlaps"),
        (manifest(TensorSpec("x", "uint8", (2,), 0), TensorSpec("x", "uint8", (2,), 64)), "occurs twice"),
        (manifest(size=0), "is empty"),
    ],
)
def test_contradictory_manifests_are_refused(wrong, words):
    with pytest.raises(WeightsCorrupt, match=words):
        layout_of(wrong)


@given(
    parts=st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)), max_size=8
    )
)
def test_the_layout_has_every_tensor_of_the_manifest(parts):
    specs, end = [], 0
    for index, (dtype, shape) in enumerate(parts):
        specs.append(TensorSpec(f"t{index}", dtype, shape, end))
        assert size_of(specs[-1]) == ITEM_BYTES[dtype] * math.prod(shape)
        end += -(-size_of(specs[-1]) // 64) * 64
    made = Manifest(version=1, buckets=[bucket(size=max(end, 1), tensors=specs[::-1])])
    assert layout_of(made) == {f"t{index}": part for index, part in enumerate(parts)}


def test_only_complete_sets_of_weights_are_accepted():
    expected = {"a": ("float32", (2,)), "b": ("float32", (3,)), "head": ("float32", (1,))}
    optional = frozenset({"head", "tied"})
    check_complete(1, dict(expected), expected)
    check_complete(1, {k: expected[k] for k in "ab"} | {"tied": ("float32", (1,))}, expected, optional=optional)
    check_complete(1, {k: ("bfloat16", shape) for k, (_, shape) in expected.items()}, expected, dtypes=False)
    for found, words in (
        ({"a": ("float32", (2,)), "head": ("float32", (1,))}, r"1 of 3 parameters are missing \(b\)"),
        (expected | {"z": ("float32", (1,))}, r"1 parameters are unknown to the model \(z\)"),
        (expected | {"b": ("float32", (4,))}, r"b is float32 \[4\] instead of float32 \[3\]"),
        (expected | {"b": ("bfloat16", (3,))}, r"b is bfloat16"),
    ):
        with pytest.raises(WeightsCorrupt, match=words):
            check_complete(1, found, expected)


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 150))
def test_buckets_hold_consecutive_units_within_the_limit(sizes: list[int], limit: int) -> None:
    buckets = fill_buckets(sizes, limit)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in bucket) <= limit or len(bucket) == 1 for bucket in buckets)
    # As few as possible: two neighbours do not fit into one.
    assert all(sum(sizes[i] for i in first) + sizes[second[0]] > limit for first, second in pairwise(buckets))
