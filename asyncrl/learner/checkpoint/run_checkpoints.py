"""The checkpoints of a run: collects the state that each of them holds.

Invariant: ledger, groups and numbers of a checkpoint are of one moment, a version boundary. All lines about its
contents are written before it is complete, so that a learner that continues from it does not write them again.
"""

from __future__ import annotations

from asyncrl.checkpoint.contents import Adapters, CheckpointState, Geometry
from asyncrl.checkpoint.origin import Origin
from asyncrl.config import Config
from asyncrl.learner.checkpoint.checkpoint_writer import CheckpointWriter
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.deliveries import ComponentNames
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.metrics.group_records import GroupRecords
from asyncrl.learner.metrics.step_lines import StepLines
from asyncrl.rpc.services import ActorServices


class RunCheckpoints:
    """Collects the state of the run for each checkpoint and gives it to the writer."""

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
        """``conversations`` is the fingerprint of the conversations of sft.data, or empty.

        ``start`` is the number of the learner's start in this run, as in its lines of metrics. ``incarnation`` is that
        of the learner, which writes the checkpoints.
        """
        self._config, self._counters, self._writer = config, services.counters, writer
        self._progress, self._intake, self._dataloader = progress, intake, dataloader
        self._components, self._records, self._lines = components, records, lines
        self._origin, self._conversations, self._start, self._incarnation = origin, conversations, start, incarnation

    @property
    def overdue(self) -> bool:
        """Whether the last attempt failed for lack of room and the disk now has enough."""
        return self._writer.overdue

    async def begin(self, *, final: bool = False) -> None:
        """Collect the state at a version boundary and begin to write it as a checkpoint.

        If another checkpoint is being written, a ``final`` one waits for its end, and any other is skipped.
        """
        # No await before ``write``, so that ledger, groups and numbers are of one moment.
        intake, progress, dataloader = self._intake.state(), self._progress, self._dataloader
        state = CheckpointState(
            version=progress.version,
            trained_at_version=progress.trained_at_version,
            step=progress.step,
            start=self._start,
            incarnation=self._incarnation,
            ledger=intake.ledger,
            fingerprint=dataloader.fingerprint,
            seed=dataloader.seed,
            prompts=dataloader.prompts,
            geometry=Geometry.of(self._config),
            adapters=Adapters.of(self._config),
            world_size=self._config.learner.ranks,
            limit=dataloader.limit,
            rounds_closed=sorted(self._records.rounds_written),
            quarantined=intake.failed,
            components=self._components.names,
            delivered_lengths=intake.delivered_lengths,
            conversations=self._conversations,
            origin=self._origin,
        )
        await self._writer.write(state, intake.buffered, intake.filtered, self._write_lines, final=final)
        self._counters["checkpoint/skipped"] = self._writer.skipped

    async def _write_lines(self, state: CheckpointState) -> None:
        """Write the lines about everything in the checkpoint, which a resumed run will not write again."""
        await self._records.write_untrained()
        await self._lines.written(state.step)
