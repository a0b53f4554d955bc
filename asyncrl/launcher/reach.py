"""Something done on many hosts at once, under one deadline, with every host named that cannot take part.

Fails with HostFailed for one host or all that failed, the reasons of several having been shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, HostFailed
from asyncrl.launcher.contact import Contact
from asyncrl.launcher.progress import Progress

MORE_FAILURES_S = 3.0
"""Once a host has failed the others have this time to fail too, so that all are named."""


async def of_each(
    do: Callable[[str], Awaitable[Any]],
    names: Sequence[str],
    what: str,
    contacts: Mapping[str, Contact],
    config: Config,
    progress: Progress,
    count: int,
    tell: Callable[[list[str]], None] = lambda _: None,
) -> dict[str, Any]:
    """The result for each host, done in parallel within ``supervision.start_timeout_s``.

    ``count`` are the hosts of the command, and ``tell`` hears who is still awaited. Raises HostFailed.
    """
    limit = config.supervision.start_timeout_s
    loop = asyncio.get_running_loop()
    until = loop.time() + limit
    tasks = {name: asyncio.ensure_future(do(name)) for name in names}
    failures: dict[str, HostFailed] = {}
    waiting: list[str] = []
    try:
        while waiting := [name for name, task in tasks.items() if not task.done()]:
            left = until - loop.time()
            if left <= 0:
                break
            await asyncio.wait([tasks[name] for name in waiting], timeout=left, return_when="FIRST_COMPLETED")
            tell([name for name, task in tasks.items() if not task.done()])
            failed = [task for task in tasks.values() if task.done() and task.exception() is not None]
            if failed and not failures:
                until = min(until, loop.time() + MORE_FAILURES_S)
            failures = {name: _failure(name, task) for name, task in tasks.items() if task in failed}
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    if not failures:
        for name in waiting:
            said = contacts[name].last_error
            reason = f"not {what} within {limit:g} s (supervision.start_timeout_s)" + (f": {said}" if said else "")
            failures[name] = HostFailed(name, reason)
    if failures:
        raise _as_one(failures, count, progress)
    return {name: task.result() for name, task in tasks.items()}


def _as_one(failures: Mapping[str, HostFailed], count: int, progress: Progress) -> HostFailed:
    progress.end()
    if len(failures) == 1:
        return next(iter(failures.values()))
    progress.warn([f"  {failure}" for failure in failures.values()])
    reason = f"{len(failures)} of {count} hosts cannot take part, for the reasons listed above"
    return HostFailed(", ".join(failures), reason, exit_code=max(f.exit_code for f in failures.values()))


def _failure(name: str, task: asyncio.Future[Any]) -> HostFailed:
    error = task.exception()
    assert error is not None
    if isinstance(error, HostFailed):
        return error
    if isinstance(error, AsyncRLError | OSError | msgspec.MsgspecError | ValueError):
        return HostFailed(name, str(error))
    raise error
