"""A simulated learner: a step takes ``learner.sim.step_s``, a version has ``learner.sim.publish_bytes``.

It has the interface of the real one (backend.py), to run a system without a model. torch is not imported. Ranks above 0
have nothing to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.checkpoint.contents import CONTENTS, TrainerContents, read_trainer_contents
from asyncrl.checkpoint.damage import refused
from asyncrl.config import Config
from asyncrl.core.files import sync, write_file
from asyncrl.core.threads import on_daemon, wait_for
from asyncrl.gpu.shared_gpus import rank_slices
from asyncrl.gpu.slices import RankSlices
from asyncrl.learner.algorithm.batch import SequenceId, StepPlan
from asyncrl.learner.algorithm.probe_sequences import ProbeSequence
from asyncrl.learner.algorithm.scoring import ScoringPlan
from asyncrl.learner.algorithm.token_scores import TokenScores
from asyncrl.learner.fsdp.schedule import learning_rate
from asyncrl.messages.routes import SIMULATED, Experts
from asyncrl.messages.weights import Bucket, Manifest, Probe
from asyncrl.weights.held_version import HeldVersion, Segment, close_all, place_tensors


class SimTrainer:
    """One rank of the ``sim`` backend; backend.py documents its methods."""

    packed = True
    shares_prefixes = False
    skips_zero_advantages = False
    on_gpu = False
    warm_steps = engines_in_turn = 0

    def __init__(self, config: Config, rank: int) -> None:
        self.on_phase: Callable[[str], None] = lambda name: None
        self.rejected_speedups: list[str] = []
        self._config = config
        routed = config.rollout.sim.routes and config.learner.routes != "ignore"
        self.experts: Experts | None = SIMULATED if routed else None
        self.token_scores: dict[SequenceId, TokenScores] = {}
        self._rank = rank
        self._steps = 0
        self._assembly: Future[HeldVersion] | None = None
        """The newest run of ``_assemble``; it may have ended. None before the first."""
        self._slices: RankSlices | None = None
        self.is_resting, self.gpu_wait_s = False, 0.0

    def open_store(self, host: str) -> tuple[str, int]:
        return host, 0

    def setup(self, host: str, port: int) -> None:
        """In time slices, take the GPU on rank 0, and leave it to the engine on each other rank; there is no model."""
        self._slices = rank_slices(self._config, self._rank)
        if self._slices is not None:
            # Only rank 0's engine counts, because the other ranks never take their GPUs.
            self.engines_in_turn = 1
            self._slices.open()
        if self._rank:
            self.rest()
        else:
            self._take()

    def _take(self) -> None:
        """End a rest; in time slices, wait for the GPU and count the seconds."""
        self.is_resting = False
        if self._slices is not None:
            self.gpu_wait_s += self._slices.take()

    def train(self, plan: StepPlan) -> dict[str, float]:
        if not plan.sequences:
            return {}
        self._take()
        if self.experts is not None:
            _check_routes(plan)
        time.sleep(self._config.learner.sim.step_s)
        self._steps += 1
        return {"learner/lr": learning_rate(self._steps, self._config.learner)}

    def score(self, plan: ScoringPlan) -> list[np.ndarray]:
        raise AssertionError("there is no reference")

    def probe(self, sequences: Sequence[ProbeSequence]) -> Probe | None:
        """Return None: there is no model to score the sequences."""
        return None

    def publish(self, version: int, probe: Probe | None = None) -> Future[HeldVersion]:
        self._take()
        wait_s = self._config.learner.collective_timeout_s
        wait_for(self._assembly, wait_s, who=f"learner/{self._rank}", thread="assembly")
        self._assembly = on_daemon("assembly", lambda: self._assemble(version, probe))
        return self._assembly

    def _assemble(self, version: int, probe: Probe | None) -> HeldVersion:
        """Write ``learner.sim.publish_bytes`` in sealed buckets, and sleep ``learner.sim.gather_s`` in total."""
        began = time.monotonic()
        buckets: list[Bucket] = []
        descriptors: list[int] = []
        sim, limit = self._config.learner.sim, self._config.weights.bucket_bytes
        left = sim.publish_bytes
        try:
            while left:
                time.sleep(sim.gather_s * min(left, limit) / sim.publish_bytes)
                index, count = len(buckets), min(left, limit)
                tensors, size = place_tensors([(f"weights.{index}", "uint8", (count,))])
                segment = Segment(f"asyncrl-v{version}-{index}", size)
                descriptors.append(segment.fd)
                # Different bytes for each version, so that a mix-up shows in the checksum.
                segment.write(0, version.to_bytes(8, "little")[:count])
                buckets.append(segment.seal(tensors))
                left -= count
        except OSError:
            close_all(descriptors)
            raise
        gather_s = time.monotonic() - began
        return HeldVersion(Manifest(version=version, buckets=buckets, probe=probe, gather_s=gather_s), descriptors)

    def rest(self) -> None:
        """Let the engine have the GPU, if there are time slices."""
        self.is_resting = True
        if self._slices is not None:
            self._slices.give()

    def export(self, folder: Path) -> None:
        """Do nothing: there are no weights to write."""

    def checkpoint_bytes(self) -> int:
        return 0

    def export_bytes(self) -> int:
        return 0

    def sees(self, folder: Path) -> None:
        """Do nothing: rank 0 writes alone."""

    def save(self, folder: Path) -> Future[None]:
        """Write ``contents.json`` with the number of steps; the future is done at once."""
        done: Future[None] = Future()
        contents = TrainerContents(steps=self._steps, world_size=self._config.learner.ranks)
        try:
            folder.mkdir()
            write_file(folder / CONTENTS, [msgspec.json.encode(contents)])
            sync(folder)
        except OSError as error:
            done.set_exception(refused(folder, error))
        else:
            done.set_result(None)
        return done

    def load(self, folder: Path) -> None:
        self._steps = read_trainer_contents(folder).steps

    def follow(self) -> None:
        """Return at once: rank 0 works alone."""

    def interrupt(self) -> None:
        """End a wait for the GPU; ``follow`` does not wait."""
        if self._slices is not None:
            self._slices.interrupt()

    def stop(self) -> None:
        """Give the GPU back, if there are time slices."""
        if self._slices is not None:
            self._slices.close()


def _check_routes(plan: StepPlan) -> None:
    """Raise AssertionError unless each token has its own route: the simulated engine makes it from the token's id."""
    for update in plan.updates:
        # A filler, which is a row for a rank without work, has sequence -1 and no routes.
        for batch in (batch for rank in update.ranks for batch in rank if batch.sequences[0] >= 0):
            own = batch.input_ids % SIMULATED.count
            assert np.array_equal(batch.routes, own), f"a row of {len(own)} tokens has foreign routes"
