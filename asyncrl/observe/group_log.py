"""Log lines of an actor on prompt groups: the source of ``asyncrl-top RUN --explain UID``.

A line has the fields of every log line (actor, event, level info, timestamp), and ``uid`` or ``uids``. It bypasses
structlog, which takes ten times as long: a simulated cluster on a laptop writes hundreds of these lines a second.

Nothing is written if the log is not set up or its level is above info. A line that cannot be written waits in memory
(logging.py).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from asyncrl.observe import logging

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

FORKS = {
    "fork:root": "it has other tools or template options than the calls before",
    "fork:branch": "its messages extend no answer of the policy: the same question again, a sub-agent, a summary",
    "fork:edited": "a message before an answer of the policy was changed, removed or added",
    "fork:assistant": "it holds an answer that the policy gave in other words, or did not give",
    "fork:history": "the chat template renders an earlier answer differently from the sampled tokens (chat.history)",
    "fork:cut": "an answer was cut by a limit, and the chat template cannot extend that",
    "fork:no-extension": "the chat template cannot extend that answer; asyncrl-doctor --chat says why",
}
"""Reason that a call of the policy ("it") forks the conversation, by cause (rollouter/episode/conversation.py)."""

_encode = msgspec.json.Encoder().encode


class GroupLog:
    """Writes the lines of one actor."""

    def __init__(self, actor: str) -> None:
        self._actor = actor

    def write(self, event: str, **facts: Any) -> None:
        """Write a line. ``facts`` have ``uid`` or ``uids``."""
        if logging.writes("info"):
            stamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            line = {"actor": self._actor, "event": event, "level": "info", "timestamp": stamp, **facts}
            logging.write_line(_encode(line).decode())
