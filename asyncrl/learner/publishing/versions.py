"""The versions of the weights: their numbers, when they are due, and the way of each to the publisher.

A version is due after each ``learner.steps_per_version`` steps. It gets a number, a probe and a copy of the shards. Its
assembly gathers the copies of all ranks into sealed segments. ``publish`` waits until the version before is assembled
and rank 0 has copied its own shards, but not for the parameter server or a replica. A task waits for the assembly
during the training, and gives the version to the publisher.

A number names one set of weights everywhere: in leases, cache salts, engine labels and segments. So it is durable
before any other process hears of it. No number is given twice, not even if the learner dies in between or starts again
in the same folder. A number is used up even if its version fails. The highest numbers are in a file, the mark. It may
get lost, come from a backup, or be damaged. So it is never trusted alone: other durable files hold version numbers too
(``find_used``), and new numbers are above all of them.

A version that cannot be begun or assembled, for example on a full disk, is reported and becomes overdue: it is tried
again. A version whose bytes have changed becomes overdue too. Training continues with the groups that the last version
admits. The run ends only when no group is left to train and no version could be published for
``checkpoint.room_wait_s``. The version at the start is tried once.

Fails with ActorFailed when no version can be published for too long. Any other error than an OSError of the system
leaves the ranks out of step, and is raised. Fails with ConfigError naming the mark if it exists and cannot be read.
A number whose mark cannot be written is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.config import Config
from asyncrl.core.disk import full_errno, in_bytes, in_words
from asyncrl.core.errors import ActorFailed, AsyncRLError, ConfigError
from asyncrl.core.files import replace_file
from asyncrl.core.threads import run_on
from asyncrl.learner.algorithm.probe_sequences import ProbeSequence
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.publishing.publisher import Publisher
from asyncrl.messages import Request
from asyncrl.observe.trace import Track
from asyncrl.rpc.services import ActorServices
from asyncrl.weights.held_version import HeldVersion

RETRY_S = 5.0
"""Pause before an overdue version is tried again (s)."""
RETRY_IN_TURN_S = 60.0
"""The same (s) during the wait for groups in time slices of a GPU (gpu/slices.py): a try takes the GPU from engines."""
NOTICE = "publish"
"""Key of the notice about versions that cannot be published."""
MARK_FILE = "version_mark.json"
"""Name of the mark in the run's folder: ``{"version": ..., "start": ...}``."""
TAIL_BYTES = 4 << 20
"""Bytes of metrics.jsonl that are read from its end, where the highest numbers are."""


