"""The last writes of a run: its last checkpoint and the exported model, or the reason why one of them is not there.

A full disk is waited for within ``checkpoint.room_wait_s``, or a share of ``preempt.grace_s`` when the run makes way. A
model that cannot be exported never ends the learner while it has trained steps that no checkpoint holds: it would start
again and train the same steps once more.

Fails with an export's error of any kind but a disk's, where the last step is in a checkpoint, since a learner that
starts again then only exports; otherwise with ActorFailed, which ends the run.
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
from asyncrl.disk import free_bytes, full_errno, in_words, no_room
from asyncrl.errors import ActorFailed, AsyncRLError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checkpoint.failed_writes import FailedWrite, end_of_run, room, waits_for_room
from asyncrl.learner.checkpoint.writer import Checkpoints
from asyncrl.learner.loop import Training
from asyncrl.runtime.services import ActorServices

GRACE_SHARE = 0.3
"""Share of preempt.grace_s: longest that a run which makes way waits for room."""


class LastWrites:
    """The writer of the last files. ``checkpoint`` begins to write a last checkpoint, ``thread`` is the backend's."""

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        run_dir: Path,
        backend: Backend,
        thread: Executor,
        training: Training,
        checkpoints: Checkpoints,
        checkpoint: Callable[[], Awaitable[None]],
    ) -> None:
        self._config = config
        self._name, self._clock, self._log = services.name, services.clock, services.log
        self._states, self._notify = services.states, services.notify
        self._run_dir = run_dir
        self._backend = backend
        self._thread = thread
        self._training = training
        self._checkpoints = checkpoints
        self._checkpoint = checkpoint
        self._room_until = math.inf

    def make_way(self) -> None:
        """Shorten the wait for room: the run is to end soon."""
        self._room_until = min(self._room_until, self._clock.now() + GRACE_SHARE * self._config.preempt.grace_s)

    async def begin(self, *, preempted: bool) -> None:
        """Begin to write the last checkpoint, where one is wanted and there is anything new."""
        kept = self._checkpoints.newest
        is_new = kept is None or kept.step < self._training.step
        if preempted or (self._config.checkpoint.every_versions and is_new):
            self._states.enter("checkpointing")
            await self._checkpoint()

    async def finish(self, *, preempted: bool) -> str:
        """Wait until all is written, or cannot be: reason, loss and way to mend it. Raises as the module says."""
        self._room_until = min(self._room_until, self._clock.now() + self._config.checkpoint.room_wait_s)
        self._states.enter("checkpointing")
        # The checkpoint comes first, so that an export that fails loses no step.
        checkpoint, export = await self._last_checkpoint(), None
        exports = not preempted and self._config.checkpoint.export_at_end
        if exports:
            self._states.enter("exporting")
            export = await self._last_export()
        kept = self._checkpoints.newest
        return end_of_run(checkpoint, export, kept, self._run_dir, exported=exports and export is None)

    async def _last_checkpoint(self) -> FailedWrite | None:
        async def look() -> FailedWrite | None:
            await self._checkpoints.settle()
            # An earlier checkpoint may hold all that was trained.
            return None if self._is_kept else self._checkpoints.failed

        async def write() -> FailedWrite | None:
            await self._checkpoint()
            return await look()

        return await self._persist("the last checkpoint", await look(), write)

    async def _last_export(self) -> FailedWrite | None:
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
        """Try again after an attempt that ended in ``failed``, as long as there is room in time."""
        waited = False
        while failed is not None and failed.full and (left := self._room_until - self._clock.now()) > 0:
            waited = True
            told = waits_for_room(what, failed, left)
            self._notify(what, told.text, meanwhile=told.meanwhile, waits_for=told.waits_for)
            if not await room(failed, lambda: self._room_until, self._clock):
                self._notify(what, f"{what} was given up: no room came in time")
                return failed
            failed = await write()
        if waited and failed is None:
            self._notify(what, f"{what} is written: there was room again")
        return failed

    @property
    def _is_kept(self) -> bool:
        """Whether a checkpoint holds the last step."""
        kept = self._checkpoints.newest
        return kept is not None and kept.step == self._training.step

    async def _export(self) -> FailedWrite | None:
        folder = self._run_dir / "export"
        needed = self._backend.export_bytes()
        free = await asyncio.to_thread(free_bytes, folder)
        if free is not None and free < needed:
            return await self._failed(folder, needed, errno.ENOSPC)
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._backend.export, folder)
        except Exception as error:
            self._log.error("the model is not exported", error=str(error))
            if isinstance(error, OSError) and not isinstance(error, AsyncRLError):
                return await self._failed(folder, needed, full_errno(error), in_words(error, folder))
            if self._is_kept:
                raise
            failed = await self._failed(folder, needed, 0, f"{type(error).__name__}: {error}")
            reason = end_of_run(None, failed, self._checkpoints.newest, self._run_dir, exported=False)
            raise ActorFailed(self._name, reason) from error
        return None

    async def _failed(self, folder: Path, needed: int, full: int, reason: str = "") -> FailedWrite:
        free = await asyncio.to_thread(free_bytes, folder) if full else None
        if full:
            reason = await asyncio.to_thread(lambda: no_room(folder.parent, full, needed=needed))
        training = self._training
        return FailedWrite(
            version=training.version,
            step=training.step,
            folder=folder,
            reason=reason,
            full=full,
            needed=needed,
            free=free,
        )


def _set_aside(folder: Path) -> None:
    """Rename the model of an earlier end of the run: nobody is to take it for that of this one. Raises OSError."""
    count, aside = 1, folder.with_name(f"{folder.name}-earlier")
    while os.path.lexists(aside):
        count += 1
        aside = folder.with_name(f"{folder.name}-earlier-{count}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, aside)
