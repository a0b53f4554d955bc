"""Snapshots from their MessagePack, and times that a calendar has. Pure."""

from __future__ import annotations

import msgspec

from asyncrl.messages.snapshot import Snapshot

LAST_WALL = 253_402_128_000.0
"""Unix time (s), two days before the year 10000, beyond which no calendar goes."""

decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode
"""A snapshot. Raises msgspec.DecodeError."""


def is_wall(value: float) -> bool:
    """Whether that is a Unix time (s) of a calendar."""
    return 0.0 <= value <= LAST_WALL
