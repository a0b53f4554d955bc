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
    publishing = backend.publish(0, probe)      # runs in the background; the caller closes its result
    scores = backend.score(scoring)             # if the rewards of a step need the reference
    plan = build_step(groups, ..., world_size=config.learner.row_groups, packed=backend.packed,
                      shared=backend.shares_prefixes)
    metrics = backend.train(plan)               # an optimizer step for each update; metrics of the trainer step
    saving = backend.save(folder)               # runs in the background; saving.result() raises its error
    backend.export(folder)
    backend.rest()                              # before the caller waits for groups
    backend.stop()                              # also ends follow() on the other ranks

Order of calls, every other rank::

    backend = create(config, rank=rank)
    backend.setup(host, port)                   # host and port as rank 0 had them from open_store
    backend.follow()                            # takes part with rank 0 until its stop, or until interrupt()
    backend.stop()

An exception from any method except ``export``, ``sees`` and ``load`` leaves the ranks out of step: the process must
end. NonFiniteStep does not: after it training may continue. ``export`` and ``sees`` raise on rank 0, after all ranks
have finished their part, and training may continue. ``load`` raises on all ranks; after DamagedCheckpoint nothing was
changed and another checkpoint may be loaded, after any other error new processes must start. An error while a
checkpoint or a version is written is only in its future.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import numpy as np

from asyncrl.config import Config
from asyncrl.core.compile_cache import compile_cache
from asyncrl.learner.algorithm.batch import SequenceId, StepPlan
from asyncrl.learner.algorithm.probe_sequences import ProbeSequence
from asyncrl.learner.algorithm.scoring import ScoringPlan
from asyncrl.learner.algorithm.token_scores import TokenScores
from asyncrl.messages.routes import Experts
from asyncrl.messages.weights import Probe
from asyncrl.weights.held_version import HeldVersion

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with the settings of CUDA's allocator. torch reads them when it is imported, or later.

