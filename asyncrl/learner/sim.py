"""A learner that trains nothing: it takes as long as it is told to and publishes bytes of the right number.

The same interface as the real one (backend.py), for rehearsing a system without a model. torch is not
imported. Ranks above 0 have nothing to follow.
"""

from __future__ import annotations

import time
from pathlib import Path

from asyncrl.config import Config
from asyncrl.learner.batch import StepPlan
from asyncrl.learner.publication import Publication
from asyncrl.learner.schedule import learning_rate
from asyncrl.messages import Manifest
from asyncrl.wire.segments import Segment, layout


class SimTrainer:
    """See Backend."""

    packed = True

    def __init__(self, config: Config, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._steps = 0

    def open_store(self, host: str) -> tuple[str, int]:
        return host, 0

    def setup(self, host: str, port: int) -> None:
        """Nothing to meet for and nothing to load."""

    def train(self, plan: StepPlan) -> dict[str, float]:
        time.sleep(self._config.learner.sim.step_s)
        self._steps += 1
        return {"learner/lr": learning_rate(self._steps, self._config.learner)}

    def publish(self, version: int) -> Publication:
        began = time.monotonic()
        tensors, size = layout([("weights", "uint8", (self._config.learner.sim.publish_bytes,))])
        segment = Segment(f"asyncrl-v{version}", size)
        # Different bytes for each version, so that a mix-up shows in the checksum.
        segment.memory[:8] = version.to_bytes(8, "little")
        bucket = segment.seal(tensors)
        return Publication(
            manifest=Manifest(version=version, buckets=[bucket]),
            gather_s=time.monotonic() - began,
            fds=[segment.fd],
        )

    def export(self, folder: Path) -> None:
        """There are no weights to write."""

    def follow(self) -> None:
        """Rank 0 needs nobody."""

    def interrupt(self) -> None:
        """Nobody waits."""

    def stop(self) -> None:
        """Nothing is held."""
