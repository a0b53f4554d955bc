"""The end of a connection to one host at the launcher, before its agent lives, or at the doctor: reach it, ask it.

A contact is a process whose standard input and output lead to ``remote`` on the host, or to its like. It is in a
session of its own, so Ctrl-C reaches the launcher alone. Every answer has the caller's deadline. Lines that do not
belong to us, as a greeting by the user's shell, may come before the first answer and are passed over.

``ReachedHosts`` are the hosts of a command, with work on all of them in parallel. Fails with HostFailed, which names
the host and why, in the words of the way that leads there. If several hosts failed, their reasons are shown before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, Union

import msgspec

from asyncrl.core.errors import AsyncRLError, HostFailed
from asyncrl.launcher.common.agent_messages import HostOffer, Refusal
from asyncrl.launcher.hosts.start import StartCommand, last_line
from asyncrl.launcher.terminal.progress import TerminalProgress

LONGEST_LINE_BYTES = 64 << 20
GREETING_LINES = 1000
EXIT_S = 15.0
"""Time that a command has to exit once its output has ended."""
ERRORS_KEPT = 16 << 10
A = TypeVar("A")
MORE_FAILURES_S = 3.0
"""Time that the other hosts have to fail too once one has failed, so that all are named."""


class Contact:
    """The connection to one host. ``process`` is handed on to the follower of the host's agent.

    With ``any_host`` a host may have another version or unknown GPUs.
    """

    is_here = False
    """Whether it is this host, and ``process`` the guard itself: no connection leads there, and none is lost."""

    def __init__(self, name: str, start: StartCommand, *, any_host: bool = False) -> None:
        self.name, self.start, self._any_host = name, start, any_host
        self.facts: HostOffer
        self.process: asyncio.subprocess.Process
        self.asked = ""
        """The last order, in a word."""
        self._errors = b""
        self._log: Path | None = None
        self._reading: asyncio.Task[None] | None = None

    async def reach(self) -> None:
        """Start the command and hear what the host offers. Raises HostFailed."""
        argv = self.start.argv(self.name)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=LONGEST_LINE_BYTES,
            )
        except OSError as error:
            raise HostFailed(self.name, f"{argv[0]}: {error.strerror}") from None
        self._reading = asyncio.create_task(self._read_errors())
        assert self.process.stdout is not None
        for _ in range(GREETING_LINES):
            line = await self.process.stdout.readline()
            if not line:
                raise await self._failure()
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and found.get("type") in ("facts", "refusal"):
                    self._take_facts(found)
                    return
        raise HostFailed(self.name, "says a great deal, but nothing of asyncrl")

    def _take_facts(self, found: dict[str, Any]) -> None:
        if found["type"] == "refusal":
            raise HostFailed(self.name, str(found.get("reason")))
        ours = version("asyncrl")
        if not self._any_host and found.get("version") != ours:
            raise HostFailed(
                self.name, f"asyncrl {found.get('version')} is installed there, {ours} here; make them equal"
            )
        self.facts = msgspec.convert(found, HostOffer)
        if self.facts.gpu_problem and not self._any_host:
            raise HostFailed(self.name, self.facts.gpu_problem)

    async def ask(self, order: msgspec.Struct, answer: type[A]) -> A:
        """Give an order and wait for its answer. Raises HostFailed, or ValueError if something else comes."""
        assert self.process.stdout is not None
        self.asked = type(order).__name__.lower()
        self.send(msgspec.json.encode(order) + b"\n")
        line = await self.process.stdout.readline()
        if not line:
            raise await self._failure()
        found: A | Refusal = msgspec.json.decode(line, type=Union[answer, Refusal])  # noqa: UP007
        if isinstance(found, Refusal):
            raise HostFailed(self.name, found.reason, exit_code=found.exit_code)
        return found

    def send(self, data: bytes) -> None:
        """Write to the host's standard input; lost if it is not there any more."""
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(data)

    def hang_up(self) -> None:
        """End the host's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def keep_errors(self, log: Path) -> None:
        """Append the command's own words to this file from now on, together with those that it has said."""
        self._log = log
        if self._errors:
            self._append(self._errors)

    async def close(self, within_s: float = EXIT_S) -> None:
        """End the command, and what it leads to if that has not become the guard. May be repeated."""
        if not hasattr(self, "process"):
            return
        self.hang_up()
        await self.exited(within_s)

    def kill(self) -> None:
        """End the command at once."""
        if hasattr(self, "process"):
            self._kill()

    async def exited(self, within_s: float = EXIT_S) -> int:
        """Exit code of the command, after its output has ended; it is killed unless it ends by itself in time."""
        try:
            async with asyncio.timeout(within_s):
                await self.process.wait()
        except TimeoutError:
            self._kill()
            await self.process.wait()
        await self._stop_reading()
        assert self.process.returncode is not None
        return self.process.returncode

    def is_lost(self, exit_code: int) -> bool:
        """Whether the command, which has ended with this code, did so because its connection did."""
        return self.start.is_lost(exit_code, self._said)

    @property
    def last_error(self) -> str:
        """The last line of what the command itself has said."""
        return last_line(self._said)

    @property
    def _said(self) -> str:
        return self._errors.decode(errors="replace")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def _failure(self) -> HostFailed:
        code = await self.exited()
        return HostFailed(self.name, self.start.explain(self.name, code, self._said))

    async def _stop_reading(self) -> None:
        if self._reading is not None:
            # Words of the command may still be on their way; a process that it has left behind may keep its end open.
            await asyncio.wait([self._reading], timeout=0.5)
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while piece := await self.process.stderr.read(ERRORS_KEPT):
            self._errors = (self._errors + piece)[-ERRORS_KEPT:]
            if self._log is not None:
                self._append(piece)

    def _append(self, piece: bytes) -> None:
        assert self._log is not None
        with contextlib.suppress(OSError), open(self._log, "ab") as file:
            file.write(piece)


@dataclass
class ReachedHosts:
    """The hosts that ``start`` leads to, by name, of the ``count`` hosts of a command.

    ``limit_s`` is supervision.start_timeout_s: the deadline of each piece of work.
    """

    start: StartCommand
    limit_s: float
    progress: TerminalProgress
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
