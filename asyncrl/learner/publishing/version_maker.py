"""Makes the versions of the weights: number, probe, copy, assembly. Publishes them to the parameter server.

``make`` waits until the version before is assembled and every rank has copied its own shards, but for no other actor.
The copies are assembled during the training, one version after the other. Then the publisher gives the version to the
parameter server. If versions are broadcast, the broadcaster sends sealed buckets while the rest is still being
gathered. A number is durable before any other process hears of it, and is used up even if its version fails.

The publisher repeats the call for a version until the parameter server acknowledges it. Then it keeps a call waiting
there. If another parameter server takes over, that call returns, and the same version is published again from the same
segments. A version is spoiled if no engine can load it: it could not be assembled, or its bytes in memory have changed.
Then the weights need a new version. A version stays open while it is the newest, the last acknowledged one, or part of
a call; at most these three are held. A thread closes all others, since the kernel takes a tenth of a second to free a
gigabyte.

Fails with RemoteError when the parameter server refuses a version. OSError says that a version cannot be begun, for
example on a full disk; another can be tried. If a version cannot be assembled, for example without memory,
``on_failed`` gets the error. Any other error, DeadlineExceeded among them, leaves the ranks out of step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from asyncrl.config import Config
from asyncrl.core.errors import AsyncRLError, DeadlineExceeded, RemoteError
from asyncrl.learner.algorithm.probe_sequences import ProbeSequence
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.publishing.broadcaster import Broadcaster, BucketQueue, collective_backend
from asyncrl.learner.publishing.version_numbers import VersionNumbers
from asyncrl.messages import Request
from asyncrl.messages.weights import Publish, Published, WatchPublished
from asyncrl.observe.logging import Logger
from asyncrl.observe.trace import Track
from asyncrl.rpc.calls.retry import is_refusal, wait_out
from asyncrl.weights.held_version import HeldVersion

T = TypeVar("T")


class VersionMaker:
    """Makes the versions of one run, on rank 0. All methods of ``backend`` run on ``thread``.

    ``call`` calls the parameter server; members of a broadcast find rank 0 at ``host``. ``on_whole`` is called when a
    version is assembled, ``on_failed`` when it could not be. ``on_spoiled`` is called when the newest version is
    spoiled. In the timeline ``track`` holds the learner's steps, ``assemblies`` the assemblies.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        thread: ThreadPoolExecutor,
        numbers: VersionNumbers,
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
        self._numbers = numbers
        self._publisher = Publisher(call, log, on_spoiled)
        self._on_spoiled = on_spoiled
        self._assembling: asyncio.Task[None] | None = None
        """Task that assembles the newest version; it may have ended."""
        self._failed = False
        """Whether the newest version could not be assembled."""
        self.whole = -1
        """The newest version that was assembled; -1 before the first."""
        self.metrics: dict[str, float] = {}
        """``weights/gather_s`` and ``weights/publish_bytes`` of version ``whole``; empty before the first."""
        self._broadcaster = Broadcaster(
            collective_backend(config, on_gpu=backend.on_gpu), config, host, call=call, log=log
        )

    @property
    def spoiled(self) -> bool:
        """Whether no engine can load the newest version, so that the weights need a new one."""
        return self._failed or self._publisher.spoiled

    @property
    def next_number(self) -> int:
        """Number that the next version gets."""
        return self._numbers.version + 1

    async def settled(self) -> bool:
        """Wait for the assembly of the newest version. Returns False if it failed."""
        if self._assembling is not None:
            await asyncio.wait([self._assembling])
        return not self._failed

    async def handed_over(self) -> None:
        """Wait until the parameter server has acknowledged the newest version, or it is spoiled."""
        await self.settled()
        while not self.spoiled and self._publisher.acknowledged < self.whole:
            self._publisher.news.clear()
            await self._publisher.news.wait()

    async def start(self) -> None:
        """Begin to broadcast and publish versions."""
        await self._broadcaster.start()
        self._tasks.create_task(self._publisher.run())

    async def make(self, probed: Sequence[ProbeSequence]) -> int:
        """Copy the present weights for a new version, and return its number. A task assembles it.

        ``probed`` are the sequences of its probe. Raises OSError if the version cannot be begun.
        """
        self._track.enter("publish")
        try:
            # An ending actor waits for this thread, so no number is given after its successor has begun.
            version = await self._on_thread(self._numbers.advance)
            probe = await self._on_thread(lambda: self._backend.probe(probed))
            # The new copy overwrites the last one, so its assembly must have ended.
            await self.settled()
            queue = self._broadcaster.begin(version, probe, self._tasks)
            self._track.enter(f"copy v{version}", version=version)
            try:
                assembly = await self._on_thread(lambda: self._backend.publish(version, probe, queue.put))
            except Exception as error:
                queue.fail(_not_assembled(error))
                raise
        finally:
            self._track.leave()
        self._failed = False
        self._assembling = self._tasks.create_task(
            self._assemble(version, assembly, queue), name=f"assembly of version {version}"
        )
        return version

    async def _assemble(self, version: int, assembly: Future[HeldVersion], queue: BucketQueue) -> None:
        """Wait until a version is assembled and give it to the publisher.

        An OSError of the system is reported as a failed version. Any other error is raised: the ranks are out of step.
        """
        self._assemblies.enter(f"gather v{version}", version=version)
        try:
            held = await asyncio.wrap_future(assembly)
        except Exception as error:
            queue.fail(_not_assembled(error))
            if not isinstance(error, OSError) or isinstance(error, AsyncRLError):
                raise
            self._failed = True
            self._on_failed(error)
            self._on_spoiled()
            return
        finally:
            self._assemblies.leave()
        self.whole = version
        self.metrics = {"weights/gather_s": held.manifest.gather_s, "weights/publish_bytes": held.bytes}
        self._broadcaster.gathered(held.manifest)
        self._publisher.offer(held)
        self._on_whole()

    async def close(self) -> None:
        """End the broadcasts and close the held versions; call it after the tasks have ended."""
        # The actor has ``drain_s`` for closing everything.
        await self._broadcaster.close(self._config.supervision.drain_s / 4)
        self._publisher.close()

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _not_assembled(error: Exception) -> str:
    return f"the learner could not assemble it: {str(error) or type(error).__name__}"


