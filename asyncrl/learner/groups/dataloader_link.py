"""The learner's side of its talk with the dataloader: the place of the run, outcomes of groups, prompts to come.

A dataloader that has started again, and the dataloader of a learner that has, is told first where the run stands
(``Restored``); then outcomes are reported in order, numbered and repeated until acknowledged. A dataloader that
acknowledges less than was reported is told again where the run stands. Outcomes that were told with the ledger are not
reported again. Both may be asked of the other side at any moment, so that either may die at any moment.

Fails with ConfigError when the prompts or their order are not those of the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from asyncrl.errors import ConfigError, DeadlineExceeded, RemoteError, RestoreNeeded, RunChanged
from asyncrl.learner.exchange.probe_sequences import SEQUENCES
from asyncrl.learner.groups.evals import EvalCollector
from asyncrl.learner.groups.intake import Intake
from asyncrl.messages import Request
from asyncrl.messages.dataloader import (
    OutcomesSeen,
    PromptSample,
    Restored,
    Resumed,
    SamplePrompts,
    Supply,
    WatchSupply,
)
from asyncrl.runtime.calls.retry import AWAY_S, DEADLINE, log_away, wait_out
from asyncrl.runtime.lifecycle.backoff import backoff
from asyncrl.runtime.services import ActorServices

DATALOADER = "dataloader/0"
MOST_PATIENCE = 64.0
"""Most deadlines of a call for which a dataloader may look through its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """State of the training, as far as the gate is concerned."""

    version: int
    trained_at_version: int
    groups_left: int
    finished: bool


class DataloaderCall(Protocol):
    """A call of the dataloader, whose deadline is ``patience`` times that of any call."""

    def __call__(self, request: Request, patience: float = 1.0) -> asyncio.Future[Any]: ...


