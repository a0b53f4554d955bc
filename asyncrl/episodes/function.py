"""An episode that is the user's own function: ``async def episode(task, client) -> reward``.

A plain function runs in a thread and is given a client whose calls wait (BlockingClient).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.episodes.calling import call, is_async
from asyncrl.episodes.client import Client
from asyncrl.episodes.task import Task

Player = Callable[[Task, Client], Awaitable[Any]]
"""Plays a task; returns the reward."""
GIVEN = ("task", "client")


def function_player(function: Callable[..., Any], options: dict[str, Any], names: list[str]) -> Player:
    """A player that calls ``function`` with those of task, client and ``options`` that are among ``names``."""
    waits = not is_async(function)

    async def play(task: Task, client: Client) -> Any:
        given = {**options, "task": task, "client": client.blocking() if waits else client}
        return await call(function, **{name: given[name] for name in names})

    return play
