"""Versions in sealed segments, as a learner publishes them, and what a process holds open."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.messages.weights import Bucket, Manifest
from asyncrl.weights.held_version import HeldVersion, Segment, hold, layout_of, place_tensors


def random_bytes(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def seal(content: bytes, name: str, dtype: str = "bfloat16") -> tuple[Bucket, int]:
    """A bucket with one tensor, and the descriptor of its segment."""
    item = 2 if dtype == "bfloat16" else 1
    specs, _ = place_tensors([(name, dtype, (len(content) // item,))])
    segment = Segment("test-weights", len(content))
    segment.write(0, content)
    return segment.seal(specs), segment.fd


def held(version: int, contents: Sequence[bytes]) -> HeldVersion:
    """A version as the parameter server holds it; its publisher has ended."""
    made = [seal(content, f"t{index}") for index, content in enumerate(contents)]
    try:
        return hold(Manifest(version=version, buckets=[bucket for bucket, _ in made]))
    finally:
        for _, descriptor in made:
            os.close(descriptor)


def as_streamed(manifest: Manifest) -> Manifest:
    """The update to a replica that cannot open the segments."""
    replace = msgspec.structs.replace
    return replace(manifest, buckets=[replace(bucket, path="") for bucket in manifest.buckets])


def contents_of(manifest: Manifest) -> list[bytes]:
    return [Path(bucket.path).read_bytes() for bucket in manifest.buckets]


def open_memory() -> int:
    """Memory segments that this process holds open, by descriptor or by mapping."""
    gc.collect()
    links = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links += os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")
        except FileNotFoundError:
            continue
    return links + Path("/proc/self/maps").read_text().count("/memfd:")


def comes_to(memory: int) -> bool:
    """Whether this much memory is open in the end: pyzmq releases sent buffers in a thread of its own."""
    until = time.monotonic() + 10.0
    while (found := open_memory()) != memory and time.monotonic() < until:
        time.sleep(0.01)
    return found == memory


def stage(manifest: Manifest) -> HeldVersion:
    """Open and verify every bucket, as a rollouter on the same host does. Raises WeightsCorrupt."""
    layout_of(manifest)
    found = hold(manifest)
    try:
        for index in range(len(manifest.buckets)):
            found.verify(index)
    except BaseException:
        found.close()
        raise
    return found
