"""Publications of made-up weights, and whether their segments are still open."""

from __future__ import annotations

import gc
import os

from inprocess import sim_config

from asyncrl.learner.publication import OnSealed, Publication
from asyncrl.learner.sim import SimTrainer

BUCKETS = 3


def make_publication(version: int, on_sealed: OnSealed | None = None) -> Publication:
    """BUCKETS sealed buckets of 4096 bytes, all of them different."""
    config = sim_config(learner={"sim": {"publish_bytes": BUCKETS * 4096}}, weights={"bucket_bytes": 4096})
    return SimTrainer(config, 0).publish(version, on_sealed=on_sealed).result()


def is_open(publication: Publication) -> bool:
    return bool(publication.fds)


def open_descriptors() -> int:
    # Garbage of other tests goes when it likes, and has some.
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
