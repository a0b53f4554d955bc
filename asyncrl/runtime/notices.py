"""Notices of an actor to the user: what must be known while the run goes on, one for each key.

Invariant: a notice that changes before it was told is told once, as it is then; there are never more than MOST_KEYS,
and further keys are counted in the last one. Pure.
"""

from __future__ import annotations

from typing import Protocol

from asyncrl.messages.actors import LONGEST_NOTICE, Notice

MOST_KEYS = 64
MORE = "more"


class Notify(Protocol):
    """Tells the user, as Actor.notify does."""

    def __call__(self, key: str, text: str, *, count: int = 1) -> None: ...


class Notices:
    """The notices of one actor, and which of them the controller has not heard."""

    def __init__(self) -> None:
        self._known: dict[str, Notice] = {}
        self._untold: dict[str, None] = {}
        """Keys, the one that has waited longest first."""
        self._more: set[str] = set()

    def add(self, key: str, text: str, count: int) -> bool:
        """Take in a notice; whether its text is new."""
        if key not in self._known and len(self._known) >= MOST_KEYS - 1:
            self._more.add(key)
            key, text, count = MORE, "more kinds of notices than are shown; the log has all of them", len(self._more)
        before = self._known.get(key)
        notice = Notice(key=key, text=text[:LONGEST_NOTICE], count=count)
        if notice != before:
            self._known[key] = notice
            self._untold.setdefault(key)
        return before is None or before.text != notice.text

    def take(self) -> list[Notice]:
        """Those that the controller is to hear of; they are taken for told."""
        taken = [self._known[key] for key in self._untold]
        self._untold.clear()
        return taken

    def put_back(self, notices: list[Notice]) -> None:
        """These were not heard."""
        for notice in notices:
            self._untold.setdefault(notice.key)
