"""Seals on leases: they show the learner, without a question, which rollouter a lease was given to. Pure.

The dataloader seals each lease for one incarnation of one rollouter, under a key that it shares with the learner for
the whole run. Invariant: a lease fits only that rollouter, with the uid, number and purpose that were sealed. Either
side may start again, and earlier seals still fit.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from asyncrl.messages.groups import Lease


def sealed(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> Lease:
    """The lease as this rollouter gets it."""
    return msgspec.structs.replace(lease, seal=_seal(key, lease, rollouter, incarnation))


def fits(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> bool:
    """Whether this rollouter got the lease as it stands."""
    return hmac.compare_digest(_seal(key, lease, rollouter, incarnation).encode(), lease.seal.encode())


def _seal(key: bytes, lease: Lease, rollouter: str, incarnation: int) -> str:
    said = [lease.uid, lease.number, lease.purpose, rollouter, incarnation]
    return hmac.new(key, msgspec.msgpack.encode(said), hashlib.sha256).hexdigest()
