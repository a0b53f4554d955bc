"""Writes, restores and reports checkpoints, on the event loop of rank 0; the disk has threads of its own.

Training waits only until the state is copied. Writing, flushing, committing and removing old checkpoints happen in a
task. At most one checkpoint is written at a time: one that comes due meanwhile is skipped and counted, except a final
one, which waits.

A checkpoint is not begun if the disk lacks room for it, because a full disk would break metrics and logs too. Training
begins another one at the first version boundary at which the writer ``has_room_again``.

``restore`` passes over damaged checkpoints, and fails with CheckpointError if all are damaged. If a checkpoint cannot
be written, its files are removed, the failure is reported, the last complete checkpoint stays, and training continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Coroutine, Sequence
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
from asyncrl.checkpoint.step_back import Damaged, refuse_all_damaged
from asyncrl.config.operation import CheckpointConfig
from asyncrl.core.disk import free_bytes, no_room
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint
from asyncrl.core.threads import run_on
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checkpoint.failed_writes import FailedWrite, Kept, checkpoint_complete_again, checkpoint_failed
from asyncrl.messages import Request
from asyncrl.messages.actors import CheckpointWritten
from asyncrl.messages.groups import Group
from asyncrl.observe.trace import Track
from asyncrl.rpc.services import ActorServices

AROUND_BYTES = 1 << 16
"""Estimated bytes of a checkpoint apart from the trainer's files, the groups and the ledger."""
_FILES = (STATE, GROUPS, f"{TRAINER}/{CONTENTS}")
"""Files whose checksums are recorded in COMPLETE."""


