"""Versions at the boundaries of the training: begun of the weights as they are, or owed.

A version that cannot be begun or assembled, as on a full disk, is told and owed: it is tried again, and the run ends
with the reason only when there is nothing left to train and nothing can be published for ``checkpoint.room_wait_s``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncrl.config import Config
from asyncrl.errors import ActorFailed, AsyncRLError
from asyncrl.learner.checkpoint.failed_writes import to_publish, version_failed, why_not_published
from asyncrl.learner.exchange.probe_sequences import ProbeSequence
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.publishing.versions import Versions
from asyncrl.runtime.services import ActorServices

OWED_RETRY_S = 5.0
"""Pause before a version that could not be published is tried again."""
UNPUBLISHED = "publish"
"""Key of the notice of versions that cannot be published."""


class Boundaries:
    """The newest version, and the one that is owed. ``published`` is told each number that is begun."""

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        versions: Versions,
        intake: Intake,
        *,
        published: Callable[[int], None],
    ) -> None:
        self.version = -1
        """The newest version."""
        self.trained_at_version = 0
        """Groups that were trained when it was begun."""
        self.unpublished = 0
        """Steps trained since the newest version."""
        self.probed: Sequence[ProbeSequence] = []
        """Sequences by which engines are held against the learner."""
        self._config, self._name = config, services.name
        self._states, self._counters, self._clock = services.states, services.counters, services.clock
        self._log, self._notify = services.log, services.notify
        self._versions, self._intake = versions, intake
        self._published = published
        self._reason = ""
        """Reason that the last attempt to publish failed."""
        self._error: OSError | None = None
        """Error of the last version that failed."""

    @property
    def owes(self) -> bool:
        """Whether a version of the present weights is to be made."""
        return self.unpublished >= self._config.learner.steps_per_version or self.spoiled

    @property
    def spoiled(self) -> bool:
        """Whether nobody can load the newest version."""
        return self._versions.spoiled

    @property
    def next_try(self) -> float:
        """Time at which an owed version is tried again."""
        return self._clock.now() + OWED_RETRY_S

    @property
    def patient_until(self) -> float:
        """Time until which no version need be published while there is nothing left to train."""
        return self._clock.now() + self._patience_s

    @property
    def _patience_s(self) -> float:
        # The key is that of the end of the run: here, too, a full disk is waited for, and trained steps are lost
        # without room. By a time of its own a run whose user grants it an hour at its end could be lost within minutes.
        return self._config.checkpoint.room_wait_s

    async def first(self) -> None:
        """Publish the weights at the start. Raises ActorFailed."""
        if not await self.publish() or not await self._versions.settled():
            raise ActorFailed(self._name, f"the weights at the start cannot be published: {self._reason}")

    async def publish(self) -> bool:
        """Begin a new version of the present weights, which then needs nobody here; False when it is owed."""
        self._states.enter("publishing")
        try:
            version = await self._versions.make(self.probed)
        except OSError as error:
            if isinstance(error, AsyncRLError):
                # The error is not of a full disk or memory: the ranks are out of step.
                raise
            self.failed(error)
            return False
        self.unpublished = 0
        self.version = version
        self.trained_at_version = self._intake.ledger.count("trained")
        # Harmless before the parameter server has it: the gate counts with what engines serve.
        self._intake.outcomes.published(version, self.trained_at_version)
        self._published(version)
        return True

    async def publish_owed(self, until: float) -> bool:
        """Try to make a version that is owed, to its end; raises ActorFailed when none is there after ``until``."""
        if await self.publish() and await self._versions.settled():
            return True
        if self._clock.now() >= until:
            error = self._error
            assert error is not None
            patience = f"{self._patience_s:g} s (checkpoint.room_wait_s)"
            reason = f"no version could be published for {patience}: {self._reason}"
            to_do, _ = to_publish(error, self._version_bytes)
            raise ActorFailed(self._name, f"{reason}; to do: {to_do}, and resume the run") from error
        return False

    async def insist(self, until: float) -> None:
        """Try to make a version that is owed, and pause where that failed. Raises ActorFailed after ``until``."""
        if not await self.publish_owed(until):
            await asyncio.sleep(OWED_RETRY_S)

    def failed(self, error: OSError) -> None:
        """Tell of a version that could not be begun or assembled."""
        self._reason, self._error = why_not_published(error), error
        self._counters.add("weights/not_published")
        self._log.error("no version published; training goes on as long as it can", error=str(error))
        newest = self._versions.whole
        if newest >= 0:
            told = version_failed(error, newest, self._version_bytes, self._patience_s)
            self._notify(UNPUBLISHED, told.text, meanwhile=told.meanwhile, waits_for=told.waits_for)

    def whole(self) -> None:
        """Tell that the newest version is assembled, where one before it failed."""
        if self._reason:
            self._reason = ""
            self._notify(UNPUBLISHED, f"versions are published again, from {self._versions.whole} on")

    @property
    def _version_bytes(self) -> float:
        """Size of the newest version that is whole; 0 before the first."""
        return self._versions.metrics.get("weights/publish_bytes", 0.0)
