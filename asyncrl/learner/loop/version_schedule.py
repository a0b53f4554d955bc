"""When versions of the weights are published: after each ``learner.steps_per_version`` steps, and again after failures.

A version that cannot be begun or assembled, for example on a full disk, is reported and becomes overdue: it is tried
again. Training continues with the groups that the last version admits. The run ends only when no group is left to train
and no version could be published for ``checkpoint.room_wait_s``. The version at the start is tried once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.config import Config
from asyncrl.core.disk import full_errno, in_bytes, in_words
from asyncrl.core.errors import ActorFailed, AsyncRLError
from asyncrl.learner.algorithm.probe_sequences import ProbeSequence
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.publishing.version_maker import VersionMaker
from asyncrl.rpc.services import ActorServices

RETRY_S = 5.0
"""Pause before an overdue version is tried again."""
RETRY_IN_TURN_S = 60.0
"""The same in time slices of a GPU, since each try takes the GPU from the engines."""
NOTICE = "publish"
"""Key of the notice about versions that cannot be published."""


class VersionSchedule:
    """Decides when versions are published. Their numbers go to ``progress`` and to ``published``."""

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        progress: TrainingProgress,
        intake: Intake,
        dataloader: DataloaderLink,
        published: Callable[[int], None],
    ) -> None:
        self._versions: VersionMaker
        self.probed: Sequence[ProbeSequence] = []
        """Sequences that engines score to prove that they serve the learner's weights (probe_sequences.py)."""
        self._config, self._name = config, services.name
        self._states, self._counters, self._clock = services.states, services.counters, services.clock
        self._log, self._notify = services.log, services.notify
        self._progress = progress
        self._intake, self._dataloader, self._published = intake, dataloader, published
        self._reason = ""
        """Why the last attempt to publish failed; empty after a success."""
        self._error: OSError | None = None
        """Error of the last version that failed."""

    def use(self, versions: VersionMaker) -> None:
        """Set the maker of versions, which reports back to ``failed`` and ``assembled``."""
        self._versions = versions

    @property
    def is_due(self) -> bool:
        """Whether enough steps were trained since the last version for a new one."""
        return self._progress.unpublished >= self._config.learner.steps_per_version

    @property
    def is_overdue(self) -> bool:
        """Whether the present weights must be published: a version is due, or no engine can load the newest one."""
        return self.is_due or self._versions.spoiled

    @property
    def next_try(self) -> float:
        """Time (s) of the next attempt at an overdue version, if the wait for that begins now."""
        return self._clock.now() + (RETRY_IN_TURN_S if self._config.placement.share == "time_slice" else RETRY_S)

    async def handed_over(self) -> None:
        """Wait until the parameter server holds the newest version, or it is spoiled; weights.deadline_s at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.weights.deadline_s):
                await self._versions.handed_over()

    @property
    def give_up_at(self) -> float:
        """Time (s) at which a run that has nothing left to train gives up, if it begins to wait for a version now."""
        # The same key as for the last checkpoint: in both cases the run waits for room and may lose trained steps.
        return self._clock.now() + self._config.checkpoint.room_wait_s

    async def first(self) -> None:
        """Publish the weights at the start and wait until they are assembled. Raises ActorFailed."""
        if not await self.publish() or not await self._versions.settled():
            raise ActorFailed(self._name, f"the weights at the start cannot be published: {self._reason}")

    async def publish(self) -> bool:
        """Begin a version of the present weights. If that fails, report it and return False: the version is overdue.

        The version is assembled in a task of VersionMaker, which reports to ``assembled`` or ``failed``.
        """
        self._states.enter("publishing")
        try:
            version = await self._versions.make(self.probed)
        except OSError as error:
            if isinstance(error, AsyncRLError):
                # Not a full disk or memory: the ranks are out of step.
                raise
            self.failed(error)
            return False
        progress = self._progress
        progress.version, progress.unpublished = version, 0
        progress.trained_at_version = self._intake.ledger.count("trained")
        # The parameter server may not hold the version yet. That does no harm: the gate counts by the versions that
        # engines serve.
        self._intake.outcomes.published(version, progress.trained_at_version)
        self._published(version)
        self._dataloader.changed()
        return True

    async def retry(self, give_up_at: float) -> bool:
        """Publish an overdue version and wait until it is assembled. Returns whether that succeeded.

        Raises ActorFailed if it fails after the time ``give_up_at``.
        """
        if await self.publish() and await self._versions.settled():
            return True
        if self._clock.now() >= give_up_at:
            error = self._error
            assert error is not None
            within = f"{self._config.checkpoint.room_wait_s:g} s (checkpoint.room_wait_s)"
            reason = f"no version could be published for {within}: {self._reason}"
            to_do, _ = _advice(error, self._version_bytes)
            raise ActorFailed(self._name, f"{reason}; to do: {to_do}, and resume the run") from error
        return False

    async def insist(self, give_up_at: float) -> None:
        """Call ``retry`` once, with a pause after a failure."""
        if not await self.retry(give_up_at):
            await asyncio.sleep(RETRY_S)

    def failed(self, error: OSError) -> None:
        """Report a version that could not be begun or assembled: counter, log, notice to the user.

        Without an assembled version there is no notice: the run ends with the reason (``first``).
        """
        self._reason, self._error = why_not_published(error), error
        self._counters.add("weights/not_published")
        self._log.error("no version published; training continues as long as it can", error=str(error))
        if self._versions.whole >= 0:
            text = f"no version of the weights after {self._versions.whole} could be published: {self._reason}"
            to_do, waits_for = _advice(error, self._version_bytes)
            meanwhile = (
                "Training continues with the groups that are admitted, and the version is tried again. The run ends "
                f"when these are used up and none could be published for {self._config.checkpoint.room_wait_s:g} s "
                f"(checkpoint.room_wait_s). To do: {to_do}"
            )
            self._notify(NOTICE, text, meanwhile=meanwhile, waits_for=waits_for)

    def assembled(self) -> None:
        """Note that the newest version is assembled; notify the user if attempts before it failed."""
        if self._reason:
            self._reason = ""
            self._notify(NOTICE, f"versions are published again, from {self._versions.whole} on")

    @property
    def _version_bytes(self) -> float:
        """Size of the newest assembled version; 0 before the first."""
        return self._versions.metrics.get("weights/publish_bytes", 0.0)


def why_not_published(error: OSError) -> str:
    """Compose why a version could not be published: the file for a disk error, else shared memory."""
    if isinstance(error.filename, str):
        return in_words(error, Path(error.filename))
    return f"shared memory for the weights: {error.strerror or error}"


def _advice(error: OSError, version_bytes: float) -> tuple[str, str]:
    """Advice for the user about ``error``, and the resource that the run waits for, which may be empty.

    ``version_bytes`` is the memory that a version takes.
    """
    if isinstance(error.filename, str):
        if full_errno(error):
            # Only the number of a version is written to the disk.
            folder = Path(error.filename).parent
            return f"free space in {folder}; a few KiB are enough for this", f"room on {folder}"
    elif full_errno(error) or error.errno == errno.ENOMEM:
        return f"free memory on this host: a version takes {in_bytes(version_bytes)} of it", "memory for the weights"
    return "mend what is named", ""
