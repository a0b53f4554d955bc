"""Lines of an actor's log on what it does with prompt groups: the source of ``asyncrl-top RUN --explain UID``.

A line has the form of every other line of the log (actor, event, level info, timestamp), and ``uid``, or ``uids`` where
the same befell several groups. It is written past structlog, which would take ten times as long: there is a line for
every group, so that a rehearsal of a cluster on a laptop writes hundreds a second.

Nothing is written where the log is not set up, or where its level is above info. As everywhere in the log, a line that
cannot be written is lost.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from asyncrl.telemetry import logging

LEASED = "leased"
ORPHANED = "orphaned"
SETTLED = "settled"
RETURNED = "returned"
GENERATED = "generated"
TAKEN = "taken"
TRAINED = "trained"
NOT_TRAINED = "not trained"
RESTORED = "restored"
EVALUATED = "evaluated"

_encode = msgspec.json.Encoder().encode


class StoryLog:
    """The writer of one actor's lines."""

    def __init__(self, actor: str) -> None:
        self._actor = actor

    def tell(self, event: str, **facts: Any) -> None:
        """Write a line. ``facts`` have ``uid`` or ``uids``."""
        if logging.writes("info"):
            stamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            line = {"actor": self._actor, "event": event, "level": "info", "timestamp": stamp, **facts}
            logging.write_line(_encode(line).decode())
