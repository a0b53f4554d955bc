"""Notices of an actor to the user during the run, one for each key.

Invariant: a notice that changes before it is sent is sent once, in its newest form. There are at most MOST_KEYS
notices; further keys are counted in the last one. A notice belongs to an incarnation of its actor, and the wait that it
reports ends with that incarnation (controller/observation/recent_lines.py). Pure.
"""

from __future__ import annotations

from typing import Protocol

from asyncrl.messages.actors import LONGEST_KEY, LONGEST_NOTICE, Notice
from asyncrl.rpc.wire.codec import encodable

MOST_KEYS = 64
MORE = "more"
MOST_OVERFLOWING = 1024
"""Further keys that are counted."""


class Notify(Protocol):
    """Notifies the user, as Actor.notify does."""

    def __call__(
        self, key: str, text: str, *, count: int = 1, meanwhile: str = "", waits_for: str = "", of: str = ""
    ) -> None: ...


class NoticeQueue:
    """The notices of one actor, and which of them are still to be sent."""

    def __init__(self) -> None:
        self._known: dict[str, Notice] = {}
        self._unsent: dict[str, None] = {}
        """Keys of notices to send, the oldest first."""
        self._more: set[str] = set()

    def add(self, key: str, text: str, count: int, meanwhile: str = "", waits_for: str = "", of: str = "") -> bool:
        """Take in a notice; whether its text is new."""
        notice = sendable(key, text, count, meanwhile, waits_for, of)
        key, text = notice.key, notice.text
        # One place is that of MORE.
        if key not in self._known and len(self._known) >= MOST_KEYS - 1:
            is_new = key not in self._more
            if is_new and len(self._more) < MOST_OVERFLOWING:
                self._more.add(key)
            self._put(
                Notice(key=MORE, text="more kinds of notices than are shown; the log has them", count=len(self._more))
            )
            return is_new
        before = self._known.get(key)
        self._put(notice)
        return before is None or before.text != text

    def _put(self, notice: Notice) -> None:
        if notice != self._known.get(notice.key):
            self._known[notice.key] = notice
            self._unsent.setdefault(notice.key)

    def take(self) -> list[Notice]:
        """The notices to send, which count as sent."""
        taken = [self._known[key] for key in self._unsent]
        self._unsent.clear()
        return taken

    def repeat_waits(self) -> None:
        """Send the notices that report a wait once more: another controller knows none of them."""
        for notice in self._known.values():
            if notice.waits_for:
                self._unsent.setdefault(notice.key)

    def put_back(self, notices: list[Notice]) -> None:
        """Take back notices that could not be sent."""
        for notice in notices:
            self._unsent.setdefault(notice.key)


def sendable(key: str, text: str, count: int, meanwhile: str = "", waits_for: str = "", of: str = "") -> Notice:
    """The notice as the wire takes it: a path may hold bytes that are no text."""
    return Notice(
        key=_cut(key, LONGEST_KEY),
        text=_cut(text, LONGEST_NOTICE),
        count=count,
        meanwhile=_cut(meanwhile, LONGEST_NOTICE),
        waits_for=_cut(waits_for, LONGEST_KEY),
        of=_cut(of, LONGEST_KEY),
    )


def _cut(text: str, longest: int) -> str:
    return encodable(text)[:longest]
