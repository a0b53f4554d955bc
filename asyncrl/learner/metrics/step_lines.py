"""Writes the lines of metrics.jsonl, the samples of steps and quarantined prompts, in order and off the training path.

A step's line waits for a limited time until the rollouters have reported on their work during its training. The
callback ``report``, which sends lines to the controller, gets a step's own line before the other lines of the step.
This order matters: the first step's line of a restarted learner voids earlier lines of that step and of later ones.
In the file, the lines of weight updates and evaluations may come before the step's line. Sampled tokens count from the
end of one step's training to the end of the next, and are left out if a report is missing. A line that cannot be
written waits in memory (record_files.py). It is tried again every RETRY_S, before a checkpoint and at the end. The user
gets a notice; training does not wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncrl.learner.algorithm.batch import SequenceId
from asyncrl.learner.algorithm.token_scores import TokenScores
from asyncrl.learner.groups.intake import Quarantined
from asyncrl.learner.metrics.generation_log import GenerationLog, update_line, update_metrics
from asyncrl.learner.metrics.record_files import NO_SCORES, RecordFiles
from asyncrl.messages.groups import Group
from asyncrl.messages.learner import RolloutStats, UpdateTimes
from asyncrl.observe.samples import TRAINED, SampleKind
from asyncrl.rpc.services import ActorServices

STATS_WAIT_S = 3.0
"""Longest wait of a metrics line for the rollouters' reports on its step (s)."""
LINES_PENDING = 64
"""Number of steps whose lines may wait; then ``put`` waits."""
RETRY_S = 1.0
"""Pause between two attempts to write waiting lines (s)."""
LAST_TRY_S = 10.0
"""Longest time at the end of a run for writing waiting lines (s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A trained step: its metrics, the time of its training (wall clock, s), its groups, the scores of their tokens."""

    line: dict[str, Any]
    train_began: float
    train_ended: float
    groups: list[Group]
    token_scores: Mapping[SequenceId, TokenScores] = field(default_factory=dict)