torch 2.9 reads expandable segments from the first one alone. Up to 2.11 torch warns that the first name is old.
"""


class Backend(Protocol):
    """One rank of a backend that trains."""

    packed: bool
    """Whether several sequences may share a row. ``setup`` sets it, to the same value on all ranks."""
    shares_prefixes: bool
    """Whether rows may compute the common beginning of several sequences once.

    ``setup`` sets it, to the same value on all ranks.
    """
    skips_zero_advantages: bool
    """Whether sequences whose advantages are all 0 need not be computed.

    ``setup`` sets it, to the same value on all ranks.
    """
    rejected_speedups: list[str]
    """Texts for the user: each faster way of computing that the checks of ``setup`` rejected, with reason and cost."""
    on_gpu: bool
    """Whether the weights are on a GPU; ``setup`` sets it."""
    experts: Experts | None
    """Experts whose routes each trained sequence needs; None if it needs none. ``setup`` sets it."""
    token_scores: dict[SequenceId, TokenScores]
    """Rank 0: scores of tokens in the last ``train``, by sequence; empty if it failed or had no model.

    Only the groups of a step that samples/ gets have scores, and only sequences that were computed.
    """
    warm_steps: int
    """Supervised steps taken before the first step of the run; ``load`` restores the number."""
    engines_in_turn: int
    """Number of engines, over all ranks, that take turns with a rank on its GPU (gpu/slices.py); set by ``setup``."""
    is_resting: bool
    """Rank 0, in time slices: whether no other call has come since the last ``rest``."""
    gpu_wait_s: float
    """Rank 0: total seconds, so far, of its waits to get the GPU back in time slices; else 0.

    Before ``train`` and ``score`` the slowest rank's wait counts, because all ranks wait for that one.
    """
    on_phase: Callable[[str], None]
    """Callback for each phase of this rank's work: called with its name when it begins, and with "" when it ends.

    Set it before ``setup``.
    """

    def open_store(self, host: str) -> tuple[str, int]:
        """Rank 0: bind the rendezvous of the ranks to ``host`` and one of network.ports. Returns (host, port)."""

    def setup(self, host: str, port: int) -> None:
        """Meet the other ranks, load the model and check it.

        Raises ConfigError, which names the key, for example when the model cannot be loaded or fails the check under
        ``packing = "required"``. Raises DeadlineExceeded when a rank is late.
        """

    def train(self, plan: StepPlan) -> dict[str, float]:
        """Rank 0: train ``plan``, with one optimizer step for each of its updates. Returns metrics by name.

        A plan without updates changes nothing and gives no metrics. The optimizer's state is cleared after the last
        warm step, and before the first step of the run.

        With a policy loss: ``loss/policy``, ``policy/entropy`` (nats), ``policy/ess`` (0 to 1), ``policy/behaviour_kl``
        (nats), ``policy/tis_clipped_fraction``, ``policy/ratio_max``; ``policy/engine_kl`` (nats) and
        ``policy/engine_kl_tokens`` if the weights being trained sampled some of the tokens; ``loss/NAME`` for each
        named sum of the loss. With conversations: ``loss/sft`` (nats). With routes: ``policy/routes_differ`` (0 to 1).
        Always: ``policy/grad_norm`` (before the clip) and ``learner/lr``; ``perf/mfu`` (0 to 1) if the device's peak is
        known. ``sim`` returns ``learner/lr`` alone.

        Raises NonFiniteStep on all ranks when a loss or the gradient of an update is not finite. That update changes
        nothing; updates before it stay.
        """

    def score(self, plan: ScoringPlan) -> list[np.ndarray]:
        """Rank 0: score the sampled tokens of ``plan`` with the frozen reference, for learner.kl.place = "reward".

        Returns log-probs in nats: for each sequence of ``plan`` float64 [sampled tokens]. Changes nothing.
        """

    def probe(self, sequences: Sequence[ProbeSequence]) -> Probe | None:
        """Rank 0: score these sequences with the current weights: the log-probs that engines must match.

        Returns None without sequences or without a model.
        """

    def publish(self, version: int, probe: Probe | None = None) -> Future[HeldVersion]:
        """Rank 0: copy the weights, or only the adapters if versions hold only these, and seal the copy in segments.

        Returns once the previous version is written and rank 0 has copied its shards. Each other rank copies its own
        before its next command, so later training does not change the copy. The future's result is the version, with
        ``probe`` in its manifest; the caller closes it. The future ends with OSError if the segments cannot be written;
        only this error leaves the ranks in step.
        """

    def rest(self) -> None:
        """Rank 0: in time slices (gpu/slices.py), let engines have the GPUs of all ranks until the next other call.

        Weights and optimizer states move to host memory. Without time slices it does nothing.
        """

    def export(self, folder: Path) -> None:
        """Rank 0: write the current weights to ``folder`` in Hugging Face layout. Raises OSError.

        Adapters are merged into the weights, and also written to a folder of their own.
        """

    def checkpoint_bytes(self) -> int:
        """From any thread: estimated bytes that all ranks together write in a ``save``."""

    def export_bytes(self) -> int:
        """From any thread: estimated bytes that an ``export`` writes."""

    def sees(self, folder: Path) -> None:
        """Rank 0: check that every rank sees the files that rank 0 writes to ``folder``. Raises CheckpointError."""

    def save(self, folder: Path) -> Future[None]:
        """Rank 0: write the state of all ranks into a new ``folder``: weights, optimizer, steps and random generators.

        Returns once rank 0 has copied its state. Each other rank copies its own before its next command, so later
        training does not change the files. The future ends when everything is flushed, ``contents.json`` last, or with
        CheckpointError when a rank could not write its part. The previous ``save`` must have ended.
        """

    def load(self, folder: Path) -> None:
        """Rank 0: restore on all ranks the state that ``save`` wrote, even on another number of ranks.

        Call it after ``setup`` and before anything else. Raises CheckpointError naming a file, on all ranks alike. A
        file that differs from what was written raises DamagedCheckpoint, and nothing was changed.
        """

    def follow(self) -> None:
        """The other ranks: execute the commands of rank 0 until it stops or ``interrupt`` is called.

        The wait for the next command has no limit, since rank 0 may wait for groups. It ends at once with an error when
        the process of rank 0 dies. ``follow`` raises NonFiniteStep for a refused update, and may be called again.
        """

    def interrupt(self) -> None:
        """From any thread: make ``follow`` return the next time that it waits for a command, at once if it waits now.

        A wait for the GPU in time slices ends with RuntimeError.
        """

    def stop(self) -> None:
        """End this rank's part; on rank 0 also that of the followers."""


def create(config: Config, rank: int) -> Backend:
    """Make the backend that ``learner.backend`` names, for one of the ``learner.ranks`` ranks."""
    if config.learner.backend == "sim":
        from asyncrl.learner.backends.sim import SimTrainer

        return SimTrainer(config, rank)
    if config.learner.device != "cpu":
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compile_cache()
        if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
            # Rows differ in length, so segments of fixed size would leave memory in fragments.
            os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    from asyncrl.learner.fsdp.trainer import Trainer

    return Trainer(config, rank)
