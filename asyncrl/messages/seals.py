"""Seals on tickets: how the learner knows, without asking, to whom a ticket was granted. Pure.

The dataloader seals each ticket for the incarnation of the rollouter that it grants it to, under a key that it shares
with the learner for the whole run. Invariant: a ticket fits whom it was sealed for and nobody else, with the uid,
grant and purpose that it was sealed with; either of the two may start again, and what was sealed
before still fits.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from asyncrl.messages.groups import Ticket


def sealed(key: bytes, ticket: Ticket, rollouter: str, incarnation: int) -> Ticket:
    """A ticket as it is granted to this rollouter."""
    return msgspec.structs.replace(ticket, seal=_seal(key, ticket, rollouter, incarnation))


def fits(key: bytes, ticket: Ticket, rollouter: str, incarnation: int) -> bool:
    """Whether the ticket was granted to this rollouter as it stands."""
    return hmac.compare_digest(_seal(key, ticket, rollouter, incarnation).encode(), ticket.seal.encode())


def _seal(key: bytes, ticket: Ticket, rollouter: str, incarnation: int) -> str:
    said = [ticket.uid, ticket.grant, ticket.purpose, rollouter, incarnation]
    return hmac.new(key, msgspec.msgpack.encode(said), hashlib.sha256).hexdigest()
