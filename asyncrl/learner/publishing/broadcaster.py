"""Broadcasts new versions to the engines during the training, bucket by bucket as they are sealed.

A version is announced to the parameter server when its first bucket is sealed; engines generate until then. When every
member of the group is paused, a thread sends the sealed buckets and then the rest. So one bucket is gathered while the
one before is sent. The training thread hands its buckets over and waits for nothing.

Invariants: one version at a time is announced or sent, and one that comes meanwhile goes by shm or stream. A descriptor
is this module's own and stays open until the send is over. A send that fails is reported to the parameter server. A
send stops when the parameter server says that the broadcast is broken. A broadcast that fails is logged; the version
then goes by shm or stream.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

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
    FailBroadcast,
    Manifest,
    Probe,
    WatchBroadcast,
)
from asyncrl.observe.logging import Logger
from asyncrl.rpc.calls.retry import is_refusal, wait_out

if TYPE_CHECKING:
    from asyncrl.weights.broadcast import Sender


def collective_backend(config: Config, *, on_gpu: bool) -> CollectiveBackend | None:
    """Backend of broadcasts, or None; ``on_gpu`` says whether the learner's weights are on GPUs."""
    transport = config.weights.transport
    if transport in ("nccl", "gloo"):
        return transport
    if config.publishes_adapter:
        return None
    return "nccl" if transport == "auto" and on_gpu and config.rollout.on_gpu else None


class BucketQueue:
    """The buckets of one version: put on the thread that assembles, read on the thread that sends."""

    def __init__(self, version: int, layouts: list[BucketLayout], timeout_s: float) -> None:
        self.version, self.layouts = version, layouts
        self._timeout_s = timeout_s
        self._sealed: list[tuple[Bucket, int]] = []
        """Buckets, each with a descriptor of its segment."""
        self._gathered = False
        self._changed = threading.Condition()
        self.problem = ""
        """Reason that the version cannot be sent whole, or not any more."""
        self._loop = asyncio.get_running_loop()
        self._begun = asyncio.Event()

    async def begun(self) -> bool:
        """Wait until the first bucket is there; False if none comes."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._begun.wait()
        except TimeoutError:
            self.fail(f"the learner waited {self._timeout_s:g} s for its own bucket 0")
        return not self.problem

    def put(self, bucket: Bucket, descriptor: int) -> None:
        """Take the next sealed bucket. Returns at once; an error with it fails the broadcast alone."""
        with self._changed:
            if self.problem:
                return
            index = len(self._sealed)
            # The slice is empty for a bucket more than were announced.
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
                self._loop.call_soon_threadsafe(self._begun.set)

    def gathered(self) -> None:
        """Note that the version is whole and will be published: its last bucket may go."""
        with self._changed:
            self._gathered = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Note, from any thread, that no further bucket comes."""
        with self._changed:
            if not self.problem:
                self.problem = reason
                self._changed.notify_all()
                self._loop.call_soon_threadsafe(self._begun.set)

    def buckets(self) -> Iterator[tuple[Bucket, int]]:
        """Buckets in order, each as soon as it is there. Raises BroadcastFailed when one does not come.

        The last one is held back until all is gathered, because no engine may serve a version that is never published.
        """
        for index in range(len(self.layouts)):
            self._wait(lambda: index < len(self._sealed), f"waited {{}} for its own bucket {index}")  # noqa: B023
            if index == len(self.layouts) - 1:
                self._wait(lambda: self._gathered, "did not end gathering within {}")
            yield self._sealed[index]

    def _wait(self, condition: Callable[[], bool], problem: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.problem or condition(), self._timeout_s):
                self.fail("the learner " + problem.format(f"{self._timeout_s:g} s"))
            if self.problem:
                raise BroadcastFailed(self.version, self.problem)

    def close(self) -> None:
        """Close the descriptors; nothing is sent any more."""
        with self._changed:
            self.problem = self.problem or "it is over"
            while self._sealed:
                os.close(self._sealed.pop()[1])


