"""Makes the versions of the weights: number, probe, copy, assembly, and on to the publisher and the broadcaster.

``make`` takes as long as it takes every rank to copy its own shards, and waits for no other actor. The copies are
assembled beside the training, one version after the other; the publisher brings a whole version to the parameter server
in a task of its own, and where versions are broadcast, the broadcaster sends sealed buckets while the rest is still
being gathered. A number is durable before anybody hears of it and is used up even if nothing comes of it.

Fails with OSError when a version cannot be begun, as on a full disk; another can be tried. One that could not be
assembled, as without memory, is told by ``on_failed`` and owed: ``spoiled`` until another one is made. Any error of
ours, DeadlineExceeded among them, leaves the ranks out of step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.exchange.probe_sequences import ProbeSequence
from asyncrl.learner.exchange.publication import Publication
from asyncrl.learner.publishing.broadcasting import Broadcaster, BucketQueue, collective_backend
from asyncrl.learner.publishing.publisher import Publisher
from asyncrl.learner.publishing.version_mark import VersionMark
from asyncrl.messages import Request
from asyncrl.telemetry.logging import Logger
from asyncrl.telemetry.trace import Track

if TYPE_CHECKING:
    from asyncrl.weights.collective.sender import Sender

T = TypeVar("T")


class Versions:
    """Versions of one run, on rank 0. ``thread`` is the backend's; ``call`` asks the parameter server; members of a
    broadcast find rank 0 at ``host``. ``on_spoiled`` is called when the newest version is lost, after ``on_failed``
    where it could not be assembled; ``on_whole`` when it was. In the timeline ``track`` is that of the learner's steps,
    and ``assemblies`` another.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        thread: ThreadPoolExecutor,
        mark: VersionMark,
        *,
        host: str,
        call: Callable[[Request], asyncio.Future[Any]],
        tasks: asyncio.TaskGroup,
        log: Logger,
        on_spoiled: Callable[[], None],
        on_failed: Callable[[OSError], None],
        on_whole: Callable[[], None],
        track: Track,
        assemblies: Track,
    ) -> None:
        self._track, self._assemblies = track, assemblies
        self._on_failed, self._on_whole = on_failed, on_whole
        self._config = config
        self._backend = backend
        self._thread = thread
        self._tasks = tasks
        self._mark = mark
        self._publisher = Publisher(call, log, on_spoiled)
        self._on_spoiled = on_spoiled
        self._assembling: asyncio.Task[None] | None = None
        self._failed = False
        """Whether nothing came of the newest version."""
        self.whole = -1
        """The newest version that was assembled."""
        self.metrics: dict[str, float] = {}
        """``weights/gather_s`` and ``weights/publish_bytes`` of that version; empty before the first."""
        collective = collective_backend(config, on_gpu=backend.on_gpu)
        timeout_s = config.weights.broadcast_timeout_s
        self._broadcaster: Broadcaster | None = None
        if collective is not None:

            def make_sender() -> Sender:
                # This import brings torch along, which a simulated learner does without.
                from asyncrl.weights.collective.sender import Sender

                return Sender(collective, host, timeout_s, config.network.ports)

            self._broadcaster = Broadcaster(collective, make_sender, timeout_s=timeout_s, call=call, log=log)

    @property
    def spoiled(self) -> bool:
        """Whether nobody can load the newest version, so that another is needed of the same weights."""
        return self._failed or self._publisher.spoiled

    @property
    def next_number(self) -> int:
        """Number of the version to come, unless it cannot be made."""
        return self._mark.version + 1

    async def settled(self) -> bool:
        """Wait until the newest version is assembled; whether it is there."""
        if self._assembling is not None:
            await asyncio.wait([self._assembling])
        return not self._failed

    async def start(self) -> None:
        """Begin to distribute the versions to come."""
        if self._broadcaster is not None:
            await self._broadcaster.start()
        self._tasks.create_task(self._publisher.run())

    async def make(self, probed: Sequence[ProbeSequence]) -> int:
        """Number of a new version of the weights, with their log-probs of ``probed``, once they are copied.

        Raises OSError when it cannot be begun.
        """
        try:
            return await self._make(probed)
        finally:
            self._track.leave()

    async def _make(self, probed: Sequence[ProbeSequence]) -> int:
        self._track.enter("publish")
        # On the one thread that an actor which ends waits for: no number is given behind its successor's back.
        version = await self._on_thread(self._mark.advance)
        probe = await self._on_thread(lambda: self._backend.probe(probed))
        # Its copy takes the place of the one before: an assembly slower than a step is waited for here.
        await self.settled()
        sending = None
        if self._broadcaster is not None:
            sending = self._broadcaster.begin(version, probe, self._tasks)
        self._track.enter(f"copy v{version}", version=version)
        on_sealed = None if sending is None else sending.put
        copying = asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self._backend.publish(version, probe, on_sealed)
        )
        try:
            assembly = await asyncio.shield(copying)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                # The thread goes on, and nobody else will close its result.
                copying.add_done_callback(_release_when_copied)
            _fail(sending, error)
            raise
        self._failed = False

        def ended(task: asyncio.Task[None]) -> None:
            # Also where it was cancelled before it began. The thread goes on, and nobody else closes its result.
            if task.cancelled():
                _fail(sending, asyncio.CancelledError())
                assembly.add_done_callback(_release)

        self._assembling = self._tasks.create_task(
            self._assemble(version, assembly, sending), name=f"assembly of version {version}"
        )
        self._assembling.add_done_callback(ended)
        return version

    async def _assemble(self, version: int, assembly: Future[Publication], sending: BucketQueue | None) -> None:
        self._assemblies.enter(f"gather v{version}", version=version)
        try:
            publication = await asyncio.wrap_future(assembly)
        except Exception as error:
            _fail(sending, error)
            if not isinstance(error, OSError) or isinstance(error, AsyncRLError):
                raise
            self._failed = True
            self._on_failed(error)
            self._on_spoiled()
            return
        finally:
            self._assemblies.leave()
        self.whole = version
        self.metrics = {"weights/gather_s": publication.gather_s, "weights/publish_bytes": publication.bytes}
        if self._broadcaster is not None:
            self._broadcaster.published(publication.manifest)
        self._publisher.offer(publication)
        self._on_whole()

    async def close(self) -> None:
        """Release the held publications. The tasks have ended."""
        if self._broadcaster is not None:
            await self._broadcaster.close()
        self._publisher.close()

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _fail(sending: BucketQueue | None, error: BaseException) -> None:
    if sending is not None:
        sending.fail(f"the learner could not assemble it: {str(error) or type(error).__name__}")


def _release_when_copied(copying: asyncio.Future[Future[Publication]]) -> None:
    if not copying.cancelled() and copying.exception() is None:
        copying.result().add_done_callback(_release)


def _release(assembly: Future[Publication]) -> None:
    if assembly.exception() is None:
        assembly.result().release()
