"""Seals on leases: how the learner knows, without asking, to whom a lease was leased. Pure.

The dataloader seals each lease for the incarnation of the rollouter that it leases it to, under a key that it shares
with the learner for the whole run. Invariant: a lease fits whom it was sealed for and nobody else, with the uid,
lease and purpose that it was sealed with; either of the two may start again, and what was sealed
before still fits.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from asyncrl.messages.groups import Lease


def sealed(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> Lease:
    """A lease as it is leased to this rollouter."""
    return msgspec.structs.replace(lease, seal=_seal(key, lease, rollouter, incarnation))


def fits(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> bool:
    """Whether the lease was leased to this rollouter as it stands."""
    return hmac.compare_digest(_seal(key, lease, rollouter, incarnation).encode(), lease.seal.encode())


def _seal(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> str:
    said = [lease.uid, lease.number, lease.purpose, rollouter, incarnation]
    return hmac.new(key, msgspec.msgpack.encode(said), hashlib.sha256).hexdigest()