class Versions:
    """Makes the versions of one run, on rank 0. All methods of ``backend`` run on ``thread``.

    ``call`` calls the parameter server; members of a broadcast find rank 0 at ``host``. The numbers of versions go to
    ``progress`` and to ``published``. In the timeline ``track`` holds the learner's steps, ``assemblies`` the
    assemblies.
    """

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        backend: Backend,
        thread: ThreadPoolExecutor,
        numbers: VersionNumbers,
        *,
        host: str,
        call: Callable[[Request], asyncio.Future[Any]],
        tasks: asyncio.TaskGroup,
        progress: TrainingProgress,
        intake: Intake,
        dataloader: DataloaderLink,
        published: Callable[[int], None],
        track: Track,
        assemblies: Track,
    ) -> None:
        self._config, self._name = config, services.name
        self._states, self._counters, self._clock = services.states, services.counters, services.clock
        self._log, self._notify = services.log, services.notify
        self._backend, self._thread, self._numbers, self._tasks = backend, thread, numbers, tasks
        self._progress, self._intake, self._dataloader = progress, intake, dataloader
        self._published = published
        self._track, self._assemblies = track, assemblies
        self.probed: Sequence[ProbeSequence] = []
        """Sequences that engines score to prove that they serve the learner's weights (probe_sequences.py)."""
        self._publisher = Publisher(config, host, call=call, log=services.log, on_spoiled=progress.news.announce)
        self._assembling: asyncio.Task[None] | None = None
        """Task that assembles the newest version; it may have ended."""
        self._failed = False
        """Whether the newest version could not be assembled."""
        self._failure: _Failure | None = None
        """Why the last attempt to publish failed; None after a success."""
        self.whole = -1
        """The newest version that was assembled; -1 before the first."""
        self.metrics: dict[str, float] = {}
        """``weights/gather_s`` and ``weights/publish_bytes`` of version ``whole``; empty before the first."""

    async def start(self) -> None:
        """Begin to broadcast and publish versions."""
        await self._publisher.start(on_gpu=self._backend.on_gpu)
        self._tasks.create_task(self._publisher.run())

    async def close(self) -> None:
        """End the broadcasts and close the held versions; call it after the tasks have ended."""
        # The actor has ``drain_s`` for closing everything; members get a quarter of it to receive the buckets.
        await self._publisher.close(self._config.supervision.drain_s / 4)

    # --- when ---

    @property
    def next_number(self) -> int:
        """Number that the next version gets."""
        return self._numbers.version + 1

    @property
    def spoiled(self) -> bool:
        """Whether no engine can load the newest version, so that a new version is needed."""
        return self._failed or self._publisher.spoiled

    @property
    def is_due(self) -> bool:
        """Whether enough steps were trained since the last version for a new one."""
        return self._progress.unpublished >= self._config.learner.steps_per_version

    @property
    def is_overdue(self) -> bool:
        """Whether the present weights must be published: a version is due, or no engine can load the newest one."""
        return self.is_due or self.spoiled

    @property
    def next_try(self) -> float:
        """Time (s) of the next attempt at an overdue version, if the wait for that begins now."""
        return self._clock.now() + (RETRY_IN_TURN_S if self._backend.engines_in_turn else RETRY_S)

    @property
    def give_up_at(self) -> float:
        """Time (s) at which a run that has nothing left to train gives up, if it begins to wait for a version now."""
        # The same key as for the last checkpoint: in both cases the run waits for room and may lose trained steps.
        return self._clock.now() + self._config.checkpoint.room_wait_s

    async def settled(self) -> bool:
        """Wait for the assembly of the newest version. Returns False if it failed."""
        if self._assembling is not None:
            await asyncio.wait([self._assembling])
        return not self._failed

    async def handed_over(self) -> None:
        """Wait until the parameter server holds the newest version or that version is spoiled.

        Returns after weights.deadline_s in any case.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.weights.deadline_s):
                await self.settled()
                while not self.spoiled and self._publisher.acknowledged < self.whole:
                    self._publisher.news.clear()
                    await self._publisher.news.wait()

    async def first(self) -> None:
        """Publish the weights at the start and wait until they are assembled. Raises ActorFailed."""
        if not await self.publish() or not await self.settled():
            assert self._failure is not None
            raise ActorFailed(self._name, f"the weights at the start cannot be published: {self._failure.reason}")

    async def retry(self, give_up_at: float) -> bool:
        """Publish an overdue version and wait until it is assembled. Returns whether that succeeded.

        Raises ActorFailed if it fails after the time ``give_up_at``.
        """
        succeeded = await self.publish() and await self.settled()
        if not succeeded and self._clock.now() >= give_up_at:
            failure = self._failure
            assert failure is not None
            within = f"{self._config.checkpoint.room_wait_s:g} s (checkpoint.room_wait_s)"
            reason = f"no version could be published for {within}: {failure.reason}"
            raise ActorFailed(self._name, f"{reason}; to do: {failure.to_do}, and resume the run")
        return succeeded

    async def insist(self, give_up_at: float) -> None:
        """Call ``retry`` once, with a pause after a failure."""
        if not await self.retry(give_up_at):
            await asyncio.sleep(RETRY_S)

    # --- how ---

    async def publish(self) -> bool:
        """Begin a version of the present weights; a task assembles it.

        If it cannot be begun, reports that and returns False: the version is overdue.
        """
        self._states.enter("publishing")
        try:
            version = await self._begin()
        except OSError as error:
            self._report(error)
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

    async def _begin(self) -> int:
        """Take a number, score the probe, copy the weights, and start the assembly's task. Returns the number."""
        self._track.enter("publish")
        try:
            # An ending actor waits for this thread, so no number is given after the actor's successor has begun.
            version = await run_on(self._thread, self._numbers.advance)
            probe = await run_on(self._thread, self._backend.probe, self.probed)
            # The new copy overwrites the last one, so its assembly must have ended.
            await self.settled()
            self._track.enter(f"copy v{version}", version=version)
            assembly = await run_on(self._thread, self._backend.publish, version, probe)
        finally:
            self._track.leave()
        self._failed = False
        self._assembling = self._tasks.create_task(
            self._assemble(version, assembly), name=f"assembly of version {version}"
        )
        return version

    async def _assemble(self, version: int, assembly: Future[HeldVersion]) -> None:
        """Wait until a version is assembled, and give it to the publisher."""
        self._assemblies.enter(f"gather v{version}", version=version)
        try:
            held = await asyncio.wrap_future(assembly)
        except OSError as error:
            self._report(error)
            self._failed = True
            self._progress.news.announce()
            return
        finally:
            self._assemblies.leave()
        self.whole = version
        self.metrics = {"weights/gather_s": held.manifest.gather_s, "weights/publish_bytes": held.bytes}
        await self._publisher.publish(held, self._tasks)
        if self._failure is not None:
            self._failure = None
            self._notify(NOTICE, f"versions are published again, from {version} on")

    def _report(self, error: OSError) -> None:
        """Report a version that was not begun or assembled.

        Without an assembled version there is no notice: the run ends with the reason (``first``).
        """
        # An error of this package, such as a rank's missed deadline, leaves the ranks out of step.
        if isinstance(error, AsyncRLError):
            raise error
        self._failure = failure = _describe(error, self.metrics.get("weights/publish_bytes", 0.0))
        self._counters.add("weights/not_published")
        self._log.error("no version published; training continues as long as it can", error=str(error))
        if self.whole >= 0:
            text = f"no version of the weights after {self.whole} could be published: {failure.reason}"
            meanwhile = (
                "Training continues with the groups that are admitted, and the version is tried again. The run ends "
                f"when these are used up and none could be published for {self._config.checkpoint.room_wait_s:g} s "
                f"(checkpoint.room_wait_s). To do: {failure.to_do}"
            )
            self._notify(NOTICE, text, meanwhile=meanwhile, waits_for=failure.waits_for)


