"""An episode that is the user's own function: ``async def episode(task, client) -> reward``.

A plain function runs in a thread with a blocking client (BlockingClient).

Invariant of ``call``, for all users' code in a worker: plain code never blocks the event loop. A call ends only after
its code has ended, even if the episode is stopped meanwhile, so nothing of an episode runs after its end.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncrl.episodes.playing.client import Client
from asyncrl.episodes.playing.task import Task

Player = Callable[[Task, Client], Awaitable[Any]]
"""Plays a task; returns the reward."""
GIVEN = ("task", "client")
MOST_THREADS = 1024
"""Calls of plain code at a time in a worker; more wait."""
_threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="episode")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The value of a call: asynchronous code runs on the event loop, plain code in a thread."""
    if is_async(function):
        return await function(*args, **kwargs)
    context, loop = contextvars.copy_context(), asyncio.get_running_loop()
    running = loop.run_in_executor(_threads, lambda: context.run(function, *args, **kwargs))
    try:
        value = await asyncio.shield(running)
    except asyncio.CancelledError:
        # A thread cannot be cancelled.
        await asyncio.wait([running])
        if not running.cancelled():
            # Retrieved, or asyncio would log it.
            running.exception()
        raise
    return await value if inspect.isawaitable(value) else value


def function_player(function: Callable[..., Any], options: dict[str, Any], names: list[str]) -> Player:
    """A player that calls ``function`` with those of task, client and ``options`` that are among ``names``."""
    waits = not is_async(function)

    async def play(task: Task, client: Client) -> Any:
        given = {**options, "task": task, "client": client.blocking() if waits else client}
        return await call(function, **{name: given[name] for name in names})

    return play
