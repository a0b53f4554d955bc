"""Environments of SkyRL-gym: env = "asyncrl.episodes.adapters.skyrl_gym:SkyRLGym".

episode.options: ``env_id`` (gsm8k), ``config`` (the environment's own settings), ``max_turns``. The row's columns are
the environment's extras, for example ``reward_spec`` with ``ground_truth``. A column ``prompt`` that holds messages
begins the conversation, else the row's prompt does; data.system goes in front of the row's prompt alone. Each step's
reward is that of its turn. Source: skyrl-gym 0.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import skyrl_gym

from asyncrl.episodes.playing.client import Task
from asyncrl.text.chat.chat_messages import read_conversation


class SkyRLGym:
    """One environment, made when its row is known."""

    def __init__(self, env_id: str, config: Mapping[str, Any] | None = None, max_turns: int = 1) -> None:
        self._id, self._config, self._max_turns = env_id, dict(config or {}), max_turns
        self._env: Any = None

    def reset(self, task: Task) -> list[dict[str, Any]]:
        """Make the environment for the row; returns its first messages."""
        extras = {"max_turns": self._max_turns, **task.row}
        self._env = skyrl_gym.make(self._id, env_config=self._config, extras=extras)
        messages, _ = self._env.init(_beginning(task))
        return list(messages)

    def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        """Take the text of the message as the action."""
        outcome = self._env.step(message["content"])
        return list(outcome["observations"]), float(outcome["reward"]), bool(outcome["done"])

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()


def _beginning(task: Task) -> list[dict[str, Any]]:
    """Return the first messages: those of column ``prompt`` if it holds messages that the task lacks, else the task's.

    The task's messages may have data.system in front of the column's.
    """
    column = task.row.get("prompt")
    if not isinstance(column, list):
        return list(task.messages)
    messages = read_conversation(column, "prompt")
    return list(task.messages) if task.messages[-len(messages) :] == messages else messages
