"""Notices to the user of attempts at episodes that their rollouter finds failed: each cause once, then counts. Pure.

Errors of the user's code are told by its host. The first case of a cause says what, for which prompt, and what
follows.
"""

from __future__ import annotations

from collections import Counter

from asyncrl.config import Config
from asyncrl.rollouter.episode_figures import Failure

TOLD: frozenset[Failure] = frozenset({"start", "turn", "answer", "reward"})
"""Causes that nobody else tells."""


class EpisodeFaults:
    """Faults of one rollouter so far."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._counts: Counter[Failure] = Counter()
        self._first: dict[Failure, str] = {}

    def add(self, failure: Failure, text: str, uid: str) -> tuple[str, str, int] | None:
        """Take in a failed attempt at a sample of ``uid``: key, text and count of its notice, where it is told."""
        if failure not in TOLD:
            return None
        self._counts[failure] += 1
        episode, rollout = self._config.episode, self._config.rollout
        if failure not in self._first:
            dropped = rollout.on_failed_trajectory == "drop"
            then = "it is left out of its group" if dropped else "its group is quarantined"
            self._first[failure] = (
                f"episode ({episode.kind} = {getattr(episode, episode.kind)}): {text} (prompt {uid}). A trajectory is "
                f"tried {rollout.max_attempts} times, then {then} (rollout.on_failed_trajectory)"
            )
        return f"episode: {failure}", self._first[failure], self._counts[failure]
