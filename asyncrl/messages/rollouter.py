"""Requests of the dataloader to a rollouter after a restart."""

from __future__ import annotations

from msgspec import Struct

from asyncrl.messages import Count, Message, Request, Uid
from asyncrl.messages.senders import DATALOADER


class HeldTicket(Struct, gc=False, frozen=True, array_like=True):
    """A ticket that a rollouter holds."""

    uid: Uid
    grant: Count
    attempt: Count


class TicketsHeld(Message, frozen=True, kw_only=True):
    """All tickets that are not acknowledged by that learner, finished ones included."""

    seen: Count
    """The highest grant received."""
    served_version: int
    tickets: list[HeldTicket]
    leaving: bool = False
    """It takes no grant above ``seen``."""


class OpenTickets(Request, frozen=True, kw_only=True):
    """Dataloader to rollouter: which tickets do you hold?

    Before it answers, the rollouter takes ``learner`` for the living incarnation of learner/0: an acknowledgement of
    an older one releases nothing any more, and what was delivered to an older one is delivered again.
    """

    reply = TicketsHeld
    senders = DATALOADER
    learner: Count