class _Failure(NamedTuple):
    """Why no version was published, as texts for the user."""

    reason: str
    to_do: str = "mend what is named"
    waits_for: str = ""
    """Resource that the run waits for; may be empty."""


def _describe(error: OSError, version_bytes: float) -> _Failure:
    """Describe to the user why no version was published. An error without a file is one of shared memory."""
    if isinstance(error.filename, str):
        reason, folder = in_words(error, Path(error.filename)), Path(error.filename).parent
        if full_errno(error):
            # Only the number of a version is written to the disk.
            return _Failure(reason, f"free space in {folder}; a few KiB are enough for this", f"room on {folder}")
        return _Failure(reason)
    reason = f"shared memory for the weights: {error.strerror or error}"
    if full_errno(error) or error.errno == errno.ENOMEM:
        to_do = f"free memory on this host: a version takes {in_bytes(version_bytes)} of it"
        return _Failure(reason, to_do, "memory for the weights")
    return _Failure(reason)


# --- numbers ---


class UsedNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest numbers given so far; the content of the mark. The defaults are those before any start."""

    version: int = -1
    start: int = 0


class VersionNumbers:
    """Gives the numbers of one run. Its methods block while they read and write the mark."""

    def __init__(self, folder: Path, used: UsedNumbers | None = None) -> None:
        """``used`` are the highest numbers in other files of the run's folder; new numbers are above them."""
        self._path = folder / MARK_FILE
        used = used or UsedNumbers()
        mark, self.problem = self._read(is_new_run=used == UsedNumbers())
        """Problem with the mark, for the user; empty if it has none."""
        if not self.problem and (used.version > mark.version or used.start > mark.start):
            # The notice puts the file's name in front of the text.
            self.problem = f"is older than the run: it holds version {mark.version}"
        self.version = max(mark.version, used.version)
        """The highest number given so far; -1 before the first."""
        self.start = max(mark.start, used.start)
        """Number of the learner's starts in this folder."""

    def begin(self) -> int:
        """Count a start of the learner and return its number, from 1, which is durable now. Raises OSError."""
        self._write(UsedNumbers(self.version, self.start + 1))
        return self.start

    def advance(self) -> int:
        """Give the next version number, which is durable now. Raises OSError."""
        self._write(UsedNumbers(self.version + 1, self.start))
        return self.version

    def _write(self, mark: UsedNumbers) -> None:
        replace_file(self._path, msgspec.json.encode(mark))
        self.version, self.start = mark.version, mark.start

    def _read(self, *, is_new_run: bool) -> tuple[UsedNumbers, str]:
        """Read the mark, which only a new run may lack. Returns it, and its problem or "". Raises ConfigError."""
        try:
            mark = msgspec.json.decode(self._path.read_bytes(), type=UsedNumbers)
        except FileNotFoundError:
            return UsedNumbers(), "" if is_new_run else "is not there"
        except msgspec.DecodeError as error:
            return UsedNumbers(), f"is damaged: {error}"
        except OSError as error:
            reason = f"cannot be read, so that a number could be given twice: {error.strerror or error}"
            raise ConfigError([f"{self._path}: {reason}; make it readable, or restore it"]) from error
        if mark.version < -1 or mark.start < 0:
            return UsedNumbers(), f"is damaged: it holds version {mark.version}, start {mark.start}"
        return mark, ""


class _MetricsLine(msgspec.Struct, frozen=True):
    version: int | None = msgspec.field(default=None, name="weights/version")
    """A version that was published; None in a line without one."""
    start: int = 0


def find_used(run_dir: Path, checkpoints: Path) -> UsedNumbers:
    """Find the highest numbers in the names of checkpoints and in metrics.jsonl. Raises CheckpointError or OSError."""
    version, start = CheckpointFolder(checkpoints).highest_version(), 0
    for line in _last_lines(run_dir / "metrics.jsonl"):
        # Skip lines that cannot be read: the tail may begin inside a line, and a dead writer leaves the last one torn.
        with contextlib.suppress(msgspec.DecodeError):
            numbers = msgspec.json.decode(line, type=_MetricsLine)
            version, start = max(version, -1 if numbers.version is None else numbers.version), max(start, numbers.start)
    return UsedNumbers(version, start)


def _last_lines(path: Path) -> list[bytes]:
    """The lines in the last TAIL_BYTES of a file; the first may lack its beginning. Empty if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().splitlines()
    except FileNotFoundError:
        return []
