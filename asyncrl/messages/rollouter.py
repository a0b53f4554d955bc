"""The question of the dataloader to a rollouter after a restart, and the answer."""

from __future__ import annotations

from asyncrl.messages import DATALOADER, Count, Message, Request, Uid


class LeasesHeld(Message, frozen=True, kw_only=True):
    """All leases that the learner has not acknowledged, those of finished groups included."""

    seen: Count
    """The highest number of a lease that was received."""
    served_version: int
    attempts: dict[Uid, Count]
    """Lease.attempt of each lease that is held, with the deaths since then."""
    leaving: bool = False
    """The rollouter takes no lease above ``seen``."""


class OpenLeases(Request, frozen=True, kw_only=True):
    """Dataloader to rollouter: which leases do you hold?

    Before it answers, the rollouter takes ``learner`` for the living incarnation of learner/0: an acknowledgement of
    an older one releases nothing any more, and what was delivered to an older one is delivered again.
    """

    reply = LeasesHeld
    senders = DATALOADER
    learner: Count
