"""Publications of made-up weights, and whether their segments are still open."""

from __future__ import annotations

import contextlib
import gc
import os

from inprocess import sim_config

from asyncrl.learner.backends.sim import SimTrainer
from asyncrl.learner.exchange.publication import OnSealed, Publication

BUCKETS = 3


def make_publication(version: int, on_sealed: OnSealed | None = None) -> Publication:
    """BUCKETS sealed buckets of 4096 bytes, all of them different."""
    config = sim_config(learner={"sim": {"publish_bytes": BUCKETS * 4096}}, weights={"bucket_bytes": 4096})
    return SimTrainer(config, 0).publish(version, on_sealed=on_sealed).result()


def is_open(publication: Publication) -> bool:
    return bool(publication.fds)


def open_descriptors() -> set[tuple[str, str]]:
    """Numbers and targets: those of other tests may be closed at any time, so what is left open is in no set before."""
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
