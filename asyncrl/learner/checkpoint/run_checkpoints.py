"""The checkpoints of a run: the state that each of them holds, and the reports about them.

Invariant: ledger, groups and numbers of a checkpoint are of one moment, a version boundary. All lines about its
contents are written before it is complete, so that a learner that continues from it does not write them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

from asyncrl.checkpoint.contents import Adapters, CheckpointState, Geometry
from asyncrl.checkpoint.origin import Origin
from asyncrl.config import Config
from asyncrl.learner.checkpoint.checkpoint_writer import CheckpointWriter, Written
from asyncrl.learner.checkpoint.failed_writes import FailedWrite, Kept, checkpoint_complete_again, checkpoint_failed
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.deliveries import ComponentNames
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.metrics.group_records import GroupRecords
from asyncrl.learner.metrics.step_lines import StepLines
from asyncrl.messages import Request
from asyncrl.messages.actors import CheckpointWritten
from asyncrl.observe.trace import Track
from asyncrl.rpc.services import ActorServices


class CheckpointReports:
    """Reports about checkpoints: counters, notices to the user, and each new checkpoint to the controller."""

    def __init__(
        self,
        services: ActorServices,
        report: Callable[[Request], Coroutine[None, None, None]],
        *,
        tasks: asyncio.TaskGroup,
        track: Track,
    ) -> None:
        """``report`` sends a message to the controller until it is answered."""
        self.is_trained = False
        """Whether nothing more is trained: the end of the run then reports a write that fails."""
        self._counters, self._log, self._notify = services.counters, services.log, services.notify
        self._clock, self._report, self._tasks, self._track = services.clock, report, tasks, track
        self._failures = 0
        """Checkpoints in a row that failed."""
        self._sending: set[asyncio.Task[None]] = set()

    def written(self, written: Written) -> None:
        """Report a checkpoint that is complete."""
        self._counters["checkpoint/version"] = written.version
        self._counters["checkpoint/stage_s"] = written.staged_s
        self._counters["checkpoint/write_s"] = written.seconds
        self._track.add(
            f"checkpoint v{written.version}",
            self._clock.now() - written.seconds,
            step=written.step,
            version=written.version,
            staged_s=round(written.staged_s, 6),
        )
        if self._failures:
            self._notify("checkpoint", checkpoint_complete_again(self._failures, written.path, written.step))
            self._failures = 0
        self._log.info("checkpoint is complete", version=written.version, step=written.step, path=str(written.path))
        self.announce(written.version, written.step, written.path)

    def failed(self, failed: FailedWrite, kept: Kept | None) -> None:
        """Report a checkpoint that could not be written; ``kept`` is the newest complete one."""
        self._counters.add("checkpoint/failed")
        self._failures += 1
        self._log.error("no checkpoint; the last complete one stays", version=failed.version, error=failed.reason)
        if not self.is_trained:
            text, meanwhile = checkpoint_failed(failed, kept)
            self._notify("checkpoint", text, count=self._failures, meanwhile=meanwhile)

    def announce(self, version: int, step: int, path: Path) -> None:
        """Report the newest checkpoint to the controller."""
        message = CheckpointWritten(version=version, step=step, path=str(path))
        sending = self._tasks.create_task(self._report(message))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def all_sent(self) -> None:
        """Wait until the controller knows every checkpoint: the exit code of the run depends on them."""
        await asyncio.gather(*self._sending)


class RunCheckpoints:
    """Begins the checkpoints of a run."""

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        writer: CheckpointWriter,
        progress: TrainingProgress,
        intake: Intake,
        dataloader: DataloaderLink,
        components: ComponentNames,
        records: GroupRecords,
        lines: StepLines,
        origin: Origin,
        conversations: str,
        start: int,
        incarnation: int,
    ) -> None:
        """``conversations`` is their fingerprint, ``start`` the number of the learner's start in this run."""
        self._config, self._counters, self._writer = config, services.counters, writer
        self._progress, self._intake, self._dataloader = progress, intake, dataloader
        self._components, self._records, self._lines = components, records, lines
        self._origin, self._conversations, self._start, self._incarnation = origin, conversations, start, incarnation

    @property
    def overdue(self) -> bool:
        """Whether a checkpoint failed for lack of room, and now there is room."""
        return self._writer.overdue

    async def begin(self, *, final: bool = False) -> None:
        """Begin to write a checkpoint of a version boundary. A ``final`` one waits for one that is being written."""
        # Nothing is awaited before ``write``, so that ledger, groups and numbers are of one moment.
        snapshot, progress, dataloader = self._intake.snapshot(), self._progress, self._dataloader
        state = CheckpointState(
            version=progress.version,
            trained_at_version=progress.trained_at_version,
            step=progress.step,
            start=self._start,
            incarnation=self._incarnation,
            ledger=snapshot.ledger,
            fingerprint=dataloader.fingerprint,
            seed=dataloader.seed,
            prompts=dataloader.prompts,
            geometry=Geometry.of(self._config),
            adapters=Adapters.of(self._config),
            world_size=self._config.learner.ranks,
            limit=dataloader.limit,
            rounds_closed=sorted(self._records.rounds_written),
            quarantined=snapshot.failed,
            components=self._components.names,
            delivered_lengths=snapshot.delivered_lengths,
            conversations=self._conversations,
            origin=self._origin,
        )
        await self._writer.write(state, snapshot.buffered, snapshot.filtered, self._write_lines, final=final)
        self._counters["checkpoint/skipped"] = self._writer.skipped

    async def _write_lines(self, state: CheckpointState) -> None:
        """Write the records of all that the checkpoint counts, before it is committed: a resume writes none again."""
        await self._records.write_untrained()
        await self._lines.written(state.step)