class DataloaderLink:
    """The link to the dataloader. ``call`` asks it; ``news`` is told of everything that changes ``supply``."""

    def __init__(
        self,
        call: DataloaderCall,
        intake: Intake,
        evals: EvalCollector,
        services: ActorServices,
        *,
        stand: Callable[[], Stand],
        news: Callable[[], None],
    ) -> None:
        self.supply = Supply(number=-1, exhausted=False, outstanding=0)
        """Supply of prompts, as last heard."""
        self.limit = 0.0
        """The working limit, in versions, as last heard."""
        self.fingerprint = ""
        """Fingerprint of the prompts that the ledger speaks of; empty until the dataloader has named it."""
        self.seed = -1
        """Seed of the prompts' order."""
        self.prompts = 0
        """Number of the prompts."""
        self._call = call
        self._intake = intake
        self._evals = evals
        self._stand = stand
        self._news = news
        self._awaits, self._log = services.awaits, services.log
        self._changed = asyncio.Event()
        self._acknowledged = asyncio.Event()
        self._restoring = asyncio.Lock()
        self._restored = 0
        """Times that the dataloader has been told where the run stands."""

    def changed(self) -> None:
        """Note that there is something to report."""
        self._changed.set()

    async def restore(self) -> None:
        """Tell the dataloader the state of the run, until it goes on from there. Raises ConfigError."""
        seen, late = self._restored, 0
        async with self._restoring:
            if self._restored != seen:
                # The other loop has met the same new dataloader.
                return
            with self._awaits.on(DATALOADER, "Restored"):
                while True:
                    try:
                        resumed: Resumed = await self._call(self._message(), backoff(1.0, late, MOST_PATIENCE))
                    except DeadlineExceeded as error:
                        log_away(self._log, "dataloader", error)
                        late += 1
                    except RemoteError as error:
                        if error.code == RunChanged.code:
                            raise ConfigError([error.message]) from error
                        # It is there, and its data are large: it begins anew each time that it is told.
                        late += error.code == DEADLINE
                        self._log.warning("dataloader cannot go on", error=str(error))
                        await asyncio.sleep(AWAY_S)
                    else:
                        break
            self.fingerprint, self.seed, self.limit = resumed.fingerprint, resumed.seed, resumed.limit
            self.prompts = resumed.prompts
            self._intake.ledger.first_epoch = resumed.first_epoch
            # A new dataloader counts its words anew: the next question is to be answered at once.
            self.supply = Supply(number=-1, exhausted=False, outstanding=0)
            self._restored += 1
            self._log.info("dataloader goes on", fingerprint=resumed.fingerprint, seed=resumed.seed)

    async def sample_prompts(self) -> list[np.ndarray]:
        """A few prompts, int32 [P] each, once the dataloader has read its data."""
        with self._awaits.on(DATALOADER, "SamplePrompts"):
            while True:
                try:
                    sample: PromptSample = await self._call(SamplePrompts(count=SEQUENCES))
                except (DeadlineExceeded, RemoteError) as error:
                    await wait_out(self._log, "dataloader", error)
                else:
                    return sample.prompts

    def _message(self) -> Restored:
        intake, stand = self._intake, self._stand()
        return Restored(
            version=stand.version,
            trained_at_version=stand.trained_at_version,
            groups_left=stand.groups_left,
            outcomes_number=intake.outcomes.restart(),
            ledger=intake.ledger.state,
            claims=intake.claims,
            fingerprint=self.fingerprint,
            seed=self.seed,
            prompts=self.prompts,
            rounds_closed=self._evals.closed,
            rounds_open=self._evals.open,
            finished=stand.finished,
        )

    async def report(self) -> None:
        """Report outcomes until cancelled."""
        while True:
            # A restore drops the report that it meets: none is taken while one is under way, whose word may know less.
            async with self._restoring:
                report, restored = self._intake.outcomes.next_report(), self._restored
            if report is None:
                self._acknowledged.set()
                self._changed.clear()
                await self._changed.wait()
                continue
            with self._awaits.on(DATALOADER, "Outcomes"):
                # A restore meanwhile has told these outcomes with the ledger.
                while self._restored == restored:
                    try:
                        seen: OutcomesSeen = await self._call(report)
                    except (DeadlineExceeded, RemoteError) as error:
                        await self._after(error)
                        continue
                    self.limit = seen.limit
                    if seen.number >= report.number:
                        break
                    # The dataloader lacks an earlier report, and has not taken this one in: the ledger has both.
                    self._log.warning("dataloader lacks outcomes", seen=seen.number, reported=report.number)
                    await self.restore()

    async def all_acknowledged(self) -> None:
        """Wait until everything that is to be reported just now has been acknowledged."""
        self._acknowledged.clear()
        self._changed.set()
        await self._acknowledged.wait()

    async def watch(self) -> None:
        """Follow the supply until cancelled: eval rounds, prompts that are never leased, the end of the data."""
        while True:
            try:
                with self._awaits.on(DATALOADER, "WatchSupply", idle=True):
                    supply: Supply = await self._call(WatchSupply(seen=self.supply.number))
            except (DeadlineExceeded, RemoteError) as error:
                await self._after(error)
                continue
            self.supply = supply
            self._evals.opened(supply.evals)
            for rejected in supply.rejected:
                if "@" in rejected.uid:
                    self._evals.reject(rejected.uid, rejected.reason)
                else:
                    self._intake.reject(rejected)
            self._intake.ledger.attempts = dict(supply.attempts)
            self._changed.set()
            self._news()

    async def rounds_over(self) -> bool:
        """Whether no round is open; asked afresh, since an answer from before the last outcome does not count."""
        while True:
            try:
                supply: Supply = await self._call(WatchSupply(seen=-1))
            except (DeadlineExceeded, RemoteError) as error:
                await self._after(error)
            else:
                return not supply.evals

    async def _after(self, error: DeadlineExceeded | RemoteError) -> None:
        if isinstance(error, RemoteError) and error.code == RestoreNeeded.code:
            await self.restore()
            return
        await wait_out(self._log, "dataloader", error)
