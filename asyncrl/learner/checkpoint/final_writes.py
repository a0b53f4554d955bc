"""The last writes of a run: its last checkpoint and the exported model, or why one of them is missing.

Both wait for room on a full disk, within ``checkpoint.room_wait_s``, or a share of ``preempt.grace_s`` in a preempted
run. If the disk refuses a write to the end, ``finish`` returns the reason, and the run ends as failed.

Any other error of the export restarts the learner if a checkpoint holds the last step: the new learner trains nothing.
Without such a checkpoint a restart would train steps twice, so ActorFailed ends the run instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from asyncrl.config import Config
from asyncrl.core.disk import free_bytes, full_errno, in_words, no_room
from asyncrl.core.errors import ActorFailed, AsyncRLError
from asyncrl.core.threads import run_on
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checkpoint.checkpoint_writer import CheckpointWriter
from asyncrl.learner.checkpoint.failed_writes import FailedWrite, end_of_run, wait_for_disk_space, waits_for_room
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.rpc.services import ActorServices

GRACE_SHARE = 0.3
"""Share of preempt.grace_s that a preempted run waits for room."""


class FinalWrites:
    """Writes the last checkpoint and the exported model. All methods of ``backend`` run on ``thread``."""

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        run_dir: Path,
        backend: Backend,
        thread: Executor,
        progress: TrainingProgress,
        writer: CheckpointWriter,
        begin_checkpoint: Callable[[], Awaitable[None]],
    ) -> None:
        """``begin_checkpoint`` collects the state of the run and begins to write it, after a checkpoint under way."""
        self._config = config
        self._name, self._clock, self._log = services.name, services.clock, services.log
        self._states, self._notify = services.states, services.notify
        self._run_dir = run_dir
        self._backend = backend
        self._thread = thread
        self._progress = progress
        self._writer, self._begin_checkpoint = writer, begin_checkpoint
        self._room_until = math.inf
        """Time (s) at which the wait for room ends; ``preempted`` and ``finish`` set it."""

    def preempted(self) -> None:
        """Shorten the wait for room to GRACE_SHARE of preempt.grace_s from now."""
        self._room_until = min(self._room_until, self._clock.now() + GRACE_SHARE * self._config.preempt.grace_s)

    async def begin(self, *, preempted: bool) -> None:
        """Begin to write the last checkpoint. A ``preempted`` run always gets one.

        Any other run gets one if it writes checkpoints and the newest does not hold the last step.
        """
        kept = self._writer.newest
        is_new = kept is None or kept.step < self._progress.step
        if preempted or (self._config.checkpoint.every_versions and is_new):
            self._states.enter("checkpointing")
            await self._begin_checkpoint()

    async def finish(self, *, preempted: bool) -> str:
        """Wait for the last checkpoint, then export the model, unless ``preempted``.

        Returns what failed, what is lost and what to do; empty if nothing failed.
        """
        self._room_until = min(self._room_until, self._clock.now() + self._config.checkpoint.room_wait_s)
        self._states.enter("checkpointing")
        # The checkpoint first, so that a failed export loses no step.
        checkpoint, export = await self._last_checkpoint(), None
        exports = not preempted and self._config.checkpoint.export_at_end
        if exports:
            self._states.enter("exporting")
            export = await self._last_export()
        kept = self._writer.newest
        return end_of_run(checkpoint, export, kept, self._run_dir, exported=exports and export is None)

    async def _last_checkpoint(self) -> FailedWrite | None:
        """Wait for the last checkpoint, and repeat it while it fails for lack of room."""

        async def wait_for_write() -> FailedWrite | None:
            await self._writer.settle()
            # An earlier checkpoint may hold the last step.
            return None if self._last_step_is_kept else self._writer.failed

        async def write() -> FailedWrite | None:
            await self._begin_checkpoint()
            return await wait_for_write()

        return await self._persist("the last checkpoint", await wait_for_write(), write)

    async def _last_export(self) -> FailedWrite | None:
        """Export the model; after a failure, rename the model that an earlier end of the run exported."""
        failed = await self._persist("the model", await self._export(), self._export)
        if failed is not None:
            try:
                await asyncio.to_thread(_set_aside, failed.folder)
            except OSError as error:
                self._log.error("the model of an earlier end is not set aside", error=str(error))
                stays = f"{failed.folder} holds the model of an earlier end of the run"
                return replace(failed, reason=f"{failed.reason}; {stays}")
        return failed

    async def _persist(
        self, what: str, failed: FailedWrite | None, write: Callable[[], Awaitable[FailedWrite | None]]
    ) -> FailedWrite | None:
        """Repeat a write that ended in ``failed`` on a full disk, each time there is room, until the wait is over.

        Returns the last failure; None after a success. A failure for another reason is returned at once.
        """
        waited = False
        while failed is not None and failed.full and (left := self._room_until - self._clock.now()) > 0:
            waited = True
            text, meanwhile, waits_for = waits_for_room(what, failed, left)
            self._notify(what, text, meanwhile=meanwhile, waits_for=waits_for)
            if not await wait_for_disk_space(failed, lambda: self._room_until, self._clock):
                self._notify(what, f"{what} was given up: no room came in time")
                return failed
            failed = await write()
        if waited and failed is None:
            self._notify(what, f"{what} is written: there was room again")
        return failed

    @property
    def _last_step_is_kept(self) -> bool:
        """Whether the newest complete checkpoint holds the last step."""
        kept = self._writer.newest
        return kept is not None and kept.step == self._progress.step

    async def _export(self) -> FailedWrite | None:
        """Write the model to export/. Returns the failure if the disk lacks room or refuses a write, else None.

        Other errors are raised, as ActorFailed if no checkpoint holds the last step.
        """
        folder = self._run_dir / "export"
        needed = self._backend.export_bytes()
        free = await asyncio.to_thread(free_bytes, folder)
        if free is not None and free < needed:
            return await self._make_failure(folder, needed, errno.ENOSPC)
        try:
            await run_on(self._thread, self._backend.export, folder)
        except Exception as error:
            self._log.error("the model is not exported", error=str(error))
            if isinstance(error, OSError) and not isinstance(error, AsyncRLError):
                return await self._make_failure(folder, needed, full_errno(error), in_words(error, folder))
            if self._last_step_is_kept:
                raise
            failed = await self._make_failure(folder, needed, full=0, reason=f"{type(error).__name__}: {error}")
            reason = end_of_run(None, failed, self._writer.newest, self._run_dir, exported=False)
            raise ActorFailed(self._name, reason) from error
        return None

    async def _make_failure(self, folder: Path, needed: int, full: int, reason: str = "") -> FailedWrite:
        """Make the record of a failed export. ``full`` is the error number of a full disk, or 0.

        For a full disk, the reason is composed here, with the free bytes.
        """
        free = await asyncio.to_thread(free_bytes, folder) if full else None
        if full:
            reason = await asyncio.to_thread(lambda: no_room(folder.parent, full, needed=needed))
        progress = self._progress
        return FailedWrite(
            version=progress.version,
            step=progress.step,
            folder=folder,
            reason=reason,
            full=full,
            needed=needed,
            free=free,
        )


def _set_aside(folder: Path) -> None:
    """Rename the model of an earlier end of the run, so that it is not taken for the new one. Raises OSError."""
    count, aside = 1, folder.with_name(f"{folder.name}-earlier")
    while os.path.lexists(aside):
        count += 1
        aside = folder.with_name(f"{folder.name}-earlier-{count}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, aside)
