"""Versions of made-up weights, and whether their segments are still open."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Iterator

from run_settings import sim_config

from asyncrl.config import Config
from asyncrl.learner.backends.sim import SimTrainer
from asyncrl.weights.held_version import HeldVersion

BUCKETS = 3
WAIT_S = 20.0


@functools.cache
def _config() -> Config:
    return sim_config(learner={"sim": {"publish_bytes": BUCKETS * 4096}}, weights={"bucket_bytes": 4096})


def make_publication(version: int) -> HeldVersion:
    """BUCKETS sealed buckets of 4096 bytes, all of them different."""
    return SimTrainer(_config(), 0).publish(version).result()


def open_descriptors() -> set[tuple[str, str]]:
    """Numbers and targets. Those of other tests may be closed at any time: compare with a set taken before."""
    gc.collect()
    return _descriptors()


def _descriptors(part: str = "") -> set[tuple[str, str]]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return {(number, target) for number, target in found if part in target}


def open_segments() -> set[tuple[str, str]]:
    """Numbers and targets of the segments that are open."""
    return _descriptors("memfd:asyncrl-v")


@contextlib.contextmanager
def no_segment_left_open() -> Iterator[None]:
    before = open_segments()
    yield
    if not open_segments() <= before:
        # A collection takes long where much is loaded.
        gc.collect()
    assert open_segments() <= before
