"""Open waits of a run, by the notices of its actors ("room on /runs"). Pure.

Invariant: a wait ends with the incarnation of its actor, or with a later notice of that actor and key. The state of the
run holds the waits, so a lost message cannot leave one on a screen. There are at most MOST waits; a further notice is
shown without its wait.
"""

from __future__ import annotations

from collections.abc import Callable

MOST = 256


class OpenWaits:
    """Waits by actor and key of the notice."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], tuple[int, str]] = {}
        """Incarnation of the actor and the words."""

    def take(self, actor: str, incarnation: int, key: str, waits_for: str) -> None:
        """Take in a notice; it ends an earlier wait of the same actor and key, unless that is of a later incarnation.

        The wait ends as well if ``waits_for`` is empty.
        """
        before, _ = self._open.get((actor, key), (0, ""))
        if incarnation < before:
            return
        self._open.pop((actor, key), None)
        if waits_for and len(self._open) < MOST:
            self._open[actor, key] = incarnation, waits_for

    def words(self, lives: Callable[[str, int], bool]) -> list[str]:
        """Words of the open waits, each once, the oldest first. ``lives`` gets an actor's name and incarnation."""
        self._open = {key: wait for key, wait in self._open.items() if lives(key[0], wait[0])}
        return list(dict.fromkeys(words for _, words in self._open.values()))
