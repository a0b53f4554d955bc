"""Broadcasts new versions to the engines during the training, bucket by bucket as they are sealed.

A bucket is a sealed segment of shared memory with some of the weights. A version is announced to the parameter server
when its first bucket is sealed; engines generate until then. When every member of the broadcast group has paused, a
thread sends the sealed buckets and then the rest. So one bucket is gathered while the one before is sent. The thread
that assembles the version hands its buckets over and waits for nothing.

Invariants: one version at a time is announced or sent; a version that comes meanwhile goes by shm or stream. This
module duplicates each descriptor and keeps the duplicate open until the send is over. A send that fails is logged and
reported to the parameter server; the version then goes by shm or stream. A send stops when the parameter server says
that the broadcast is broken.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config import Config
from asyncrl.core.errors import AsyncRLError, BroadcastFailed, DeadlineExceeded, RemoteError
from asyncrl.messages import Request
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    BroadcastGroup,
    BroadcastState,
    Bucket,
    BucketLayout,
    CollectiveBackend,
    Manifest,
    Probe,
    WatchBroadcast,
)
from asyncrl.observe.logging import Logger
from asyncrl.rpc.calls.retry import is_refusal, wait_out

if TYPE_CHECKING:
    from asyncrl.weights.broadcast import Sender


def collective_backend(config: Config, *, on_gpu: bool) -> CollectiveBackend | None:
    """Backend of broadcasts; None for no broadcasts. ``on_gpu``: the learner's weights are on GPUs.

    Transport "auto" broadcasts only whole weights, and only if both learner and engines are on GPUs.
    """
    transport = config.weights.transport
    if transport in ("nccl", "gloo"):
        return transport
    if config.publishes_adapter:
        return None
    return "nccl" if transport == "auto" and on_gpu and config.rollout.on_gpu else None


class BucketQueue:
    """The buckets of one version: the assembling thread puts them, the sending thread reads them."""

    def __init__(self, version: int, layouts: list[BucketLayout], timeout_s: float) -> None:
        self.version, self.layouts = version, layouts
        self._timeout_s = timeout_s
        self._sealed: list[tuple[Bucket, int]] = []
        """The buckets so far, each with this queue's own descriptor of its segment."""
        self._is_complete = False
        """Whether the version is complete and will be published."""
        self._changed = threading.Condition()
        """Announces each change of the queue to the sending thread, and guards its fields."""
        self.problem = ""
        """Why no further bucket may be sent; empty if there is no reason."""
        self._loop = asyncio.get_running_loop()
        self._begun_or_failed = asyncio.Event()
        """Set when the first bucket is put or the queue fails; ends ``begun``."""

    async def begun(self) -> bool:
        """Wait until the first bucket is put. Returns False if the queue fails or none comes in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._begun_or_failed.wait()
        except TimeoutError:
            self.fail(f"the learner waited {self._timeout_s:g} s for its own bucket 0")
        return not self.problem

    def put(self, bucket: Bucket, descriptor: int) -> None:
        """Add the next sealed bucket. Returns at once.

        A bucket that is not as announced, or whose descriptor cannot be copied, fails only the broadcast. After a
        failure buckets are ignored.
        """
        with self._changed:
            if self.problem:
                return
            index = len(self._sealed)
            # The slice is empty if more buckets come than were announced.
            if BucketLayout(size=bucket.size, tensors=bucket.tensors) not in self.layouts[index : index + 1]:
                self.fail(f"bucket {index} is not what was announced")
                return
            try:
                own = os.dup(descriptor)
            except OSError as error:
                self.fail(f"bucket {index}: {error}")
                return
            self._sealed.append((bucket, own))
            self._changed.notify_all()
            if not index:
                self._loop.call_soon_threadsafe(self._begun_or_failed.set)

    def gathered(self) -> None:
        """Note that the version is complete and will be published, so that the last bucket may be sent."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """From any thread: end the queue for this reason; ``buckets`` raises it."""
        with self._changed:
            if not self.problem:
                self.problem = reason
                self._changed.notify_all()
                self._loop.call_soon_threadsafe(self._begun_or_failed.set)

    def buckets(self) -> Iterator[tuple[Bucket, int]]:
        """Yield the buckets in order, each as soon as it is put. Raises BroadcastFailed, also if one is late.

        The last bucket waits until the version is complete: no engine may serve a version that is never published.
        """
        for index in range(len(self.layouts)):
            self._wait(lambda: index < len(self._sealed), f"waited {{}} for its own bucket {index}")  # noqa: B023
            if index == len(self.layouts) - 1:
                self._wait(lambda: self._is_complete, "did not end gathering within {}")
            yield self._sealed[index]

    def _wait(self, condition: Callable[[], bool], problem: str) -> None:
        """Wait for a condition. At the timeout, fail with ``problem``, in which ``{}`` stands for the seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.problem or condition(), self._timeout_s):
                self.fail("the learner " + problem.format(f"{self._timeout_s:g} s"))
            if self.problem:
                raise BroadcastFailed(self.version, self.problem)

    def close(self) -> None:
        """Close the descriptors; nothing may be sent any more."""
        with self._changed:
            self.problem = self.problem or "it is over"
            while self._sealed:
                _, descriptor = self._sealed.pop()
                os.close(descriptor)