class CheckpointWriter:
    """The writer of checkpoints. All methods of ``backend`` run on ``thread``; ``tasks`` runs the writes."""

    def __init__(
        self,
        folder: Path,
        incarnation: int,
        backend: Backend,
        thread: Executor,
        services: ActorServices,
        report: Callable[[Request], Coroutine[None, None, None]],
        *,
        config: CheckpointConfig,
        tasks: asyncio.TaskGroup,
        track: Track,
    ) -> None:
        """``report`` sends a message to the controller until it is answered."""
        self.is_trained = False
        """Whether the run trains no further step. Then FinalWrites notifies the user of a failed write."""
        self.newest: Kept | None = None
        """The newest complete checkpoint, restored or written; None before the first."""
        self.failed: FailedWrite | None = None
        """Failure of the newest attempt; None while one is being written, and after a success."""
        self._failures = 0
        """Number of failed checkpoints since the last complete one."""
        self._sending: set[asyncio.Task[None]] = set()
        """Tasks whose message the controller has not answered."""
        self._folder = CheckpointFolder(folder)
        self._incarnation = incarnation
        self._backend = backend
        self._thread = thread
        self._counters, self._log, self._notify = services.counters, services.log, services.notify
        self._clock = services.clock
        self._report = report
        self._config = config
        self._tasks = tasks
        self._track = track
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
        # The claim comes before any reading: after it, an earlier incarnation of the learner can commit nothing.
        await asyncio.to_thread(self._folder.claim, self._incarnation)
        await run_on(self._thread, self._backend.sees, self._folder.folder)
        damaged: list[Damaged] = []
        # A thread cannot be cancelled, so each step of the search is awaited: a learner that ends loads nothing more.
        for path in await asyncio.to_thread(self._folder.candidates):
            try:
                contents = await asyncio.to_thread(self._read, path)
                await run_on(self._thread, self._backend.load, path / TRAINER)
            except DamagedCheckpoint as problem:
                damaged.append(Damaged.at(path, problem))
                continue
            new_names = await asyncio.to_thread(lambda: [self._folder.set_aside_damaged(each.path) for each in damaged])
            step = contents.state.step
            self.newest = Kept(version=contents.state.version, step=step, path=path)
            for each, now_at in zip(damaged, new_names, strict=True):
                self._notify(f"damaged {each.path.name}", each.describe(path, step, now_at))
            if damaged:
                # The controller may still name a damaged one as the newest.
                self._announce(self.newest)
            return contents
        refuse_all_damaged(self._folder, damaged)
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

        While another one is being written, a ``final`` one waits; any other is skipped. Before the checkpoint counts,
        ``write_lines`` writes the metrics and samples of the steps in it: a resumed run does not write them again. The
        groups must not change later.
        """
        if self.busy and not final:
            self._counters.add("checkpoint/skipped")
            return False
        buffered, filtered = list(buffered), list(filtered)
        # A loop, because another write may begin before this task runs again.
        while self.busy:
            await self._idle.wait()
        self._idle.clear()
        self.failed = None
        began = self._clock.now()
        group_bytes = sum(map(_group_bytes, (*buffered, *filtered)))
        # JSON holds the bits of the ledger in base64: 4 characters for 3 bytes.
        ledger_bytes = sum(len(epochs.bits) for epochs in state.ledger.concluded) * 4 // 3
        needed = self._backend.checkpoint_bytes() + group_bytes + ledger_bytes + AROUND_BYTES
        try:
            partial = await asyncio.to_thread(self._begin, state.version, needed)
            saving = await run_on(self._thread, self._backend.save, partial / TRAINER)
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

    async def has_room_again(self) -> bool:
        """Whether the last attempt failed for lack of room, and the disk now has enough."""
        failed = self.failed
        return failed is not None and failed.lacks_room and await asyncio.to_thread(failed.fits_now)

    async def all_reported(self) -> None:
        """Wait until the controller knows every checkpoint: the exit code of the run depends on them."""
        await asyncio.gather(*self._sending)

    def _begin(self, version: int, needed: int) -> Path:
        """Create the folder of a checkpoint. Raises CheckpointError, also if the disk reports less than ``needed``."""
        folder = self._folder.folder
        free = free_bytes(folder)
        if free is not None and free < needed:
            raise CheckpointError(str(folder), no_room(folder, needed=needed), full=errno.ENOSPC)
        return self._folder.begin(version)

    async def _report_failure(self, state: CheckpointState, error: CheckpointError, needed: int) -> None:
        """Report a failed checkpoint; its files must be removed before.

        On a full disk, measure the free bytes and list older checkpoints for the advice.
        """
        folder, reason, older, free = self._folder.folder, error.reason, list[str](), None
        if error.full:
            reason = await asyncio.to_thread(no_room, folder, error.full, needed=needed)
            free = await asyncio.to_thread(free_bytes, folder)
            with contextlib.suppress(CheckpointError):
                older = await asyncio.to_thread(self._folder.older)
        elif error.path != str(folder):
            reason = f"{error.path}: {reason}"
        self.failed = failed = FailedWrite(
            version=state.version,
            step=state.step,
            folder=folder,
            reason=reason,
            full=error.full,
            needed=needed,
            free=free,
            older=older,
        )
        self._counters.add("checkpoint/failed")
        self._failures += 1
        self._log.error("no checkpoint; the last complete one stays", version=failed.version, error=failed.reason)
        if not self.is_trained:
            text, meanwhile = checkpoint_failed(failed, self.newest)
            self._notify("checkpoint", text, count=self._failures, meanwhile=meanwhile)

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
            self._report_written(self.newest, began=began, staged_s=staged_s)
            await self._retain()
        except CheckpointError as error:
            await asyncio.to_thread(self._folder.discard, partial)
            await self._report_failure(state, error, needed)
        finally:
            self._idle.set()

    def _report_written(self, kept: Kept, *, began: float, staged_s: float) -> None:
        """Report a complete checkpoint: counters, timeline, log, and a message to the controller.

        Training waited for the first ``staged_s`` seconds.
        """
        self._counters["checkpoint/version"] = kept.version
        self._counters["checkpoint/stage_s"] = staged_s
        self._counters["checkpoint/write_s"] = self._clock.now() - began
        self._track.add(
            f"checkpoint v{kept.version}",
            began,
            step=kept.step,
            version=kept.version,
            staged_s=round(staged_s, 6),
        )
        if self._failures:
            self._notify("checkpoint", checkpoint_complete_again(self._failures, kept.path, kept.step))
            self._failures = 0
        self._log.info("checkpoint is complete", version=kept.version, step=kept.step, path=str(kept.path))
        self._announce(kept)

    def _announce(self, kept: Kept) -> None:
        """Start a task that reports a complete checkpoint to the controller."""
        message = CheckpointWritten(version=kept.version, step=kept.step, path=str(kept.path))
        sending = self._tasks.create_task(self._report(message))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _retain(self) -> None:
        """Remove old checkpoints as the configuration says; a failure is only logged."""
        try:
            keep, keep_every_steps = self._config.keep, self._config.keep_every_steps
            await asyncio.to_thread(self._folder.retain, keep=keep, keep_every_steps=keep_every_steps)
        except CheckpointError as error:
            self._log.warning("old checkpoints could not be removed", error=str(error))

    def _read(self, path: Path) -> Contents:
        """Verify the files that COMPLETE lists, then read state and groups. Raises CheckpointError."""
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
