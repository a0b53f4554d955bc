"""The learner's calls to the controller; each is repeated until the controller or its successor answers.

A generation of the learner is one start of all its ranks; its number is the incarnation of the ranks. The ranks meet in
a store of torch.distributed. Invariant: a rank joins the store of its own generation, even if the controller knows
other generations.

Fails with RemoteError when the controller refuses, and with DeadlineExceeded when rank 0 is not found in time. Fails
with Refused when rank 0 is of a newer generation: this rank must start again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.core.errors import DeadlineExceeded, Refused
from asyncrl.messages import Request
from asyncrl.messages.actors import ActorRecord, Resolve, Resolved
from asyncrl.rpc.actor import CONTROLLER, Actor
from asyncrl.rpc.calls.retry import reply_unless_away

RANK_0 = "learner/0"


class ControllerLink:
    """Calls the controller for one actor."""

    def __init__(self, actor: Actor) -> None:
        self._actor, self._name = actor, actor.name
        self._awaits, self._log = actor.awaits, actor.log

    async def report(self, request: Request) -> None:
        """Send a request until it is answered. Raises RemoteError."""
        with self._awaits.on(CONTROLLER, type(request).__name__):
            while await self._ask(request) is None:
                pass

    async def find_store(self, generation: int, timeout_s: float) -> tuple[str, int]:
        """Ask the controller for rank 0 of this generation until it is known. Returns host and port of its store."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while loop.time() < deadline:
            # ``unready``: rank 0 becomes ready only after all ranks have met. ``above`` skips earlier generations.
            reply: Resolved | None = await self._ask(Resolve(name=RANK_0, above=generation - 1, unready=True))
            if reply is not None and reply.record is not None:
                return store_of(reply.record, generation)
        raise DeadlineExceeded(self._name, RANK_0, "the rendezvous of the ranks", timeout_s)

    async def _ask(self, request: Request) -> Any:
        """Call the controller once. Returns None, after a pause, if the call must be repeated. Raises RemoteError."""
        return await reply_unless_away(self._actor.peer(CONTROLLER).call(request), self._log, "controller")


def store_of(rank_0: ActorRecord, generation: int) -> tuple[str, int]:
    """Host and port of the store in the record ``rank_0``. Raises Refused if the record is of another generation."""
    if rank_0.incarnation != generation:
        raise Refused(RANK_0, "incarnation", ours=str(generation), theirs=str(rank_0.incarnation))
    return rank_0.facts["store_host"], rank_0.facts["store_port"]
