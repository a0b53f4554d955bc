"""Environments of Gymnasium with discrete actions, as text: env = "asyncrl.episodes.adapters.gymnasium:Gymnasium".

episode.options: ``env_id`` (FrozenLake-v1), ``actions``, ``prompt``, and arguments of gymnasium.make. ``actions[i]``
names the i-th action, counted from the first of the space; by default each is its number. ``prompt`` is the text before
the first observation; by default the row's messages come before it. The last action that a message names is taken; a
message without one costs a turn. Each step's reward is that of its turn. An observation without a text picture is shown
as JSON. Source: gymnasium 1.4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from asyncrl.episodes.playing.client import Task
from asyncrl.episodes.playing.players import result_text


class Gymnasium:
    """One environment."""

    def __init__(
        self, env_id: str, actions: Sequence[str] | None = None, prompt: str | None = None, **options: Any
    ) -> None:
        try:
            self._env = gymnasium.make(env_id, **{"render_mode": "ansi", **options})
        except TypeError:
            # The environment takes no render_mode, so it has no picture as text.
            self._env = gymnasium.make(env_id, **options)
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{env_id} has actions that are not discrete: {space}; write your own env for it")
        self._first_action = int(space.start)
        self._names = [str(name) for name in actions or range(self._first_action, self._first_action + int(space.n))]
        self._prompt = prompt
        # The pattern takes the first name that fits, so "move left" must stand before "move".
        by_length = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, by_length))})(?!\w)", re.IGNORECASE)

    def reset(self, task: Task) -> str | list[dict[str, Any]]:
        """Reset the environment by the task's seed; returns the prompt, the first observation and the rules in one
        message."""
        observation, _ = self._env.reset(seed=task.seed % 2**31)
        rules = f"Answer with one action of: {', '.join(self._names)}."
        board = f"{self._shown(observation)}\n{rules}"
        if self._prompt is not None:
            return f"{self._prompt}\n{board}"
        *earlier, last = task.messages
        content = last["content"]
        joined = f"{content}\n{board}" if isinstance(content, str) else [*content, {"type": "text", "text": board}]
        return [*earlier, {**last, "content": joined}]

    def step(self, message: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """Take the action that the message names last; returns the observation, the reward and whether the episode has
        ended."""
        named = self._pattern.findall(message["content"])
        if not named:
            return f"There is no action in it. Answer with one of: {', '.join(self._names)}.", None, False
        lowered = [name.lower() for name in self._names]
        observation, reward, ended, truncated, _ = self._env.step(self._first_action + lowered.index(named[-1].lower()))
        return self._shown(observation), float(reward), bool(ended or truncated)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _shown(self, observation: Any) -> str:
        """Return the environment's picture as text, or without one the observation."""
        picture = self._env.render() if self._env.render_mode == "ansi" else None
        return picture if isinstance(picture, str) else result_text(observation)
