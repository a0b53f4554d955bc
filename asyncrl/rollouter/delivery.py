"""Brings finished groups to the learner, to the incarnation of it that lives.

Invariant: ``deliver`` is over only when the living learner has acknowledged the group, so that its lease may be
released. An acknowledgement of a learner that has been replaced, also one that was taken in before that was known, is
worth nothing: the group that it acknowledged died with it, and is delivered again. The learner knows each group by its
uid, so that one which arrives twice is trained once.

It has no deadline of its own: a learner that dies has a successor, and of two that do not reach each other for
``supervision.unreachable_s`` the controller ends one. Fails with WireError where the learner refuses the group for
good, with MessageTooLarge where it accepts none of that size.
"""

from __future__ import annotations

import asyncio
import random

from asyncrl.errors import DeadlineExceeded, RemoteError
from asyncrl.messages.groups import Group
from asyncrl.messages.learner import Deliver
from asyncrl.runtime.calls.peer import Peer
from asyncrl.runtime.calls.retry import AWAY_S, log_away, pause
from asyncrl.runtime.services import ActorServices


class Delivery:
    """Brings groups to the learner. ``timeout_s`` is the deadline of one call: past the silence after which a learner
    is replaced, since a learner that stands still may have received the group, and would receive it again.
    """

    def __init__(self, learner: Peer, services: ActorServices, *, timeout_s: float) -> None:
        self._learner = learner
        self._timeout_s = timeout_s
        self._draws = random.Random(f"deliveries to {learner.name}")
        self._living = 0
        """Incarnation of the learner below which none lives any more."""
        self._awaits, self._counters, self._log = services.awaits, services.counters, services.log
        for name in ("adoptions", "delivered_again"):
            self._counters[f"rollout/{name}"] = 0

    def adopt(self, incarnation: int) -> None:
        """Take an incarnation of the learner for the living one."""
        if incarnation > self._living:
            self._living = incarnation
            self._counters["rollout/adoptions"] += 1
            self._log.info("learner adopted", incarnation=incarnation)
            self._learner.adopt(incarnation)

    async def deliver(self, group: Group) -> None:
        """Send a group until the living learner has it: a lease ends by delivery only."""
        with self._awaits.on(self._learner.name, "Deliver"):
            times = 0
            while not await self._delivered(group, times):
                times += 1

    async def _delivered(self, group: Group, times: int) -> bool:
        uid = group.lease.uid
        call = self._learner.call(Deliver(group=group), self._timeout_s)
        try:
            await call
        except DeadlineExceeded as error:
            log_away(self._log, "learner", error, uid=uid)
            return False
        except RemoteError as error:
            if not error.retryable:
                raise
            self._log.info("learner takes no groups yet", uid=uid, error=str(error))
            await asyncio.sleep(pause(AWAY_S, times, self._draws.random()))
            return False
        # The answer may be of a learner that was replaced between its reply and this task's turn.
        if call.answered_by >= self._living:
            return True
        self._counters["rollout/delivered_again"] += 1
        return False
