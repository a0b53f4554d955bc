"""Publishes the newest version to the parameter server, and keeps it open as long as it is needed.

The call for a version is repeated until the parameter server acknowledges it. Then a call is kept waiting there. If
another parameter server takes over, that call returns, and the same version is published again from the same segments.
A version is spoiled if its bytes in memory have changed. A version stays open while it is the newest, the last
acknowledged one, or part of a call; at most these three are held. A thread closes all others, since the kernel takes a
tenth of a second to free a gigabyte.

Fails with RemoteError when the parameter server refuses a version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncrl.messages import Request
from asyncrl.messages.weights import Publish, Published, WatchPublished
from asyncrl.observe.logging import Logger
from asyncrl.rpc.calls.retry import reply_unless_away
from asyncrl.weights.held_version import HeldVersion


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
        """Closes the versions that are no longer needed."""
        self._newest: HeldVersion | None = None
        """The version that was offered last; None before the first."""
        self._sending: HeldVersion | None = None
        """The version in the call under way, or None."""
        self._acknowledged: HeldVersion | None = None
        """The last acknowledged version; None before the first, and when another parameter server has taken over."""
        self._offered = asyncio.Event()
        """Set when a version is offered; ends ``_watch_published``."""
        self.news = asyncio.Event()
        """Set when a version is acknowledged or spoiled."""

    @property
    def acknowledged(self) -> int:
        """The last version that the present parameter server has acknowledged; -1 before the first."""
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
            call = self._call(Publish(manifest=version.manifest))
            if await reply_unless_away(call, self._log, "parameter server") is not None:
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
            reply: Published | None = await reply_unless_away(call, self._log, "parameter server")
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

    def _close_unused(self, *versions: HeldVersion | None) -> None:
        """Close those of ``versions`` that are neither newest, nor being sent, nor acknowledged last."""
        for version in {*versions} - {self._newest, self._sending, self._acknowledged}:
            if version is not None:
                self._release_thread.submit(version.close)
