"""The interface between the learner's shell and the backend that trains, and its two backends.

``fsdp2`` (fsdp/trainer.py) trains a model on ``learner.ranks`` processes; ``sim`` (sim.py) only takes time. Both block
and are not thread-safe. A rank calls all methods from **one** thread, unless a method says otherwise: its collectives
must stay in order and its CUDA device current.

Order of calls, rank 0::

    backend = create(config, rank=0)
    host, port = backend.open_store(host)       # at once; the other ranks need the two values
    backend.setup(host, port)                   # blocks until every rank is there and the model is checked
    backend.load(folder)                        # to continue from a checkpoint; before everything else
    probe = backend.probe(sequences)
    publishing = backend.publish(0, probe)      # runs in the background; its result is passed on, then released
    scores = backend.score(scoring)             # where the rewards of a step need it
    plan = build_step(groups, ..., world_size=config.learner.ranks, packed=backend.packed,
                      shared=backend.shares_prefixes)
    metrics = backend.train(plan)               # one optimizer step; its metrics and plan.metrics make one line
    saving = backend.save(folder)               # runs in the background; saving.result() raises its error
    backend.export(folder)
    backend.stop()                              # ends the followers too

Order of calls, every other rank::

    backend = create(config, rank=rank)
    backend.setup(host, port)                   # host and port as rank 0 had them from open_store
    backend.follow()                            # takes part with rank 0 until its stop, or until interrupt()
    backend.stop()

An exception from any method except ``export``, ``sees`` and ``load`` leaves the ranks out of step: the process must
end. ``export`` and ``sees`` raise on rank 0, after all ranks have finished their part, and training may continue.
``load`` raises on all ranks; after DamagedCheckpoint nothing was changed and another checkpoint may be loaded, after
any other error new processes must start. An error while a checkpoint or a version is written is only in its future.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import numpy as np

from asyncrl.config import Config
from asyncrl.learner.algorithm.batch import StepPlan
from asyncrl.learner.algorithm.probe_sequences import ProbeSequence
from asyncrl.learner.algorithm.scoring import ScoringPlan
from asyncrl.messages.weights import Probe
from asyncrl.weights.held_version import HeldVersion, OnSealed

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of CUDA's allocator. torch reads both when it is imported or later. torch 2.9 reads expandable segments only
from the first; up to 2.11 it warns that this name is old."""


