"""Writes and restores checkpoints, on the event loop of rank 0; the disk has threads of its own.

Training waits only until the state is copied. Writing, flushing, committing and removing old checkpoints happen in a
task. At most one checkpoint is written at a time: one that comes due meanwhile is skipped and counted, except a final
one, which waits.

A checkpoint is not begun if the disk lacks room for it, because a full disk would break metrics and logs too. A task
then checks the free space, and the writer is ``overdue`` as soon as there is enough.

``restore`` passes over damaged checkpoints, and fails with CheckpointError if none is whole. If a checkpoint cannot be
written, its files are removed, the failure is reported, the last complete checkpoint stays, and training continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

from asyncrl.checkpoint.contents import (
    CONTENTS,
    GROUPS,
    STATE,
    TRAINER,
    CheckpointState,
    Contents,
    read_contents,
    write_contents,
)
from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.checkpoint.step_back import NewestWholeSearch
from asyncrl.config.operation import CheckpointConfig
from asyncrl.core.disk import free_bytes, no_room
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checkpoint.checkpoint_reports import CheckpointReports
from asyncrl.learner.checkpoint.failed_writes import LOOK_S, FailedWrite, Kept
from asyncrl.messages.groups import Group
from asyncrl.rpc.services import Clock

AROUND_BYTES = 1 << 16
"""Estimated bytes of a checkpoint apart from the trainer's files, the groups and the ledger."""
_FILES = (STATE, GROUPS, f"{TRAINER}/{CONTENTS}")
_LOG = logging.getLogger(__name__)