class StepLines:
    """Writes the lines of a run.

    ``report`` gets each line, also one that waits for the disk: that of a step, then those of its evaluations and
    updates.
    """

    def __init__(
        self,
        records: RecordFiles,
        services: ActorServices,
        *,
        samples_per_step: int,
        report: Callable[[dict[str, Any]], object],
        notify: Callable[[int, OSError | None], object],
        step: int = 0,
    ) -> None:
        """``step`` is the last step whose line is written already.

        ``notify`` is called when lines begin to wait, when all are written, and when lines are lost. It gets the number
        of lines lost so far, and the error of the last attempt; None if it succeeded.
        """
        self._records = records
        self._samples_per_step = samples_per_step
        self._report = report
        self._notify = notify
        self._counters, self._clock, self._log = services.counters, services.clock, services.log
        self._generation = GenerationLog(succeeds=records.start > 1)
        self._stats_came = asyncio.Event()
        """Set when a rollouter has reported."""
        self._steps: asyncio.Queue[TrainedStep] = asyncio.Queue(LINES_PENDING)
        """Steps whose lines ``run`` will write."""
        self._counted_until: float | None = None
        """Time (wall clock, s) up to which sampled tokens are counted: the end of the last step's training."""
        self._written = step
        """The last step whose line is written."""
        self._line_written = asyncio.Event()
        """Set when ``run`` has written the line of a step."""
        self._thread_lock = threading.Lock()
        self._write_lock = asyncio.Lock()
        """One write at a time. After a cancelled write its thread still holds ``_thread_lock``, but not this lock."""
        self._reported: tuple[bool, int] = False, 0
        """Whether lines wait, and how many are lost, at the last call of ``notify``."""
        self._unreported: list[dict[str, Any]] = []
        """Lines that ``report`` gets later, after the line of their step."""

    def stats(self, name: str, incarnation: int, stats: RolloutStats) -> None:
        """Take the statistics that a rollouter sent."""
        self._generation.add(name, incarnation, stats, self._clock.wall())
        self._stats_came.set()

    @property
    def pending(self) -> int:
        """Number of lines that wait for the rollouters' reports or for room on the disk."""
        return self._steps.qsize() + self._records.waiting

    async def put(self, step: TrainedStep) -> None:
        """Queue the line of a step, which ``run`` writes; waits only if LINES_PENDING are queued."""
        await self._steps.put(step)

    async def emit(self, line: dict[str, Any]) -> None:
        """Write a line other than a step's at once; ``report`` gets it after the line of its step."""
        await self._write(lambda: self._records.metrics(line))
        if line["step"] > self._written:
            self._unreported.append(line)
        else:
            self._report_lines([line])

    async def quarantined(self, step: int, found: Sequence[Quarantined]) -> None:
        """Write prompts that will not be trained to quarantine.jsonl; ``step`` is the last trained step."""
        if found:
            await self._write(partial(self._records.quarantined, step, found))

    async def evaluated(self, name: str, step: int, version: int, groups: Sequence[Group]) -> None:
        """Write the rewards of a complete round; the arguments are those of ``RecordFiles.evaluated``."""
        await self._write(partial(self._records.evaluated, name, step, version, groups))

    async def samples(
        self,
        kind: SampleKind,
        name: str,
        step: int,
        version: int,
        groups: Sequence[Group],
        scores: Mapping[SequenceId, TokenScores] = NO_SCORES,
    ) -> None:
        """Write the first ``samples_per_step`` of these groups; the arguments are those of ``RecordFiles.samples``."""
        kept = groups[: self._samples_per_step]
        if kept:
            await self._write(partial(self._records.samples, step, version, kept, kind=kind, name=name, scores=scores))

    async def run(self) -> None:
        """Write the lines of queued steps until cancelled.

        A line waits up to STATS_WAIT_S for reports; without them it has no sampling metrics.
        """
        while True:
            step = await self._steps.get()
            complete = True
            try:
                async with asyncio.timeout(STATS_WAIT_S):
                    while not self._covered(step):
                        self._stats_came.clear()
                        await self._stats_came.wait()
            except TimeoutError:
                complete = False
                self._log.warning("statistics of a step are incomplete", step=step.line["step"])
            await self._write_step(step, complete=complete)
            self._written = step.line["step"]
            self._line_written.set()
            due = [line for line in self._unreported if line["step"] <= self._written]
            self._unreported = [line for line in self._unreported if line["step"] > self._written]
            self._report_lines(due)
            self._steps.task_done()

    async def retry(self) -> None:
        """Try again to write waiting lines, every RETRY_S, until cancelled."""
        while True:
            await asyncio.sleep(RETRY_S)
            if self._records.waiting:
                await self._write(self._records.retry)

    async def written(self, step: int) -> None:
        """Wait until the line of this step, which must be queued, is written. Then try again to write waiting lines."""
        while self._written < step:
            self._line_written.clear()
            await self._line_written.wait()
        if self._records.waiting:
            await self._write(self._records.retry)

    async def finish(self) -> None:
        """Wait until all queued lines are written, and write those of updates that ended after the last step.

        Lines that cannot be written within LAST_TRY_S are lost.
        """
        await self._steps.join()
        self._report_lines(await self._write_updates(self._generation.take_updates(), self._written))
        until = self._clock.now() + LAST_TRY_S
        while self._records.waiting and self._clock.now() < until:
            await asyncio.sleep(RETRY_S)
            await self._write(self._records.retry)
        if self._records.waiting:
            await self._write(self._records.give_up)

    async def _write_updates(self, updates: list[tuple[str, UpdateTimes]], step: int) -> list[dict[str, Any]]:
        """Write the lines of weight updates, (rollouter, times), under ``step``. Returns the lines."""
        lines = [update_line(*update) | {"step": step} for update in updates]
        await self._write(lambda: self._records.metrics(*lines))
        return lines

    def _report_lines(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            self._report(line | {"start": self._records.start})

    def _covered(self, step: TrainedStep) -> bool:
        """Whether all rollouters, except idle and silent ones, have reported on the whole training of this step."""
        return self._generation.covers(step.train_ended, now=self._clock.wall(), patience_s=STATS_WAIT_S)

    async def _write_step(self, step: TrainedStep, *, complete: bool) -> None:
        """Write and report the lines of a step and its updates. ``complete``: all reports on its training are here."""
        updates = self._generation.take_updates()
        # Taken even if it is not used, so that the next step does not count these tokens.
        sampling = self._take_sampling_metrics(step)
        line = step.line | (sampling if complete else {}) | update_metrics([times for _, times in updates])
        update_lines = await self._write_updates(updates, line["step"])
        await self._write(lambda: self._records.metrics(line))
        self._report_lines([line, *update_lines])
        await self.samples(TRAINED, "", line["step"], line["weights/version"], step.groups, step.token_scores)

    def _take_sampling_metrics(self, step: TrainedStep) -> dict[str, float]:
        """Tokens sampled since the last step, each counted once, and the overlap of sampling and training.

        Empty if unknown.
        """
        end, start = step.train_ended, self._counted_until
        if start is None:
            # The first step of this learner counts from the beginning of its wait for groups.
            start = step.train_began - step.line["time/wait_for_groups_s"]
        self._counted_until = end
        tokens = self._generation.take_tokens(start, end)
        if tokens is None or end <= start:
            return {}
        return {
            "rollout/tokens": tokens.sampled,
            "rollout/tokens_per_s": tokens.sampled / (end - start),
            "rollout/reprefill_tokens": tokens.reprefill,
            "perf/overlap": self._generation.overlap(step.train_began, end),
        }

    async def _write(self, write: Callable[[], None]) -> None:
        """Run ``write`` in a thread; report to ``notify`` if lines begin or cease to wait, or are lost."""
        # Only one write at a time: ``records.waiting`` also counts a line that another thread is writing, and such a
        # line does not wait for room on the disk.
        async with self._write_lock:
            await asyncio.to_thread(self._write_exclusively, write)
            records = self._records
            waits, lost = records.waiting > 0, records.lost
        if (waits, lost) == self._reported:
            return
        (_, lost_before), self._reported = self._reported, (waits, lost)
        lost_more = lost > lost_before
        self._counters["records/lost"] = lost
        if waits or lost_more:
            self._log.error("records are not written", waiting=records.waiting, lost=lost, error=str(records.error))
        self._notify(lost, records.error)

    def _write_exclusively(self, write: Callable[[], None]) -> None:
        """Run ``write`` in this thread while no other write runs, not even one whose task was cancelled."""
        # A write that fails truncates the file to its old length, and would cut off lines of another write.
        with self._thread_lock:
            write()