class Publisher:
    """Publishes the newest version to the parameter server, which ``call`` calls.

    ``on_spoiled`` is called when the newest version is spoiled.
    """

    def __init__(
        self,
        call: Callable[[Request], asyncio.Future[Any]],
        log: Logger,
        on_spoiled: Callable[[], None],
    ) -> None:
        self._call = call
        self._on_spoiled = on_spoiled
        self.spoiled = False
        """Whether the bytes of the newest version changed in memory, so that the weights need a new version."""
        self._log = log
        self._release_thread = ThreadPoolExecutor(1, thread_name_prefix="release")
        self._newest: HeldVersion | None = None
        self._sending: HeldVersion | None = None
        self._acknowledged: HeldVersion | None = None
        self._offered = asyncio.Event()
        self.news = asyncio.Event()
        """Set when a version is acknowledged or spoiled."""

    @property
    def acknowledged(self) -> int:
        """The newest version that a parameter server has acknowledged; -1 before the first."""
        return -1 if self._acknowledged is None else self._acknowledged.version

    def offer(self, version: HeldVersion) -> None:
        """Make this the newest version, which ``run`` publishes next. An older one that was not sent is skipped."""
        replaced, self._newest = self._newest, version
        self.spoiled = False
        self._close_unused(replaced)
        self._offered.set()

    async def run(self) -> None:
        """Publish the newest version, then watch it until there is a newer one; repeat until cancelled."""
        while True:
            self._offered.clear()
            if self._newest is None:
                await self._offered.wait()
            elif self._newest is self._acknowledged:
                await self._watch_published(self._newest)
            else:
                await self._publish(self._newest)

    def close(self) -> None:
        """Close all versions; call it after ``run`` has ended."""
        held = self._newest, self._sending, self._acknowledged
        self._newest = self._sending = self._acknowledged = None
        self._close_unused(*held)
        self._release_thread.shutdown()

    async def _publish(self, version: HeldVersion) -> None:
        """Publish a version, which counts as acknowledged if the parameter server answers.

        The call continues when a newer version comes. Otherwise a fast learner would get no version through.
        """
        self._sending, acknowledged_before = version, self._acknowledged
        try:
            if await self._reply_of(self._call(Publish(manifest=version.manifest))) is not None:
                self._acknowledged = version
                self.news.set()
        finally:
            self._sending = None
            self._close_unused(version, acknowledged_before)

    async def _watch_published(self, version: HeldVersion) -> None:
        """Keep a call waiting until the parameter server no longer holds the version, or a newer one is offered.

        If the bytes are corrupt, the version is spoiled. If another parameter server answers, ``run`` publishes the
        version again. A waiting call has a time limit; then ``run`` calls this again.
        """
        call = self._call(WatchPublished(version=version.version))
        offered = asyncio.ensure_future(self._offered.wait())
        try:
            await asyncio.wait({call, offered}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return
            reply: Published | None = await self._reply_of(call)
            if reply is not None and reply.corrupt:
                # The parameter server shares these segments, so sending them again would not help.
                self._log.error("published weights are no longer what was sealed", version=self.acknowledged)
                self.spoiled = True
                self.news.set()
                self._on_spoiled()
                # Until there is a newer version, every further call would get the same reply.
                await offered
            elif reply is not None and not reply.held:
                self._log.info("published again: the parameter server is another one", version=self.acknowledged)
                lost, self._acknowledged = self._acknowledged, None
                self._close_unused(lost)
        finally:
            offered.cancel()
            if not call.done():
                call.cancel()

    async def _reply_of(self, call: asyncio.Future[Any]) -> Any:
        """Wait for the reply of a call. None, after a pause, if the parameter server is away."""
        try:
            return await call
        except (DeadlineExceeded, RemoteError) as error:
            if is_refusal(error):
                raise
            await wait_out(self._log, "parameter server", error)
            return None

    def _close_unused(self, *versions: HeldVersion | None) -> None:
        """Close those of ``versions`` that are neither newest, nor being sent, nor acknowledged last."""
        for version in {*versions} - {self._newest, self._sending, self._acknowledged}:
            if version is not None:
                self._release_thread.submit(version.close)