class CheckpointWriter:
    """The writer of checkpoints. All methods of ``backend`` run on ``thread``; ``tasks`` runs the writes."""

    def __init__(
        self,
        folder: Path,
        incarnation: int,
        backend: Backend,
        thread: Executor,
        reports: CheckpointReports,
        *,
        config: CheckpointConfig,
        tasks: asyncio.TaskGroup,
        clock: Clock,
    ) -> None:
        self.skipped = 0
        """Checkpoints that were skipped because another one was being written."""
        self.newest: Kept | None = None
        """The newest complete checkpoint, restored or written; None before the first."""
        self.failed: FailedWrite | None = None
        """Failure of the newest attempt; None while one is being written, and after a success."""
        self.overdue = False
        """Whether the last attempt failed for lack of room and the disk now has enough."""
        self._room_watch: asyncio.Task[None] | None = None
        """Task of ``_watch_for_room``, which may have ended; None if the last attempt did not fail for lack of room."""
        self._folder = CheckpointFolder(folder)
        self._incarnation = incarnation
        self._backend = backend
        self._thread = thread
        self._reports = reports
        self._config = config
        self._tasks = tasks
        self._clock = clock
        self._idle = asyncio.Event()
        """Set while no checkpoint is being copied or written."""
        self._idle.set()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being copied or written."""
        return not self._idle.is_set()

    async def restore(self) -> Contents | None:
        """Claim the folder, and load the newest undamaged checkpoint into the backend. Returns its contents.

        Returns None if the folder has no checkpoint. Damaged newer ones are renamed and reported. Comes after
        ``Backend.setup``. Raises CheckpointError.
        """
        loop = asyncio.get_running_loop()
        # The claim comes before any reading: after it, an earlier incarnation of the learner can commit nothing.
        await asyncio.to_thread(self._folder.claim, self._incarnation)
        await loop.run_in_executor(self._thread, self._backend.sees, self._folder.folder)
        search = await asyncio.to_thread(NewestWholeSearch, self._folder)
        while (path := search.next()) is not None:
            try:
                contents = await asyncio.to_thread(self._read, path)
                await loop.run_in_executor(self._thread, self._backend.load, path / TRAINER)
            except DamagedCheckpoint as problem:
                await asyncio.to_thread(search.pass_over, problem)
                continue
            new_names = await asyncio.to_thread(search.set_aside)
            self.newest = Kept(version=contents.state.version, step=contents.state.step, path=path)
            self._reports.restored(
                self.newest,
                {
                    damaged.path.name: damaged.describe(path, contents.state.step, now_at)
                    for damaged, now_at in zip(search.damaged, new_names, strict=True)
                },
            )
            return contents
        return None

    async def write(
        self,
        state: CheckpointState,
        buffered: Sequence[Group],
        filtered: Sequence[Group],
        write_lines: Callable[[CheckpointState], Awaitable[None]],
        *,
        final: bool = False,
    ) -> bool:
        """Copy the state and begin to write a checkpoint. Returns False if it was skipped, or failed at once.

        While another one is being written, a ``final`` one waits; any other is skipped. Before the
        checkpoint counts, ``write_lines`` writes the metrics and samples of the steps in it: a resumed run does not
        write them again. The groups must not change later.
        """
        if self.busy and not final:
            self.skipped += 1
            return False
        buffered, filtered = list(buffered), list(filtered)
        # A loop, because another write may begin before this task runs again.
        while self.busy:
            await self._idle.wait()
        self._idle.clear()
        self._stop_room_watch()
        self.overdue, self.failed = False, None
        began = self._clock.now()
        group_bytes = sum(map(_group_bytes, (*buffered, *filtered)))
        # JSON holds the bits of the ledger in base64: 4 characters for 3 bytes.
        ledger_bytes = sum(len(epochs.bits) for epochs in state.ledger.concluded) * 4 // 3
        needed = self._backend.checkpoint_bytes() + group_bytes + ledger_bytes + AROUND_BYTES
        try:
            partial = await asyncio.to_thread(self._begin, state.version, needed)
            loop = asyncio.get_running_loop()
            saving = await loop.run_in_executor(self._thread, self._backend.save, partial / TRAINER)
        except CheckpointError as error:
            try:
                await self._report_failure(state, error, needed)
            finally:
                self._idle.set()
            return False
        except BaseException:
            self._idle.set()
            raise
        staged_s = self._clock.now() - began
        self._tasks.create_task(
            self._finish(
                partial, saving, state, buffered, filtered, write_lines, began=began, staged_s=staged_s, needed=needed
            )
        )
        return True

    async def settle(self) -> None:
        """Wait until no checkpoint is being written. Cancelling the wait does not cancel the write."""
        await self._idle.wait()

    def close(self) -> None:
        """Stop checking for room."""
        self._stop_room_watch()

    def _begin(self, version: int, needed: int) -> Path:
        """Create the folder of a checkpoint. Raises CheckpointError, also if the disk reports less than ``needed``."""
        folder = self._folder.folder
        free = free_bytes(folder)
        if free is not None and free < needed:
            raise CheckpointError(str(folder), no_room(folder, needed=needed), full=errno.ENOSPC)
        return self._folder.begin(version)

    async def _report_failure(self, state: CheckpointState, error: CheckpointError, needed: int) -> None:
        """Report a failed checkpoint; its files must be removed before.

        On a full disk, measure the free bytes and list older checkpoints for the advice. If the disk lacks room, begin
        to watch it.
        """
        folder, reason, older, free = self._folder.folder, error.reason, list[str](), None
        if error.full:
            reason = await asyncio.to_thread(no_room, folder, error.full, needed=needed)
            free = await asyncio.to_thread(free_bytes, folder)
            with contextlib.suppress(CheckpointError):
                older = await asyncio.to_thread(self._folder.older)
        elif error.path != str(folder):
            reason = f"{error.path}: {reason}"
        self.failed = FailedWrite(
            version=state.version,
            step=state.step,
            folder=folder,
            reason=reason,
            full=error.full,
            needed=needed,
            free=free,
            older=older,
        )
        if self.failed.lacks_room:
            self._room_watch = self._tasks.create_task(self._watch_for_room(needed))
        self._reports.failed(self.failed, self.newest)

    async def _watch_for_room(self, needed: int) -> None:
        """Check the disk every LOOK_S; set ``overdue`` once it has the ``needed`` bytes."""
        while True:
            await asyncio.sleep(LOOK_S)
            free = await asyncio.to_thread(free_bytes, self._folder.folder)
            if free is not None and free >= needed:
                self.overdue = True
                return

    def _stop_room_watch(self) -> None:
        if self._room_watch is not None:
            self._room_watch.cancel()
            self._room_watch = None

    async def _finish(
        self,
        partial: Path,
        saving: Future[None],
        state: CheckpointState,
        buffered: list[Group],
        filtered: list[Group],
        write_lines: Callable[[CheckpointState], Awaitable[None]],
        *,
        began: float,
        staged_s: float,
        needed: int,
    ) -> None:
        """Write the contents while the backend writes its part; then commit the checkpoint and remove old ones.

        Training continues meanwhile. If a part fails with CheckpointError, the files are discarded and the failure is
        reported. Any other error is raised.
        """
        try:
            # If one part fails, still wait for the other: no file may be removed while a part writes.
            ended = await asyncio.gather(
                asyncio.to_thread(write_contents, partial, state, buffered, filtered),
                asyncio.wrap_future(saving),
                return_exceptions=True,
            )
            for problem in ended:
                if problem is not None:
                    raise problem
            await write_lines(state)
            path = await asyncio.to_thread(
                self._folder.commit, partial, version=state.version, step=state.step, files=_FILES
            )
            self.newest = Kept(version=state.version, step=state.step, path=path)
            self._reports.written(self.newest, staged_s=staged_s, seconds=self._clock.now() - began)
            await self._retain()
        except CheckpointError as error:
            await asyncio.to_thread(self._folder.discard, partial)
            await self._report_failure(state, error, needed)
        finally:
            self._idle.set()

    async def _retain(self) -> None:
        try:
            keep, keep_every_steps = self._config.keep, self._config.keep_every_steps
            await asyncio.to_thread(self._folder.retain, keep=keep, keep_every_steps=keep_every_steps)
        except CheckpointError as error:
            _LOG.warning("old checkpoints could not be removed: %s", error)

    def _read(self, path: Path) -> Contents:
        self._folder.verify(self._folder.at(path))
        return read_contents(path)


def _group_bytes(group: Group) -> int:
    """Estimated bytes of a group on disk."""
    size = len(group.lease.prompt)
    for trajectory in group.trajectories:
        arrays = sum(
            array.nbytes
            for sequence in trajectory.sequences
            for array in (sequence.prompt_ids, sequence.tokens, sequence.logprobs, sequence.routes)
            if array is not None
        )
        sets = sum(sequence.sets.ids.nbytes for sequence in trajectory.sequences if sequence.sets is not None)
        # The messages of a conversation take about as much as its tokens.
        size += len(trajectory.text) + arrays * (2 if trajectory.messages else 1) + sets
    return size
