"""Hands versions to the parameter server: publishes the newest one, and broadcasts versions to the engines.

The call that publishes a version is repeated until the parameter server acknowledges it. Then another call waits at the
parameter server. If another parameter server takes over, the waiting call returns, and the same version is published
again from the same segments. A version is spoiled if its bytes in memory have changed.

A broadcast is announced just before its version is published, since replicas fetch a published version at once unless
they are members of the broadcast. When all members have paused, a thread sends the buckets. It stops early if the
parameter server says that the broadcast is broken. One version at a time is announced or sent. A version that comes
meanwhile, and one whose send fails, goes by shm or stream.

A version stays open while it is the newest, the last acknowledged one, or part of a call or a broadcast. A thread
closes all others, since the kernel takes a tenth of a second to free a gigabyte.

Fails with RemoteError when the parameter server refuses a version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config import Config
from asyncrl.core.errors import AsyncRLError, RemoteError
from asyncrl.core.threads import run_on
from asyncrl.messages import Request
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    BroadcastState,
    CollectiveBackend,
    Publish,
    Published,
    WatchBroadcast,
    WatchPublished,
)
from asyncrl.observe.logging import Logger
from asyncrl.rpc.calls.retry import reply_unless_away
from asyncrl.weights.held_version import HeldVersion

if TYPE_CHECKING:
    from asyncrl.weights.broadcast import Sender


def collective_backend(config: Config, *, on_gpu: bool) -> CollectiveBackend | None:
    """Backend of broadcasts; None for no broadcasts. ``on_gpu``: the learner's weights are on GPUs.

    Transport "auto" broadcasts only whole weights, and only if both learner and engines are on GPUs.
    """
    transport = config.weights.transport
    if transport in ("nccl", "gloo"):
        return transport
    on_gpus = on_gpu and config.rollout.on_gpu
    return "nccl" if transport == "auto" and on_gpus and not config.publishes_adapter else None


def make_sender(backend: CollectiveBackend, config: Config, host: str) -> Sender:
    """Make the sender, bound to ``host``. Raises the errors of Sender."""
    # This import loads torch, which a simulated learner does not need.
    from asyncrl.weights.broadcast import Sender

    return Sender(backend, host, config.weights.broadcast_timeout_s, config.network.ports)


class Publisher:
    """Publishes and broadcasts the versions of a learner.

    ``call`` calls the parameter server. Members of a broadcast find rank 0 at ``host``. ``on_spoiled`` is called when
    the newest version is spoiled.
    """

    def __init__(
        self,
        config: Config,
        host: str,
        *,
        call: Callable[[Request], asyncio.Future[Any]],
        log: Logger,
        on_spoiled: Callable[[], None],
    ) -> None:
        self._config, self._host, self._call, self._log, self._on_spoiled = config, host, call, log, on_spoiled
        self._sender: Sender | None = None
        """Sends the buckets; None without broadcasts, and before ``start``."""
        self._send_thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        self._close_thread = ThreadPoolExecutor(1, thread_name_prefix="release")
        self._open: set[HeldVersion] = set()
        """All versions that are held."""
        self._newest: HeldVersion | None = None
        """The version that ``publish`` got last; None before the first."""
        self._publishing: HeldVersion | None = None
        """The version in the call under way, or None."""
        self._acknowledged: HeldVersion | None = None
        """The last acknowledged version; None before the first, and when another parameter server has taken over."""
        self._broadcast: HeldVersion | None = None
        """The version that is announced or sent, or None."""
        self._has_new = asyncio.Event()
        """Set when a new version comes; ends ``_watch_published``."""
        self.spoiled = False
        """Whether the newest version is spoiled, so that the weights need a new one."""
        self.news = asyncio.Event()
        """Set when a version is acknowledged or spoiled."""

    @property
    def acknowledged(self) -> int:
        """The last version that the present parameter server has acknowledged; -1 before the first."""
        return -1 if self._acknowledged is None else self._acknowledged.version

    async def start(self, *, on_gpu: bool) -> None:
        """Bind the store at which members of broadcasts meet, if there are any. Raises the errors of Sender."""
        if (backend := collective_backend(self._config, on_gpu=on_gpu)) is not None:
            self._sender = await run_on(self._send_thread, make_sender, backend, self._config, self._host)

    async def publish(self, version: HeldVersion, tasks: asyncio.TaskGroup) -> None:
        """Make this the newest version, which ``run`` publishes next. An older one that was not sent is skipped.

        First starts the task that broadcasts it, if there are broadcasts and none is under way.
        """
        self._open.add(version)
        if self._broadcast is not None:
            self._log.info("not broadcast: another version is", version=version.version, other=self._broadcast.version)
        elif self._sender is not None:
            self._broadcast = version
            work = self._announce_and_send(version, self._sender)
            tasks.create_task(work, name=f"broadcast of version {version.version}")
            # Let the task make its first call, so that the announcement is sent before the version is published.
            await asyncio.sleep(0)
        self._newest = version
        self.spoiled = False
        self._close_unused()
        self._has_new.set()

    async def run(self) -> None:
        """Publish the newest version, then watch it until there is a newer one; repeat until cancelled."""
        while True:
            self._has_new.clear()
            if self._newest is None or self.spoiled:
                # A call about a spoiled version would get the same reply.
                await self._has_new.wait()
            elif self._newest is self._acknowledged:
                await self._watch_published(self._newest)
            else:
                await self._request_publish(self._newest)

    async def close(self, within_s: float) -> None:
        """Close everything, after all tasks have ended. A send under way has ``within_s`` to end."""
        if self._sender is not None:
            # On the sending thread, so it runs after a send that is under way.
            closing = asyncio.ensure_future(run_on(self._send_thread, self._sender.close))
            await asyncio.wait([closing], timeout=within_s)
            if not closing.done():
                self._sender.abort("the learner ends")
            await closing
        self._send_thread.shutdown(wait=False)
        self._newest = self._publishing = self._acknowledged = self._broadcast = None
        self._close_unused()
        self._close_thread.shutdown()

    def _close_unused(self) -> None:
        """Close the versions that have no use any more."""
        used = {self._newest, self._publishing, self._acknowledged, self._broadcast}
        for version in self._open - used:
            self._close_thread.submit(version.close)
            self._open.remove(version)

    # --- publishing ---

    async def _request_publish(self, version: HeldVersion) -> None:
        """Publish a version, which counts as acknowledged if the parameter server answers.

        The call continues when a newer version comes. Otherwise a fast learner would get no version through.
        """
        self._publishing = version
        try:
            call = self._call(Publish(manifest=version.manifest))
            if await reply_unless_away(call, self._log, "parameter server") is not None:
                self._acknowledged = version
                self.news.set()
        finally:
            self._publishing = None
            self._close_unused()

    async def _watch_published(self, version: HeldVersion) -> None:
        """Keep a call waiting until the parameter server no longer holds the version intact, or a newer one comes.

        A waiting call has a time limit; then ``run`` calls this again.
        """
        call = self._call(WatchPublished(version=version.version))
        has_new = asyncio.ensure_future(self._has_new.wait())
        try:
            await asyncio.wait({call, has_new}, return_when=asyncio.FIRST_COMPLETED)
            if self._has_new.is_set():
                return
            reply: Published | None = await reply_unless_away(call, self._log, "parameter server")
            if reply is not None and reply.corrupt:
                # The parameter server shares these segments, so sending them again would not help.
                self._log.error("published weights are no longer what was sealed", version=version.version)
                self.spoiled = True
                self.news.set()
                self._on_spoiled()
            elif reply is not None and not reply.held:
                self._log.info("published again: the parameter server is another one", version=version.version)
                self._acknowledged = None
                self._close_unused()
        finally:
            has_new.cancel()
            call.cancel()

    # --- broadcasts ---

    async def _announce_and_send(self, version: HeldVersion, sender: Sender) -> None:
        """Announce the version, send it to the group that forms, and report a failure to the parameter server."""
        announcement = AnnounceBroadcast(
            manifest=version.manifest, backend=sender.backend, host=sender.host, port=sender.port, token=sender.token
        )
        announced = await self._call_until_decided(announcement)
        if announced is not None and (group := announced.group) is not None:
            watch, error = WatchBroadcast(version=version.version, epoch=group.epoch), ""
            buckets = zip(version.manifest.buckets, version.descriptors, strict=True)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch_broadcast(sender, watch))
                try:
                    await run_on(self._send_thread, sender.send, group, version.version, buckets)
                    self._log.info("broadcast sent", version=version.version, epoch=group.epoch)
                except (AsyncRLError, OSError, RuntimeError) as problem:
                    error = str(problem) or type(problem).__name__
                    self._log.warning("broadcast failed", version=version.version, epoch=group.epoch, error=error)
                watching.cancel()
            if error:
                await self._call_until_decided(msgspec.structs.replace(watch, error=error))
        self._broadcast = None
        self._close_unused()

    async def _watch_broadcast(self, sender: Sender, watch: WatchBroadcast) -> None:
        """Stop the send when the parameter server reports that the broadcast is broken."""
        state = await self._call_until_decided(watch)
        if state is not None and state.error:
            sender.abort(state.error)

    async def _call_until_decided(self, request: AnnounceBroadcast | WatchBroadcast) -> BroadcastState | None:
        """Repeat a request until its answer is decided, however late; None when the parameter server refuses."""
        what, state = type(request).__name__, BroadcastState()
        try:
            while not state.decided:
                reply = await reply_unless_away(self._call(request), self._log, "parameter server", request=what)
                state = reply or state
        except RemoteError as error:
            self._log.error("broadcast is refused", request=what, error=str(error))
            return None
        return state
