"""Gives the newest version to the parameter server, beside the training.

``offer`` takes a version over. It is published until the parameter server has answered; then a call is parked there. If
another parameter server takes its place, the call returns and the same version is published again, from the same
segments. No other part of the learner waits for this. A version whose bytes have changed has to be gathered again:
``spoiled``.

Invariants: a version stays open while it is the newest, the last acknowledged one, or part of a call; at most these
three are held. The others are closed at once, on a thread of their own, because the kernel takes a tenth of a second
for each gigabyte that it gets back.

Fails with RemoteError when the parameter server refuses a version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncrl.core.errors import DeadlineExceeded, RemoteError
from asyncrl.messages import Request
from asyncrl.messages.weights import KeepPublished, Publish, Published
from asyncrl.observe.logging import Logger
from asyncrl.rpc.calls.retry import is_refusal, wait_out
from asyncrl.weights.held_version import HeldVersion


class Publisher:
    """The publisher. ``call`` calls the parameter server; ``on_spoiled`` is called when the newest version is
    spoiled."""

    def __init__(
        self,
        call: Callable[[Request], asyncio.Future[Any]],
        log: Logger,
        on_spoiled: Callable[[], None],
    ) -> None:
        self._call = call
        self._on_spoiled = on_spoiled
        self.spoiled = False
        """Whether the newest version is corrupt in memory: gather and publish the weights again."""
        self._log = log
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="release")
        self._held: list[HeldVersion] = []
        """Open versions, oldest first."""
        self._newest: HeldVersion | None = None
        self._sending: HeldVersion | None = None
        self._acknowledged: HeldVersion | None = None
        self._offered = asyncio.Event()

    @property
    def acknowledged(self) -> int:
        """The newest version that a parameter server has confirmed; -1 before the first."""
        return -1 if self._acknowledged is None else self._acknowledged.version

    def offer(self, version: HeldVersion) -> None:
        """Publish a version next, instead of one that was not sent yet."""
        self._held.append(version)
        self._newest = version
        self.spoiled = False
        self._close_unneeded()
        self._offered.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            self._offered.clear()
            if self._newest is None:
                await self._offered.wait()
            elif self._newest is self._acknowledged:
                await self._keep(self._newest)
            else:
                await self._publish(self._newest)

    def close(self) -> None:
        """Close everything. ``run`` has ended."""
        self._newest = self._sending = self._acknowledged = None
        self._close_unneeded()
        self._closing.shutdown()

    async def _publish(self, version: HeldVersion) -> None:
        # Never given up for a newer one: if the learner is faster than the answers, no version would get through.
        self._sending = version
        try:
            if await self._answer(self._call(Publish(manifest=version.manifest))) is not None:
                self._acknowledged = version
        finally:
            self._sending = None
            self._close_unneeded()

    async def _keep(self, version: HeldVersion) -> None:
        """Wait until the parameter server has lost it or there is a newer one; or for the length of a parked call."""
        call = self._call(KeepPublished(version=version.version))
        offered = asyncio.ensure_future(self._offered.wait())
        try:
            await asyncio.wait({call, offered}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return
            reply: Published | None = await self._answer(call)
            if reply is not None and reply.corrupt:
                # The parameter server holds the very same segments, so there is nothing to send again.
                self._log.error("published weights are no longer what was sealed", version=self.acknowledged)
                self.spoiled = True
                self._on_spoiled()
                # Asked again, the parameter server would say the same until another version is there.
                await offered
            elif reply is not None and not reply.held:
                self._log.info("published again: the parameter server is another one", version=self.acknowledged)
                self._acknowledged = None
        finally:
            offered.cancel()
            if not call.done():
                call.cancel()

    async def _answer(self, call: asyncio.Future[Any]) -> Any:
        """The reply; None if there is none."""
        try:
            return await call
        except (DeadlineExceeded, RemoteError) as error:
            if is_refusal(error):
                raise
            await wait_out(self._log, "parameter server", error)
            return None

    def _close_unneeded(self) -> None:
        needed = (self._newest, self._sending, self._acknowledged)
        for version in self._held:
            if not any(version is one for one in needed):
                self._closing.submit(version.close)
        self._held = [version for version in self._held if any(version is one for one in needed)]
