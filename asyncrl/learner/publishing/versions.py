"""Makes the versions of the weights: number, probe, announcement, gathering, and on to those who distribute them.

``make`` takes as long as gathering does and waits for no other actor: the publisher brings the version to the
parameter server in a task of its own, and where versions are broadcast, the broadcaster sends what is sealed while
the rest is still being gathered. A number is durable before anybody hears of it and is used up even if nothing comes
of it.

Fails with OSError when a version cannot be made, as on a full disk or without memory; another can be tried. Any error
of ours, DeadlineExceeded among them, leaves the ranks out of step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from structlog.typing import FilteringBoundLogger

from asyncrl.config import Config
from asyncrl.learner.backend import Backend
from asyncrl.learner.probe_sequences import ProbeSequence
from asyncrl.learner.publication import Publication
from asyncrl.learner.publishing.broadcasting import Broadcaster, BucketSender, Sending, collective_backend
from asyncrl.learner.publishing.publisher import Publisher
from asyncrl.learner.publishing.version_mark import VersionMark
from asyncrl.messages import Request
from asyncrl.messages.weights import Probe
from asyncrl.monitor.trace import Track

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MadeVersion:
    """A version of the weights as they were when it was made."""

    version: int
    metrics: dict[str, float]
    """``weights/gather_s`` and ``weights/publish_bytes``."""


class Versions:
    """Of one run, on rank 0. ``thread`` is the backend's; ``call`` asks the parameter server; members of a broadcast
    find rank 0 at ``host``. ``track`` is that of the learner's steps in the timeline."""

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
        log: FilteringBoundLogger,
        on_spoiled: Callable[[], None],
        track: Track,
    ) -> None:
        self._track = track
        self._config = config
        self._backend = backend
        self._thread = thread
        self._tasks = tasks
        self._mark = mark
        self._publisher = Publisher(call, log, on_spoiled)
        collective = collective_backend(config, on_gpu=backend.on_gpu)
        timeout_s = config.weights.broadcast_timeout_s
        self._broadcaster: Broadcaster | None = None
        if collective is not None:

            def make_sender() -> BucketSender:
                # Brings torch along, which a simulated learner does without.
                from asyncrl.weights.collective.sender import Sender

                return Sender(collective, host, timeout_s, config.network.ports)

            self._broadcaster = Broadcaster(collective, make_sender, timeout_s=timeout_s, call=call, log=log)

    @property
    def spoiled(self) -> bool:
        """Whether nobody can load the newest version, so that another is needed of the same weights."""
        return self._publisher.spoiled

    async def start(self) -> None:
        """Begin to distribute what will be made."""
        if self._broadcaster is not None:
            await self._broadcaster.start()
        self._tasks.create_task(self._publisher.run())

    async def make(self, probed: Sequence[ProbeSequence]) -> MadeVersion:
        """The next version, of the weights as they are, and what they make of ``probed``. Raises OSError."""
        try:
            return await self._make(probed)
        finally:
            self._track.leave()

    async def _make(self, probed: Sequence[ProbeSequence]) -> MadeVersion:
        self._track.enter("publish")
        # On the one thread that an actor which ends waits for: no number is given behind its successor's back.
        version = await self._on_thread(self._mark.advance)
        probe = await self._on_thread(lambda: self._backend.probe(probed))
        sending = None
        if self._broadcaster is not None:
            sending = self._broadcaster.begin(version, probe, self._tasks)
        self._track.enter(f"gather v{version}", version=version)
        try:
            publication = await self._gather(version, probe, sending)
        except BaseException as error:
            if sending is not None:
                sending.fail(f"the learner could not gather it: {str(error) or type(error).__name__}")
            raise
        metrics = {"weights/gather_s": publication.gather_s, "weights/publish_bytes": publication.bytes}
        if self._broadcaster is not None:
            self._broadcaster.published(publication.manifest)
        self._publisher.offer(publication)
        return MadeVersion(version, metrics)

    async def close(self) -> None:
        """Release what is held. The tasks have ended."""
        if self._broadcaster is not None:
            await self._broadcaster.close()
        self._publisher.close()

    async def _gather(self, version: int, probe: Probe | None, sending: Sending | None) -> Publication:
        on_sealed = None if sending is None else sending.put
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self._backend.publish(version, probe, on_sealed)
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread goes on, and nobody else will close what it has made.
            work.add_done_callback(_release)
            raise

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _release(work: asyncio.Future[Publication]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().release()