class Backend(Protocol):
    """One rank of a backend that trains."""

    packed: bool
    """Whether several sequences may share a row; settled by ``setup``, the same on all ranks."""
    shares_prefixes: bool
    """Whether rows may compute the common beginning of several sequences once; settled by ``setup``, alike on all
    ranks."""
    skips_zero_advantages: bool
    """Whether sequences whose advantages are all 0 need not be computed; settled by ``setup``, alike on all ranks."""
    given_up: list[str]
    """Faster ways of computing that the checks of ``setup`` gave up, with reason and cost, for the user."""
    on_gpu: bool
    """Whether the weights are on a GPU; settled by ``setup``."""
    warm_steps: int
    """Supervised steps taken before the first of the run; ``load`` puts it back."""
    on_phase: Callable[[str], None]
    """Called with the name of each part of the work that this rank begins, and with an empty name at its end; set it
    before ``setup``."""

    def open_store(self, host: str) -> tuple[str, int]:
        """Rank 0: bind the rendezvous of the ranks to ``host`` and one of network.ports. Returns (host, port)."""

    def setup(self, host: str, port: int) -> None:
        """Meet the other ranks, load the model, check it.

        Raises ConfigError, which names the key, when the model cannot be loaded or fails the check under ``packing =
        "required"``, and DeadlineExceeded when a rank is late.
        """

    def train(self, plan: StepPlan) -> dict[str, float]:
        """Rank 0: one optimizer step from ``plan``. Returns metrics by name.

        A plan without updates is no step: nothing changes and there are no metrics. The last of sft.warm_steps, and the
        first step after any of them, reset the optimizer.

        ``loss/sft`` (nats) if conversations are trained; a warm step also has ``policy/grad_norm`` and ``learner/lr``.

        ``loss/policy``, ``policy/grad_norm`` (before the clip), ``policy/entropy`` (nats), ``policy/ess`` (0 to 1),
        ``policy/behaviour_kl`` (nats), ``policy/tis_clipped_fraction``, ``policy/ratio_max``, ``learner/lr``.
        ``perf/mfu`` (0 to 1) if the device's peak is known. ``policy/engine_kl`` (nats) and ``policy/engine_kl_tokens``
        if the weights being trained sampled some of the tokens. Raises NonFiniteStep on all ranks when a loss or the
        gradient is not finite; nothing was changed then.
        """

    def score(self, plan: ScoringPlan) -> list[np.ndarray]:
        """Rank 0: float64 [S] for each sequence of ``plan``, nats: its sampled tokens' log-probs by the reference.

        For learner.kl.place = "reward" alone. Nothing is changed.
        """

    def probe(self, sequences: Sequence[ProbeSequence]) -> Probe | None:
        """Rank 0: log-probs of these sequences by the current weights; None without sequences or without a model."""

    def publish(
        self, version: int, probe: Probe | None = None, on_sealed: OnSealed | None = None
    ) -> Future[HeldVersion]:
        """Rank 0: the current weights, or the adapters alone where a version is those, as sealed segments of shared
        memory; the caller releases them.

        Returns once every rank has copied its own, after the version before has been written; training that
        follows changes nothing of it. ``probe`` goes along. The future ends with OSError when they cannot be written,
        which leaves the ranks in step, as no other error does.
        """

    def export(self, folder: Path) -> None:
        """Rank 0: write the current weights to ``folder`` in Hugging Face layout, adapters added in and once more in a
        folder of their own. Raises OSError."""

    def checkpoint_bytes(self) -> int:
        """From any thread: about how much all ranks together write in a ``save``."""

    def export_bytes(self) -> int:
        """From any thread: about how much an ``export`` writes."""

    def sees(self, folder: Path) -> None:
        """Rank 0: make sure that every rank finds files that rank 0 puts into ``folder``. Raises CheckpointError."""

    def save(self, folder: Path) -> Future[None]:
        """Rank 0: write weights, optimizer, steps and generators of random numbers of all ranks into a new ``folder``.

        Returns once they are copied; training that follows changes nothing of the files. The future ends when
        everything is flushed, ``contents.json`` last, or with CheckpointError when any rank could not write its part.
        The one before must have ended.
        """

    def load(self, folder: Path) -> None:
        """Rank 0: put back on all ranks the state that ``save`` wrote, by however many ranks.

        Comes after ``setup`` and before anything else. Raises CheckpointError naming a file, on all ranks alike; when
        a file is not as it was written it is DamagedCheckpoint, and nothing was changed.
        """

    def follow(self) -> None:
        """The other ranks: take part in the commands of rank 0 until it stops or ``interrupt`` is called.

        The wait for the next command has no limit, since rank 0 may wait for groups. It ends at once with an error when
        rank 0 is gone.
        """

    def interrupt(self) -> None:
        """From any thread: let ``follow`` return the next time it waits for a command, within a few seconds."""

    def stop(self) -> None:
        """End this rank's part; rank 0 ends the followers too."""


def create(config: Config, rank: int) -> Backend:
    """The backend that ``learner.backend`` names, for one rank of ``learner.ranks``."""
    if config.learner.backend == "sim":
        from asyncrl.learner.backends.sim import SimTrainer

        return SimTrainer(config, rank)
    if config.learner.device != "cpu" and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        # Rows are of all lengths; a segment that cannot grow is left in fragments.
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    from asyncrl.learner.fsdp.trainer import Trainer

    return Trainer(config, rank)
