"""Writes checkpoints during the training: the state is copied on the training thread, and written on another thread.

A rank writes one checkpoint at a time. The exchange among the ranks has a process group to itself, so that it cannot
mix with the collectives of a step. If it fails in that group, the next save creates a new group.

Fails with CheckpointError from the future that ``save`` returns. ``save`` itself raises only if the ranks cannot create
a process group.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from asyncrl.core.errors import AsyncRLError, CheckpointError, DeadlineExceeded
from asyncrl.core.threads import on_daemon, wait_for
from asyncrl.learner.fsdp.model.optimizers import Optimizer
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.weights.dcp import EXCHANGE_WAIT_S, StagedState, write

THREAD = "checkpoint"
BEFORE_WAIT_S = 10.0
"""Seconds that the previous save has to end on this rank once it has ended on rank 0."""
STOP_WAIT_S = 30.0
"""Seconds that a save has to end when the rank stops."""
_LOG = logging.getLogger(__name__)


class Saver:
    """Runs the saves of one rank, one after the other."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group: Any = None
        """Process group of the exchanges; None before the first save, and always if there is one rank."""
        self._done: Future[None] | None = None
        """The newest save; it may have ended."""
        self.broken = False
        """Whether the exchange among the ranks failed in the last save: the next one must ``renew`` the group."""

    @property
    def busy(self) -> bool:
        """Whether a save has not ended."""
        return self._done is not None and not self._done.done()

    def save(
        self,
        folder: Path,
        policy: nn.Module,
        optimizer: Optimizer,
        *,
        steps: int,
        warm_steps: int,
        renew: bool,
    ) -> Future[None]:
        """All ranks together: begin a save; returns once this rank's state is copied.

        If ``renew`` (rank 0's ``broken``), all ranks first create a new process group. The future raises
        CheckpointError if the save fails. If this rank cannot copy its state, or still writes the previous checkpoint,
        it takes part all the same and sends the others the error.
        """
        if renew or self._group is None:
            self._group = self._ranks.another_group(EXCHANGE_WAIT_S)
        self.broken = False
        staged: StagedState | CheckpointError
        try:
            self._wait(BEFORE_WAIT_S)
            staged = StagedState(policy, optimizer, self._ranks, steps=steps, warm_steps=warm_steps)
        except DeadlineExceeded:
            staged = CheckpointError(str(folder), "the one before is still being written")
            # The old thread is left behind. The new one sends the error to the other ranks.
        except (RuntimeError, MemoryError) as error:
            staged = CheckpointError(str(folder), f"cannot be copied: {error}")
        group = self._group
        self._done = done = on_daemon(THREAD, partial(self._write, folder, staged, group))
        return done

    def close(self) -> None:
        """Wait up to STOP_WAIT_S for the save under way; a longer one is abandoned and logged."""
        try:
            self._wait(STOP_WAIT_S)
        except DeadlineExceeded:
            _LOG.warning("learner/%d stops while a checkpoint is being written", self._ranks.rank)

    def _wait(self, timeout_s: float) -> None:
        wait_for(self._done, timeout_s, who=f"learner/{self._ranks.rank}", thread=THREAD)

    def _write(self, folder: Path, staged: StagedState | CheckpointError, group: Any) -> None:
        """Thread: write the copied state. Raises CheckpointError; also sets ``broken`` if the exchange failed."""
        try:
            write(folder, staged, self._ranks, group)
            return
        except CheckpointError as error:
            failure = error.with_traceback(None)
            failure.__cause__ = failure.__context__ = None
            _LOG.warning("%s", error)
        except (AsyncRLError, RuntimeError) as error:
            self.broken = True
            failure = CheckpointError(str(folder), f"the ranks of the learner could not speak: {error}")
            _LOG.warning("checkpoint %s: the ranks could not speak: %s", folder, error)
        # Frames of an error, which lives on with the future, would keep the copied state in memory.
        del staged
        raise failure
