"""Blame for the deaths of workers: deaths counted by episode. Pure.

A worker plays many episodes, most of which are innocent of its end. So an episode that was in two deaths is played in a
worker by itself, and only a death there is its own. Invariant: an episode that never ends its worker is never blamed.
"""

from __future__ import annotations

from collections.abc import Iterable

SUSPECT_DEATHS = 2
"""Deaths from which on an episode is played alone."""
MOST = 4096
"""Episodes that are remembered, the newest."""


class Suspects:
    """Deaths by episode id, over its attempts."""

    def __init__(self) -> None:
        self._deaths: dict[str, int] = {}

    def died(self, inside: Iterable[str]) -> None:
        """Count the death of a worker, of unknown cause, with these episodes in it."""
        for episode in inside:
            self._deaths[episode] = self._deaths.pop(episode, 0) + 1
            if len(self._deaths) > MOST:
                del self._deaths[next(iter(self._deaths))]

    def alone(self, episode: str) -> bool:
        """Whether an episode is to be played in a worker by itself."""
        return self._deaths.get(episode, 0) >= SUSPECT_DEATHS

    def ended(self, episode: str) -> None:
        """Forget an episode that has ended and whose worker lives."""
        self._deaths.pop(episode, None)

    def __len__(self) -> int:
        return len(self._deaths)
