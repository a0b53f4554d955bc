"""Writes records of groups that are not trained, and the results of evaluation rounds.

Prompts that were left out, rested or quarantined, and the text of filtered groups, are written as they come. When the
last group of a round is here, the round's line is written first and its outcomes are reported afterwards. The outcomes
end the round, and the end of the last round ends the run.

Invariant: lines are written in order, one task at a time. So the lines about all groups that a checkpoint counts as
concluded are written before the checkpoint is complete.
"""

from __future__ import annotations

import asyncio

from asyncrl.config import Config
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.evals import EvalCollector, eval_metrics
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.metrics.step_lines import StepLines
from asyncrl.messages.dataloader import Outcome
from asyncrl.observe.group_log import EVALUATED, NOT_TRAINED, GroupLog


class GroupRecords:
    """Writes the records of groups with ``lines`` and to the group log."""

    def __init__(
        self,
        config: Config,
        *,
        progress: TrainingProgress,
        intake: Intake,
        evals: EvalCollector,
        dataloader: DataloaderLink,
        lines: StepLines,
        group_log: GroupLog,
    ) -> None:
        self.rounds_written = set(evals.closed)
        """Evaluation rounds whose line is written, as NAME@ROUND. A checkpoint names these as over."""
        self._config, self._progress, self._news = config, progress, progress.news.listen()
        self._intake, self._evals, self._dataloader = intake, evals, dataloader
        self._lines, self._group_log = lines, group_log
        self._writing = asyncio.Lock()
        """Held by the call of ``write_untrained`` that writes; a second call waits, so lines stay in order."""

    async def run(self) -> None:
        """Write records whenever news is announced, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self.write_untrained()
            await self._conclude_rounds()

    async def write_untrained(self) -> None:
        """Write the prompts left out, rested or quarantined since the last call, and the kept texts of filtered groups.

        Left-out and rested prompts go to the group log alone. Rank0 also calls this, before a checkpoint is complete.
        """
        async with self._writing:
            left_out, self._intake.left_out = self._intake.left_out, []
            quarantined, self._intake.quarantined = self._intake.quarantined, []
            for prompt in left_out:
                self._group_log.write(
                    NOT_TRAINED, uid=prompt.uid, reason=prompt.reason, outcome=prompt.kind.replace("_", " ")
                )
            for item in quarantined:
                self._group_log.write(NOT_TRAINED, uid=item.uid, reason=item.reason)
            step, version = self._progress.step, self._progress.version
            await self._lines.quarantined(step, quarantined)
            filtered, self._intake.filtered_samples = self._intake.filtered_samples, []
            for each in filtered:
                await self._lines.samples("filtered", each.reason, step, version, [each.group])

    async def _conclude_rounds(self) -> None:
        """Write line, rewards and samples of each complete round, then report its outcomes to the dataloader."""
        for round, groups in self._evals.complete():
            name, step = round.rpartition("@")[0], self._progress.step
            metrics = eval_metrics(name, groups, self._config.eval[name].pass_at)
            await self._lines.emit({"kind": "eval", "step": step} | metrics)
            # A round without sampled tokens has no version of its own.
            version = metrics.get("weights/version", self._progress.version)
            await self._lines.evaluated(name, step, version, groups)
            shown = sorted((group for group in groups if group.trajectories), key=lambda group: group.lease.index)
            await self._lines.samples("evaluation", name, step, version, shown)
            self.rounds_written.add(round)
            self._group_log.write(EVALUATED, uids=[group.lease.uid for group in groups], step=self._progress.step)
            for group in groups:
                self._intake.outcomes.outcome(Outcome(group.lease.uid, "evaluated"))
            self._dataloader.changed()
