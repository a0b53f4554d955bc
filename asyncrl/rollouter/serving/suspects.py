"""Blame for the deaths of engines: deaths counted by ticket, and turns by which a suspect generates alone.

A ticket that had a submission in the engine when it died is suspect. Most are innocent, the long ones above all, so
the count of deaths alone says nothing; from SUSPECT_DEATHS on a ticket runs alone, and only a death while nobody else
was in the engine is its own. After ``max_attempts`` of these it has failed.

Turns are given in the order in which they were asked for. A ticket that runs alone waits until all inside are
done and keeps all who ask after it waiting, so neither starves. Its own samples run together: they are one ticket, and
have the engine until all are done or it dies.

Invariants: while a ticket runs alone no other is inside; each that asks gets a turn once those before it are done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from asyncrl.messages.groups import Ticket

SUSPECT_DEATHS = 2
"""Deaths from which on a ticket runs alone."""


class SuspectTickets:
    """Deaths of engines by ticket. Pure."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._deaths: Counter[str] = Counter()
        self._own: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self.own_deaths = 0
        """Deaths while a ticket ran alone, over all tickets."""
        self.failed = 0
        """Tickets that have failed."""

    def died(self, inside: Iterable[str], reason: str, *, alone: bool) -> None:
        """An engine died with submissions of these tickets (uids) in it; ``alone``: of one that ran alone."""
        for uid in set(inside):
            self._deaths[uid] += 1
            if alone:
                self._own[uid] += 1
                self._reasons[uid] = reason
                self.own_deaths += 1
                self.failed += self._own[uid] == self._max_attempts

    def deaths(self, ticket: Ticket) -> int:
        """Deaths of engines and rollouters that it was in, earlier holders included.

        Deaths in company count up to SUSPECT_DEATHS; a later holder takes more for the ticket's own.
        """
        own = self._own[ticket.uid]
        in_company = ticket.attempt + self._deaths[ticket.uid] - own
        return max(ticket.attempt, min(in_company, SUSPECT_DEATHS)) + own

    def alone(self, ticket: Ticket) -> bool:
        """Whether nothing may be generated beside it."""
        return ticket.alone or self.deaths(ticket) >= SUSPECT_DEATHS

    def failure(self, ticket: Ticket) -> str | None:
        """Reason that it may not run again; None while it may."""
        own = self._own[ticket.uid]
        if own < self._max_attempts:
            return None
        return (
            f"the engine died {own} times (rollout.max_attempts) while this prompt alone was generated, the last time: "
            f"{self._reasons[ticket.uid]}"
        )

    def forget(self, uid: str) -> None:
        """Forget a ticket that is done with."""
        # A Counter lets what it does not hold be deleted.
        del self._deaths[uid]
        del self._own[uid]
        self._reasons.pop(uid, None)

    def __len__(self) -> int:
        """Tickets held in at least one death."""
        return len(self._deaths)


class EngineTurns:
    """Turns in the engine. ``alone`` is asked when a turn comes up, so that it may change while a ticket waits."""

    def __init__(self, alone: Callable[[Ticket], bool]) -> None:
        self._alone = alone
        self._inside: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], Ticket] = {}
        """Tickets that wait, in the order of asking."""
        self.lone: str | None = None
        """Uid of the ticket that runs alone now."""
        self._ending = False
        """Whether its turn is over as soon as its samples are out."""
        self.lone_turns = 0
        """Times that a ticket has had the engine for itself."""

    async def take(self, ticket: Ticket) -> None:
        """Wait for a turn; ``give_back`` ends it. Ends when those before it are done, or with the task that waits."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[granted] = ticket
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._waiting.pop(granted, None)
                self._grant()
            else:
                # It was given the turn in the same moment.
                self.give_back(ticket)
            raise

    def give_back(self, ticket: Ticket) -> None:
        """End one turn of a ticket."""
        self._inside[ticket.uid] -= 1
        if not self._inside[ticket.uid]:
            del self._inside[ticket.uid]
            if self.lone == ticket.uid:
                self.lone, self._ending = None, False
        self._grant()

    def end_lone(self) -> None:
        """Put the ticket that runs alone behind those that wait before it runs again."""
        self._ending = self.lone is not None

    def _grant(self) -> None:
        while self.lone is None and self._waiting:
            granted, ticket = next(iter(self._waiting.items()))
            if granted.cancelled() or not self._alone(ticket):
                self._enter(granted)
            elif self._inside:
                # Nobody is aborted for it: under on_update = drain a response is to have one version, and an engine
                # that has just died, which is when suspects come up, is empty anyway.
                return
            else:
                self.lone = ticket.uid
                self.lone_turns += 1
        # After its death those that wait come first: what works is not kept waiting by what kills.
        if self.lone is not None and not self._ending:
            for granted in [granted for granted, ticket in self._waiting.items() if ticket.uid == self.lone]:
                self._enter(granted)

    def _enter(self, granted: asyncio.Future[None]) -> None:
        ticket = self._waiting.pop(granted)
        # The task that waited may have been cancelled and not have run since.
        if not granted.cancelled():
            self._inside[ticket.uid] += 1
            granted.set_result(None)
