"""Games of TextArena for one player: env = "asyncrl.episodes.adapters.textarena:TextArena".

episode.options: ``env_id`` (GuessTheNumber-v0), and arguments of the game's maker. The game states its rules, so
the row's prompt is not used; its task follows from the seed. The reward comes with the last turn. Source: textarena
0.7.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import textarena

from asyncrl.episodes.playing.client import Task

_random_lock = threading.Lock()


class TextArena:
    """One game. Games draw from Python's global random generator, so each saves and restores its own state of it."""

    def __init__(self, env_id: str, **options: Any) -> None:
        # The raw game returns only new text; the wrappers under its other names repeat the whole conversation.
        self._game = textarena.make(env_id if env_id.endswith("-raw") else f"{env_id}-raw", **options)
        self._state: Any = None

    def reset(self, task: Task) -> str:
        """Start the game by the task's seed; returns its rules."""
        with self._own_random_state():
            self._game.reset(num_players=1, seed=task.seed)
            return self._new_text()

    def step(self, message: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """Play the message as a move; returns the game's text, the reward and whether the game has ended."""
        with self._own_random_state():
            done, _ = self._game.step(message["content"])
            if not done:
                return self._new_text(), None, False
            rewards, _ = self._game.close()
            return "", float(rewards[0]), True

    def _new_text(self) -> str:
        """Return the game's text since the last call, without the player's own moves."""
        _, observed = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in observed if kind != own)

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """In the context, give Python's global generator this game's state; afterwards restore its earlier state."""
        with _random_lock:
            earlier_state = random.getstate()
            if self._state is not None:
                random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(earlier_state)
