"""An episode in an environment: the user's ``reset(task)`` and ``step(message)``, plain or asynchronous.

``reset`` returns the first messages, or the text of one of the user. ``step`` is given the policy's message (role,
content, tool_calls) and returns (messages or text, reward, done[, info]): the environment's answer to it, the reward
of the turn or None, and whether the episode has ended. Each episode has an object of its own, whose ``close``, if it
has one, is called however the episode ends.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.episodes.calling import call
from asyncrl.episodes.client import Client
from asyncrl.episodes.function import Player
from asyncrl.episodes.task import Task


def env_player(make: Callable[..., Any], options: dict[str, Any]) -> Player:
    """A player in environments that ``make`` makes. The reward of an episode is the sum of those of its turns."""

    async def play(task: Task, client: Client) -> None:
        env = await call(make, **options)
        try:
            messages = _messages(await call(env.reset, task), "reset")
            done = False
            while not done:
                reply = await client.chat(messages)
                more, reward, done = _step(await call(env.step, reply.message))
                if reward is not None:
                    client.reward(reward)
                messages += [reply.message, *_messages(more, "step")]
        finally:
            if callable(close := getattr(env, "close", None)):
                await call(close)

    return play


def _step(value: Any) -> tuple[Any, Any, bool]:
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        raise TypeError(
            f"step() returned {reprlib.repr(value)}; (messages or text, reward or None, done[, info]) is expected"
        )
    return value[0], value[1], bool(value[2])


def _messages(said: Any, method: str) -> list[Mapping[str, Any]]:
    if said is None:
        return []
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    messages: list[Any] = [None]
    if isinstance(said, Mapping):
        messages = [said]
    elif isinstance(said, list | tuple):
        messages = list(said)
    if not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise TypeError(
            f"{method}() said {reprlib.repr(said)}; text, a message with a role, or a list of such is expected"
        )
    return messages
