"""The hosts of a command: does work on all of them in parallel, under one deadline, and names each host that fails.

Fails with HostFailed. If several hosts failed, their reasons are shown before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from asyncrl.core.errors import AsyncRLError, HostFailed
from asyncrl.launcher.hosts.contact import Contact
from asyncrl.launcher.hosts.start import StartCommand
from asyncrl.launcher.terminal.progress import Progress

MORE_FAILURES_S = 3.0
"""Time that the other hosts have to fail too once one has failed, so that all are named."""
A = TypeVar("A")


@dataclass
class ReachedHosts:
    """The hosts that ``start`` leads to, by name, of the ``count`` hosts of a command.

    ``limit_s`` is supervision.start_timeout_s: the deadline of each piece of work.
    """

    start: StartCommand
    limit_s: float
    progress: Progress
    count: int
    contacts: dict[str, Contact] = field(default_factory=dict)

    async def reach(self, names: Sequence[str]) -> None:
        """Learn what each host has: the ``facts`` of its contact. Raises HostFailed."""
        self.contacts = {name: Contact(name, self.start) for name in names}
        if names:
            self.progress.reaching(list(names))
        work = {name: contact.reach() for name, contact in self.contacts.items()}
        await self._each(work, "reached", self.progress.reaching)

    async def ask(self, orders: Mapping[str, msgspec.Struct], answer: type[A], what: str) -> dict[str, A]:
        """The answer of each host to its order; an error says that a late host was not ``what``. Raises HostFailed."""
        return await self._each({name: self.contacts[name].ask(order, answer) for name, order in orders.items()}, what)

    async def close(self) -> None:
        """Leave the hosts, those excepted whose agents live."""
        await asyncio.gather(*(contact.close() for contact in self.contacts.values()))

    async def _each(
        self,
        work: Mapping[str, Awaitable[Any]],
        what: str,
        tell: Callable[[list[str]], None] = lambda _: None,
    ) -> dict[str, Any]:
        """The result for each host; ``tell`` receives the hosts that have not answered."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.limit_s
        tasks = {name: asyncio.ensure_future(each) for name, each in work.items()}
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
                said = self.contacts[name].last_error
                late = f"not {what} within {self.limit_s:g} s (supervision.start_timeout_s)"
                failures[name] = HostFailed(name, late + (f": {said}" if said else ""))
        if failures:
            raise self._as_one(failures)
        return {name: task.result() for name, task in tasks.items()}

    def _as_one(self, failures: Mapping[str, HostFailed]) -> HostFailed:
        self.progress.end()
        if len(failures) == 1:
            return next(iter(failures.values()))
        self.progress.warn([f"  {failure}" for failure in failures.values()])
        reason = f"{len(failures)} of {self.count} hosts cannot take part, for the reasons listed above"
        return HostFailed(", ".join(failures), reason, exit_code=max(f.exit_code for f in failures.values()))


def _failure(name: str, task: asyncio.Future[Any]) -> HostFailed:
    error = task.exception()
    assert error is not None
    if isinstance(error, HostFailed):
        return error
    if isinstance(error, AsyncRLError | OSError | msgspec.MsgspecError | ValueError):
        return HostFailed(name, str(error))
    raise error