def make_sender(backend: CollectiveBackend, config: Config, host: str) -> Sender:
    """The sender, bound to ``host``. Raises its errors."""
    # This import loads torch, which a simulated learner does not need.
    from asyncrl.weights.broadcast import Sender

    return Sender(backend, host, config.weights.broadcast_timeout_s, config.network.ports)


class Broadcaster:
    """The broadcasts, none without a ``backend``. ``call`` calls the parameter server; members find rank 0 at
    ``host``."""

    def __init__(
        self,
        backend: CollectiveBackend | None,
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
        self._layouts: list[BucketLayout] = []
        self._queue: BucketQueue | None = None
        """The version that is announced or sent."""

    async def start(self) -> None:
        """Bind the store at which members meet. Raises the sender's errors."""
        if (backend := self._backend) is not None:
            self._sender = await self._on_thread(lambda: make_sender(backend, self._config, self._host))

    def gathered(self, manifest: Manifest) -> None:
        """Note that a version was gathered; the next one has the same layout."""
        self._layouts = [BucketLayout(size=bucket.size, tensors=bucket.tensors) for bucket in manifest.buckets]
        if self._queue is not None and self._queue.version == manifest.version:
            self._queue.gathered()

    def begin(self, version: int, probe: Probe | None, tasks: asyncio.TaskGroup) -> BucketQueue:
        """Announce a version once its first bucket is put into the result, and send its buckets.

        The result is closed if it is not broadcast: it is the first, or an earlier one is still being sent.
        """
        queue = BucketQueue(version, self._layouts, self._config.weights.broadcast_timeout_s)
        sender = self._sender
        if self._queue is not None:
            self._log.info("not broadcast: another version is", version=version, other=self._queue.version)
        if self._backend is None or sender is None or not self._layouts or self._queue is not None:
            queue.close()
            return queue
        announcement = AnnounceBroadcast(
            version=version,
            backend=self._backend,
            host=sender.host,
            port=sender.port,
            token=sender.token,
            buckets=self._layouts,
            probe=probe,
        )
        self._queue = queue
        tasks.create_task(self._broadcast(queue, sender, announcement), name=f"broadcast of version {version}")
        return queue

    async def close(self, within_s: float) -> None:
        """End. The tasks that ``begin`` made have ended.

        A send under way is stopped. If all is sent, the members first have ``within_s`` to receive it.
        """
        if self._sender is not None:
            # Behind a send under way.
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
        announced = await self._state(announcement) if await queue.begun() else None
        if announced is not None and (group := announced.group) is not None:
            watch = WatchBroadcast(version=queue.version, epoch=group.epoch)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(queue, sender, watch))
                error = await self._send(queue, sender, group)
                watching.cancel()
            if error:
                await self._state(FailBroadcast(version=queue.version, epoch=group.epoch, error=error))
        # Its descriptors may be the last of a version, and the kernel takes its time to get the memory back.
        await self._on_thread(queue.close)
        self._queue = None

    async def _send(self, queue: BucketQueue, sender: Sender, group: BroadcastGroup) -> str:
        """The reason that the send failed, or an empty text."""
        try:
            await self._on_thread(lambda: sender.send(group, queue.version, queue.buckets()))
        except (AsyncRLError, OSError, RuntimeError) as problem:
            error = str(problem) or type(problem).__name__
            self._log.warning("broadcast failed", version=queue.version, epoch=group.epoch, error=error)
            return error
        self._log.info("broadcast sent", version=queue.version, epoch=group.epoch)
        return ""

    async def _watch(self, queue: BucketQueue, sender: Sender, watch: WatchBroadcast) -> None:
        """Stop the send when the parameter server knows that the broadcast is broken."""
        state = await self._state(watch)
        if state is not None and state.error:
            queue.fail(state.error)
            sender.abort(state.error)

    async def _state(self, request: AnnounceBroadcast | WatchBroadcast | FailBroadcast) -> BroadcastState | None:
        """The answer once it is decided, however late; None when the parameter server refuses."""
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
