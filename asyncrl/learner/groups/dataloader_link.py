"""The learner's link to the dataloader: it sends the state of the run and outcomes of groups, and follows its status.

After a start of either side the learner first sends the state of the run (``Restored``). Then it reports outcomes in
order, numbered, and repeats each report until it is acknowledged. If the dataloader acknowledges less than was
reported, it gets the state of the run again. Outcomes in the ledger of that state are not reported a second time. The
dataloader, too, may request the state at any moment (RestoreNeeded). So either side may die at any moment.

A ``DataloaderStatus`` says whether more groups come for training, which prompts get no lease, and which evaluation
rounds are open.

Fails with ConfigError when the prompts or their order are not those of the ledger, unless ``resume.allow`` permits it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec.structs import replace

from asyncrl.checkpoint.contents import CheckpointState
from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError, DeadlineExceeded, RemoteError, RestoreNeeded, RunChanged
from asyncrl.learner.algorithm.probe_sequences import SEQUENCES
from asyncrl.learner.groups.evals import EvalCollector
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.messages import Request
from asyncrl.messages.dataloader import (
    DataloaderStatus,
    Outcome,
    Outcomes,
    OutcomesSeen,
    PromptSample,
    Restored,
    Resumed,
    SamplePrompts,
    WatchDataloader,
)
from asyncrl.rpc.calls.retry import AWAY_S, DEADLINE, backoff, log_and_pause, log_away
from asyncrl.rpc.services import ActorServices

if TYPE_CHECKING:
    from asyncrl.learner.groups.intake import Intake

DATALOADER = "dataloader/0"
MOST_PATIENCE = 64.0
"""Largest factor by which the deadline of Restored grows: the dataloader reads its data anew at each request."""


class OutcomeQueue:
    """Collects what the dataloader must know, and makes numbered reports of it.

    An unacknowledged outcome is either in the report that is being sent or pending for the next one. It is never in
    both, and only ``restart`` drops it.
    """

    def __init__(self) -> None:
        self._number = 0
        """Number of the newest report or state of the run."""
        self._next = Outcomes(number=1, version=-1, trained_at_version=0)
        """The next report, without its number."""
        self._has_news = False
        """Whether there is something to report."""

    def outcome(self, outcome: Outcome) -> None:
        """Add the outcome of a group."""
        self._next.outcomes.append(outcome)
        self._has_news = True

    def published(self, version: int, trained: int) -> None:
        """Add that ``version`` was published, after ``trained`` groups were trained in all."""
        self._add(version=version, trained_at_version=trained)

    def step_began(self, buffered_groups: int, *, waited: bool) -> None:
        """Add that a step has begun.

        ``buffered_groups`` are left in the buffer; ``waited`` says whether the step had to wait for groups.
        """
        # A report that covers two steps says ``waited`` if either step waited.
        self._add(buffered_groups=buffered_groups, waited=waited or self._next.waited, step_began=True)

    def finished(self) -> None:
        """Add that no more groups are leased for training."""
        self._add(finished=True)

    def restart(self) -> int:
        """Drop all pending news, because the dataloader gets the state of the run, whose ledger has the outcomes.

        Returns a number for that state, which grows with each call: the dataloader knows the later of two states by it.
        The next report has the number after it.
        """
        self._number += 1
        self._clear()
        return self._number

    def next_report(self) -> Outcomes | None:
        """Make the next report, which the caller repeats until it is acknowledged; None if there is nothing new."""
        if not self._has_news:
            return None
        self._number += 1
        report = replace(self._next, number=self._number)
        self._clear()
        return report

    def _add(self, **news: Any) -> None:
        self._next, self._has_news = replace(self._next, **news), True

    def _clear(self) -> None:
        """Begin the next report. It repeats ``version``, ``trained_at_version`` and ``finished``, which stay valid."""
        self._next = replace(self._next, outcomes=[], buffered_groups=0, waited=False, step_began=False)
        self._has_news = False


class DataloaderCall(Protocol):
    """Sends a request to the dataloader. ``patience`` multiplies the usual deadline of a call."""

    def __call__(self, request: Request, patience: float = 1.0) -> asyncio.Future[Any]: ...


class DataloaderLink:
    """The link to the dataloader; ``call`` sends it one request. Each new ``status`` is announced."""

    def __init__(
        self,
        call: DataloaderCall,
        learner: LearnerConfig,
        services: ActorServices,
        *,
        progress: TrainingProgress,
        intake: Intake,
        evals: EvalCollector,
        restored: CheckpointState | None = None,
    ) -> None:
        self.status = DataloaderStatus(number=-1, exhausted=False, outstanding=0)
        """The newest status; number -1 before the first and after a restore."""
        self.limit = 0.0
        """The working limit of the staleness gate, in versions, from the dataloader's last answer."""
        self.fingerprint = restored.fingerprint if restored is not None else ""
        """Fingerprint of the prompts of the ledger; empty until the dataloader has sent it."""
        self.seed = restored.seed if restored is not None else -1
        """Seed of the prompts' order; -1 until it is known."""
        self.prompts = restored.prompts if restored is not None else 0
        """Number of prompts; 0 until it is known."""
        self._call, self._learner, self._progress = call, learner, progress
        self._intake, self._evals = intake, evals
        self._awaits, self._log = services.awaits, services.log
        self._changed = asyncio.Event()
        """Wakes ``report``."""
        self._acknowledged = asyncio.Event()
        """Set when ``report`` has nothing left to report."""
        self._restoring = asyncio.Lock()
        """Held during a restore."""
        self._restores = 0
        """Number of times that the dataloader has restored the run."""

    def changed(self) -> None:
        """Wake ``report``: there is something to report."""
        self._changed.set()

    async def restore(self) -> None:
        """Send the dataloader the state of the run until it has restored it. Raises ConfigError if the prompts changed.

        Returns without a request if another task restores the dataloader meanwhile. After each missed deadline the next
        one is longer, since reading the data may take long.
        """
        restores_before, missed_deadlines = self._restores, 0
        async with self._restoring:
            if self._restores != restores_before:
                # Another task has restored this dataloader during the wait for the lock.
                return
            with self._awaits.on(DATALOADER, "Restored"):
                while True:
                    try:
                        resumed: Resumed = await self._call(
                            self._message(), backoff(1.0, missed_deadlines, MOST_PATIENCE)
                        )
                    except DeadlineExceeded as error:
                        log_away(self._log, "dataloader", error)
                        missed_deadlines += 1
                    except RemoteError as error:
                        if error.code == RunChanged.code:
                            raise ConfigError([error.message]) from error
                        # The dataloader is alive but reads large data, from the beginning at each request.
                        if error.code == DEADLINE:
                            missed_deadlines += 1
                        self._log.warning("dataloader cannot restore the run", error=str(error))
                        await asyncio.sleep(AWAY_S)
                    else:
                        break
            self.fingerprint, self.seed, self.limit = resumed.fingerprint, resumed.seed, resumed.limit
            self.prompts = resumed.prompts
            self._intake.ledger.begin(resumed.first_epoch)
            # A new dataloader numbers its statuses from 0. With -1, it answers the next WatchDataloader at once.
            self.status = DataloaderStatus(number=-1, exhausted=False, outstanding=0)
            self._restores += 1
            self._log.info("dataloader has restored the run", fingerprint=resumed.fingerprint, seed=resumed.seed)

    async def sample_prompts(self) -> list[np.ndarray]:
        """Get up to SEQUENCES prompts, int32 [P] each; waits until the dataloader has read its data."""
        with self._awaits.on(DATALOADER, "SamplePrompts"):
            while True:
                try:
                    sample: PromptSample = await self._call(SamplePrompts(count=SEQUENCES))
                except (DeadlineExceeded, RemoteError) as error:
                    await log_and_pause(self._log, "dataloader", error)
                else:
                    return sample.prompts

    def _message(self) -> Restored:
        """The state of the run. Pending outcomes are dropped, since the ledger has them."""
        intake, progress, learner = self._intake, self._progress, self._learner
        return Restored(
            version=progress.version,
            trained_at_version=progress.trained_at_version,
            # A run may be resumed with fewer steps than it has taken.
            groups_left=max(0, learner.steps - progress.step) * learner.groups_per_step,
            outcomes_number=intake.outcomes.restart(),
            ledger=intake.ledger.state,
            claims=intake.claims,
            fingerprint=self.fingerprint,
            seed=self.seed,
            prompts=self.prompts,
            rounds_closed=self._evals.closed,
            rounds_open=self._evals.open,
            finished=progress.finished,
        )

    async def report(self) -> None:
        """Report outcomes, each report until it is acknowledged, until cancelled. ``changed`` wakes it."""
        while True:
            # Wait for a restore under way: a report that is taken during it may hold outcomes that the ledger on its
            # way lacks, and the end of the restore would drop this report.
            async with self._restoring:
                report, restores_before = self._intake.outcomes.next_report(), self._restores
            if report is None:
                self._acknowledged.set()
                self._changed.clear()
                await self._changed.wait()
                continue
            with self._awaits.on(DATALOADER, "Outcomes"):
                # After a restore, this report is obsolete: the ledger that was sent has its outcomes.
                while self._restores == restores_before:
                    try:
                        seen: OutcomesSeen = await self._call(report)
                    except (DeadlineExceeded, RemoteError) as error:
                        await self._handle_failure(error)
                        continue
                    self.limit = seen.limit
                    if seen.number >= report.number:
                        break
                    # The dataloader lacks an earlier report and has not taken this one: the ledger has both.
                    self._log.warning("dataloader lacks outcomes", seen=seen.number, reported=report.number)
                    await self.restore()

    async def all_acknowledged(self) -> None:
        """Wait until all outcomes known now are reported and acknowledged."""
        self._acknowledged.clear()
        self._changed.set()
        await self._acknowledged.wait()

    async def watch(self) -> None:
        """Follow the dataloader's status until cancelled.

        Each status is kept and announced. Its evaluation rounds go to ``evals``. A prompt that gets no lease is
        rejected: by the intake if it is of training, else by ``evals``.
        """
        while True:
            try:
                with self._awaits.on(DATALOADER, "WatchDataloader", idle=True):
                    status: DataloaderStatus = await self._call(WatchDataloader(seen=self.status.number))
            except (DeadlineExceeded, RemoteError) as error:
                await self._handle_failure(error)
                continue
            self.status = status
            self._evals.opened(status.evals)
            for rejected in status.rejected:
                # Only uids of evaluations have the "@": NAME@ROUND-INDEX.
                if "@" in rejected.uid:
                    self._evals.reject(rejected.uid, rejected.reason)
                else:
                    self._intake.reject(rejected)
            self._intake.ledger.attempts = dict(status.attempts)
            self._intake.ledger.grown = list(status.grown)
            self._changed.set()
            self._progress.news.announce()

    async def rounds_over(self) -> bool:
        """Ask the dataloader whether all evaluation rounds are over. ``status`` may be older than the last outcome."""
        while True:
            try:
                # With -1 the dataloader answers at once.
                status: DataloaderStatus = await self._call(WatchDataloader(seen=-1))
            except (DeadlineExceeded, RemoteError) as error:
                await self._handle_failure(error)
            else:
                return not status.evals

    async def _handle_failure(self, error: DeadlineExceeded | RemoteError) -> None:
        """Send the state of the run if the dataloader needs it; after any other failure, log it and pause."""
        if isinstance(error, RemoteError) and error.code == RestoreNeeded.code:
            await self.restore()
            return
        await log_and_pause(self._log, "dataloader", error)
