"""Broadcasts new versions to the engines during the training.

A version is announced to the parameter server once it is assembled; engines generate until then. When every member of
the broadcast group has paused, a thread sends the buckets.

Invariants: one version at a time is announced or sent; a version that comes meanwhile goes by shm or stream. This
module holds the version by its own descriptors until the send is over. A send that fails is logged and reported to the
parameter server; the version then goes by shm or stream. A send stops when the parameter server says that the broadcast
is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config import Config
from asyncrl.core.errors import AsyncRLError, RemoteError, WeightsCorrupt
from asyncrl.messages import Request
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    BroadcastGroup,
    BroadcastState,
    CollectiveBackend,
    WatchBroadcast,
)
from asyncrl.observe.logging import Logger
from asyncrl.rpc.calls.retry import reply_unless_away
from asyncrl.weights.held_version import HeldVersion, hold

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
        self._sending: HeldVersion | None = None
        """The version that is announced or sent, or None."""

    async def start(self) -> None:
        """Bind the store at which members meet. Raises the errors of Sender."""
        self._sender = await self._on_thread(lambda: make_sender(self._backend, self._config, self._host))

    async def begin(self, version: HeldVersion, tasks: asyncio.TaskGroup) -> None:
        """Start the task that announces and sends a version; returns once the announcement is under way.

        Then the version may be published. Replicas fetch a published version at once, unless they are members of its
        broadcast. While an earlier version is announced or sent, this one is not broadcast.
        """
        assert self._sender is not None, "not started"
        if self._sending is not None:
            self._log.info("not broadcast: another version is", version=version.version, other=self._sending.version)
            return
        try:
            self._sending = own = hold(version.manifest)
        except WeightsCorrupt as error:
            self._log.warning("not broadcast", version=version.version, error=str(error))
            return
        tasks.create_task(self._broadcast(own, self._sender), name=f"broadcast of version {version.version}")
        # The task's first step makes the call.
        await asyncio.sleep(0)

    async def close(self, within_s: float) -> None:
        """End the broadcasts, after the tasks of ``begin`` have ended. A send under way has ``within_s`` to end."""
        if self._sender is not None:
            # On the sending thread, so it runs after a send that is under way.
            closing = asyncio.ensure_future(self._on_thread(self._sender.close))
            await asyncio.wait([closing], timeout=within_s)
            if not closing.done():
                self._sender.abort("the learner ends")
            await closing
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._sending is not None:
            self._sending.close()

    async def _broadcast(self, version: HeldVersion, sender: Sender) -> None:
        """Announce the version, then send it to the group, watched by ``_watch``.

        If the parameter server refuses or calls the broadcast off, nothing is sent. A failed send is reported to the
        parameter server.
        """
        announcement = AnnounceBroadcast(
            manifest=version.manifest, backend=self._backend, host=sender.host, port=sender.port, token=sender.token
        )
        announced = await self._call_until_decided(announcement)
        if announced is not None and (group := announced.group) is not None:
            watch = WatchBroadcast(version=version.version, epoch=group.epoch)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(sender, watch))
                error = await self._send(version, sender, group)
                watching.cancel()
            if error:
                await self._call_until_decided(msgspec.structs.replace(watch, error=error))
        # On a thread: if these descriptors are the last of a version, the kernel takes long to get the memory back.
        await self._on_thread(version.close)
        self._sending = None

    async def _send(self, version: HeldVersion, sender: Sender, group: BroadcastGroup) -> str:
        """Send the version to the group on the thread. Returns why it failed, or an empty text."""
        buckets = zip(version.manifest.buckets, version.descriptors, strict=True)
        try:
            await self._on_thread(lambda: sender.send(group, version.version, buckets))
        except (AsyncRLError, OSError, RuntimeError) as problem:
            error = str(problem) or type(problem).__name__
            self._log.warning("broadcast failed", version=version.version, epoch=group.epoch, error=error)
            return error
        self._log.info("broadcast sent", version=version.version, epoch=group.epoch)
        return ""

    async def _watch(self, sender: Sender, watch: WatchBroadcast) -> None:
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

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
