"""Sees to it that the parameter server has the newest version, off the training path.

The newest publication is offered here and is owned from then on. It is told to the parameter server until that has
answered; then a call is parked there which comes back when another parameter server has taken its place, and the
same version is published again at once, from the same segments. Nobody waits for any of this. A version whose bytes
went bad is for others to make anew.

Invariants: a publication stays open while it is the newest, the last one acknowledged, or part of a call; at most
these three are held; all others are released at once, on a thread of its own: the kernel takes a tenth of a second
for each gigabyte that it gets back.

Fails with RemoteError when the parameter server refuses a version for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncrl.errors import DeadlineExceeded, RemoteError
from asyncrl.learner.exchange.publication import Publication
from asyncrl.messages import Request
from asyncrl.messages.weights import KeepPublished, Publish, Published
from asyncrl.runtime.calls.retry import is_refusal, wait_out
from asyncrl.telemetry.logging import Logger


class Publisher:
    """The publisher. ``call`` asks the parameter server; ``on_spoiled`` is for a newest version gone bad in memory."""

    def __init__(
        self,
        call: Callable[[Request], asyncio.Future[Any]],
        log: Logger,
        on_spoiled: Callable[[], None],
    ) -> None:
        self._call = call
        self._on_spoiled = on_spoiled
        self.spoiled = False
        """Whether the newest version is corrupt in memory: the weights are to be gathered and published anew."""
        self._log = log
        self._releasing = ThreadPoolExecutor(1, thread_name_prefix="release")
        self._held: list[Publication] = []
        """Publications that are open, oldest first."""
        self._newest: Publication | None = None
        self._sending: Publication | None = None
        self._acknowledged: Publication | None = None
        self._offered = asyncio.Event()

    @property
    def acknowledged(self) -> int:
        """The newest version that a parameter server has confirmed; -1 before the first."""
        return -1 if self._acknowledged is None else self._acknowledged.manifest.version

    def offer(self, publication: Publication) -> None:
        """Publish a version next; it takes the place of one that was not told yet."""
        self._held.append(publication)
        self._newest = publication
        self.spoiled = False
        self._release_unneeded()
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
        """Release everything. ``run`` has ended."""
        self._newest = self._sending = self._acknowledged = None
        self._release_unneeded()
        self._releasing.shutdown()

    async def _publish(self, publication: Publication) -> None:
        # Never given up for a newer one: a learner faster than the answers to this would not be heard at all.
        self._sending = publication
        try:
            request = Publish(manifest=publication.manifest, gather_s=publication.gather_s)
            if await self._answer(self._call(request)) is not None:
                self._acknowledged = publication
        finally:
            self._sending = None
            self._release_unneeded()

    async def _keep(self, publication: Publication) -> None:
        """Wait until the parameter server has lost it or there is a newer one; or for the length of a parked call."""
        call = self._call(KeepPublished(version=publication.manifest.version))
        offered = asyncio.ensure_future(self._offered.wait())
        try:
            await asyncio.wait({call, offered}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return
            reply: Published | None = await self._answer(call)
            if reply is not None and reply.corrupt:
                # The segments are the very memory that is held there, so there is nothing to send again.
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
        """The reply; None when it did not come."""
        try:
            return await call
        except (DeadlineExceeded, RemoteError) as error:
            if is_refusal(error):
                raise
            await wait_out(self._log, "parameter server", error)
            return None

    def _release_unneeded(self) -> None:
        needed = (self._newest, self._sending, self._acknowledged)
        for publication in self._held:
            if not any(publication is one for one in needed):
                self._releasing.submit(publication.release)
        self._held = [publication for publication in self._held if any(publication is one for one in needed)]