def make_sender(backend: CollectiveBackend, config: Config, host: str) -> Sender:
    """Make the sender, bound to ``host``. Raises the errors of Sender."""
    # This import loads torch, which a simulated learner does not need.
    from asyncrl.weights.broadcast import Sender

    return Sender(backend, host, config.weights.broadcast_timeout_s, config.network.ports)


class Broadcaster:
    """Runs the broadcasts of a learner, over ``backend``.

    ``call`` calls the parameter server. Members of a broadcast find rank 0 at ``host``.
    """

    def __init__(
        self,
        backend: CollectiveBackend,
        config: Config,
        host: str,
        *,
        call: Callable[[Request], asyncio.Future[Any]],
        log: Logger,
    ) -> None:
        self._backend, self._config, self._host = backend, config, host
        self._call, self._log = call, log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        self._sender: Sender | None = None
        """Sends the buckets; None before ``start``."""
        self._layouts: list[BucketLayout] = []
        """Layout of the buckets of the last gathered version; empty before."""
        self._queue: BucketQueue | None = None
        """Buckets of the version that is announced or sent, or None."""

    async def start(self) -> None:
        """Bind the store at which members meet. Raises the errors of Sender."""
        self._sender = await self._on_thread(lambda: make_sender(self._backend, self._config, self._host))

    def gathered(self, manifest: Manifest) -> None:
        """Note that a version is gathered, so its last bucket may be sent. The next version has the same layout."""
        self._layouts = [BucketLayout(size=bucket.size, tensors=bucket.tensors) for bucket in manifest.buckets]
        if self._queue is not None and self._queue.version == manifest.version:
            self._queue.gathered()

    def begin(self, version: int, probe: Probe | None, tasks: asyncio.TaskGroup) -> BucketQueue | None:
        """Return a queue for a version's buckets, and start the task that announces and sends them.

        None if the version is not broadcast. Before ``start`` there is no sender, and before the first gathered
        version no layout. Only one version at a time is announced or sent.
        """
        sender = self._sender
        if self._queue is not None:
            self._log.info("not broadcast: another version is", version=version, other=self._queue.version)
        if sender is None or not self._layouts or self._queue is not None:
            return None
        announcement = AnnounceBroadcast(
            version=version,
            backend=self._backend,
            host=sender.host,
            port=sender.port,
            token=sender.token,
            buckets=self._layouts,
            probe=probe,
        )
        self._queue = queue = BucketQueue(version, self._layouts, self._config.weights.broadcast_timeout_s)
        tasks.create_task(self._broadcast(queue, sender, announcement), name=f"broadcast of version {version}")
        return queue

    async def close(self, within_s: float) -> None:
        """End the broadcasts, after the tasks of ``begin`` have ended.

        If all buckets are sent, the members have ``within_s`` to receive them. Otherwise the send stops.
        """
        if self._sender is not None:
            # On the sending thread, so it runs after a send that is under way.
            closing = asyncio.ensure_future(self._on_thread(self._sender.close))
            if self._queue is not None:
                self._queue.fail("the learner ends")
                if self._sender.all_sent:
                    await asyncio.wait([closing], timeout=within_s)
                if not closing.done():
                    self._sender.abort("the learner ends")
            await closing
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._queue is not None:
            self._queue.close()

    async def _broadcast(self, queue: BucketQueue, sender: Sender, announcement: AnnounceBroadcast) -> None:
        """Announce the version once its first bucket is here, then send to the group, watched by ``_watch``.

        If the first bucket is late, or the parameter server refuses or calls the broadcast off, nothing is sent. A
        failed send is reported to the parameter server.
        """
        announced = await self._call_until_decided(announcement) if await queue.begun() else None
        if announced is not None and (group := announced.group) is not None:
            watch = WatchBroadcast(version=queue.version, epoch=group.epoch)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(queue, sender, watch))
                error = await self._send(queue, sender, group)
                watching.cancel()
            if error:
                await self._call_until_decided(msgspec.structs.replace(watch, error=error))
        # On a thread: if these descriptors are the last of a version, the kernel takes long to get the memory back.
        await self._on_thread(queue.close)
        self._queue = None

    async def _send(self, queue: BucketQueue, sender: Sender, group: BroadcastGroup) -> str:
        """Send the buckets to the group on the thread. Returns why it failed, or an empty text."""
        try:
            await self._on_thread(lambda: sender.send(group, queue.version, queue.buckets()))
        except (AsyncRLError, OSError, RuntimeError) as problem:
            error = str(problem) or type(problem).__name__
            self._log.warning("broadcast failed", version=queue.version, epoch=group.epoch, error=error)
            return error
        self._log.info("broadcast sent", version=queue.version, epoch=group.epoch)
        return ""

    async def _watch(self, queue: BucketQueue, sender: Sender, watch: WatchBroadcast) -> None:
        """Stop the send when the parameter server reports that the broadcast is broken."""
        state = await self._call_until_decided(watch)
        if state is not None and state.error:
            queue.fail(state.error)
            sender.abort(state.error)

    async def _call_until_decided(self, request: AnnounceBroadcast | WatchBroadcast) -> BroadcastState | None:
        """Repeat a request until its answer is decided, however late; None when the parameter server refuses."""
        while True:
            try:
                state: BroadcastState = await self._call(request)
            except (DeadlineExceeded, RemoteError) as error:
                what = type(request).__name__
                if is_refusal(error):
                    self._log.error("broadcast is refused", request=what, error=str(error))
                    return None
                await wait_out(self._log, "parameter server", error, request=what)
            else:
                if state.decided:
                    return state

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
