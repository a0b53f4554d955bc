"""Connects the launcher, or the doctor, to a host before an agent runs there: starts its entry point and sends orders.

A contact is the connection to one host. Its process, such as ssh, leads to the standard input and output of the entry
point (remote.py) there. The process has its own session, so Ctrl-C reaches only the launcher. The caller sets a
deadline for every answer. Lines before the host's offer, such as a greeting of the user's shell, are skipped.

``ReachedHosts`` works on all hosts of a command in parallel. Fails with HostFailed, which has the name of the host and
the reason. If several hosts fail, their reasons are printed as warnings, and HostFailed has the names and a count.
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
from asyncrl.launcher.checks.findings import ALL_HOSTS, Finding, on_host
from asyncrl.launcher.common.agent_messages import HostOffer, Refusal
from asyncrl.launcher.hosts.start import StartCommand, last_line
from asyncrl.launcher.terminal.progress import TerminalProgress

LONGEST_LINE_BYTES = 64 << 20
GREETING_LINES = 1000
"""Most lines that are read in search of the host's offer."""
EXIT_S = 15.0
"""Seconds that a command has to exit once its output has ended."""
ERRORS_KEPT = 16 << 10
"""Bytes that are kept from the end of a command's standard error."""
A = TypeVar("A")
"""Type of the answer to an order."""
MORE_FAILURES_S = 3.0
"""Seconds that the other hosts have to fail too once one has failed, so that the error names all."""


class Contact:
    """The connection to one host, through ``process``. The launcher later follows the host's agent over it too.

    With ``any_host`` a host may have another version of asyncrl or unknown GPUs; otherwise that is an error.
    """

    is_here = False
    """Whether ``process`` is the guard of this host (LocalGuard in host_part.py), so no connection can be lost."""

    def __init__(self, name: str, start: StartCommand, *, any_host: bool = False) -> None:
        self.name, self.start, self._any_host = name, start, any_host
        self.facts: HostOffer
        self.process: asyncio.subprocess.Process
        self.asked = ""
        """Type of the last order, in lower case; empty before the first."""
        self._errors = b""
        """The end of the command's standard error, at most ERRORS_KEPT bytes."""
        self._log: Path | None = None
        """File that also gets standard error, from ``keep_errors`` on; None before."""
        self._reading: asyncio.Task[None] | None = None
        """Task that reads standard error; None before ``reach`` and after ``exited``."""

    async def reach(self) -> None:
        """Start the command, and set ``facts`` to what the host offers.

        Skips up to GREETING_LINES other lines. Raises HostFailed, also for another version of asyncrl or unknown GPUs,
        unless ``any_host`` allows these.
        """
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
                raise await self._exit_failure()
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict) and message.get("type") in ("facts", "refusal"):
                    self._accept_offer(message)
                    return
        raise HostFailed(self.name, "says a great deal, but nothing of asyncrl")

    def _accept_offer(self, message: dict[str, Any]) -> None:
        if message["type"] == "refusal":
            raise HostFailed(self.name, str(message.get("reason")))
        own_version = version("asyncrl")
        if not self._any_host and message.get("version") != own_version:
            raise HostFailed(
                self.name, f"asyncrl {message.get('version')} is installed there, {own_version} here; make them equal"
            )
        self.facts = msgspec.convert(message, HostOffer)
        if self.facts.gpu_problem and not self._any_host:
            raise HostFailed(self.name, self.facts.gpu_problem)

    async def ask(self, order: msgspec.Struct, answer: type[A]) -> A:
        """Send an order and return its answer. Raises HostFailed, or ValueError for an answer of another type."""
        assert self.process.stdout is not None
        self.asked = type(order).__name__.lower()
        self.send(msgspec.json.encode(order) + b"\n")
        line = await self.process.stdout.readline()
        if not line:
            raise await self._exit_failure()
        reply: A | Refusal = msgspec.json.decode(line, type=Union[answer, Refusal])  # noqa: UP007
        if isinstance(reply, Refusal):
            raise HostFailed(self.name, reply.reason, exit_code=reply.exit_code)
        return reply

    def send(self, data: bytes) -> None:
        """Write to the host's standard input. The data is lost if the input is closed."""
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(data)

    def hang_up(self) -> None:
        """Close the host's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def keep_errors(self, log: Path) -> None:
        """From now on append the command's standard error to this file, after what it has written so far."""
        self._log = log
        if self._errors:
            self._append(self._errors)

    async def close(self, within_s: float = EXIT_S) -> None:
        """End the command, and the entry point on the host unless it has become the guard. May be called again."""
        if not hasattr(self, "process"):
            return
        self.hang_up()
        await self.exited(within_s)

    def kill(self) -> None:
        """Kill the command, if it was started."""
        if hasattr(self, "process"):
            self._kill()

    async def exited(self, within_s: float = EXIT_S) -> int:
        """Wait for the command to exit, kill it after ``within_s`` seconds, and return its exit code.

        Call this once its output has ended, or its input is closed.
        """
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
        """Whether the command ended with this exit code because its connection broke."""
        return self.start.is_lost(exit_code, self._error_text)

    @property
    def last_error(self) -> str:
        """The last line of the command's standard error; empty if it wrote nothing there."""
        return last_line(self._error_text)

    @property
    def _error_text(self) -> str:
        return self._errors.decode(errors="replace")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def _exit_failure(self) -> HostFailed:
        """Wait for the command to exit, and return the error that explains its end."""
        code = await self.exited()
        return HostFailed(self.name, self.start.explain(self.name, code, self._error_text))

    async def _stop_reading(self) -> None:
        if self._reading is not None:
            # Some output may not have been read yet. A process that the command left behind may keep its end open.
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
    """The contacts, by name, to those of a command's ``count`` hosts that ``start`` leads to.

    Without a limit of its own, a method has ``limit_s`` (supervision.start_timeout_s) for all hosts together.
    """

    start: StartCommand
    limit_s: float
    progress: TerminalProgress
    count: int
    contacts: dict[str, Contact] = field(default_factory=dict)

    async def reach(self, names: Sequence[str]) -> None:
        """Connect to these hosts and learn what each offers (``Contact.facts``). Raises HostFailed."""
        self.contacts = {name: Contact(name, self.start) for name in names}
        if names:
            self.progress.reaching(list(names))
        work = {name: contact.reach() for name, contact in self.contacts.items()}
        await self._wait_for_all(work, "reached", self.progress.reaching)

    async def ask(
        self,
        orders: Mapping[str, msgspec.Struct],
        answer: type[A],
        what: str,
        limit_s: float | None = None,
        key: str = "supervision.start_timeout_s",
    ) -> dict[str, A]:
        """Send each host its order and return the answers. A late host fails as "not ``what``". Raises HostFailed.

        ``key`` is the configuration key of ``limit_s``.
        """
        work = {name: self.contacts[name].ask(order, answer) for name, order in orders.items()}
        return await self._wait_for_all(work, what, limit_s=limit_s, key=key)

    async def collect(
        self,
        orders: Mapping[str, msgspec.Struct],
        answer: type[Any],
        own: Callable[[Any], Awaitable[Any]],
        what: str,
        limit_s: float | None = None,
        key: str = "supervision.start_timeout_s",
    ) -> list[Finding]:
        """Send orders as ``ask`` does, and return the findings in the answers, with their hosts if there are several.

        Meanwhile ``own`` carries out the order of a host without a contact, which is this one. Raises HostFailed.
        """
        working = {name: asyncio.ensure_future(own(orders[name])) for name in orders if name not in self.contacts}
        try:
            sent = {name: order for name, order in orders.items() if name not in working}
            answers = await self.ask(sent, answer, what, limit_s, key)
            answers = {name: await task for name, task in working.items()} | answers
        finally:
            for task in working.values():
                task.cancel()
            await asyncio.gather(*working.values(), return_exceptions=True)
        hosts = {name: name if self.count > 1 else ALL_HOSTS for name in answers}
        return [finding for name, each in answers.items() for finding in on_host(hosts[name], each.findings)]

    async def close(self) -> None:
        """Close all connections. Agents that run already continue."""
        await asyncio.gather(*(contact.close() for contact in self.contacts.values()))

    async def _wait_for_all(
        self,
        work: Mapping[str, Awaitable[Any]],
        what: str,
        show_waiting: Callable[[list[str]], None] = lambda _: None,
        *,
        limit_s: float | None = None,
        key: str = "supervision.start_timeout_s",
    ) -> dict[str, Any]:
        """Wait for the work of all hosts and return the results. ``show_waiting`` receives the hosts that still work.

        After the first failure, waits MORE_FAILURES_S at most for others, then cancels the rest and reports only the
        failures. Without a failure, hosts that take longer than ``limit_s`` fail. Raises HostFailed.
        """
        loop = asyncio.get_running_loop()
        limit_s = self.limit_s if limit_s is None else limit_s
        until = loop.time() + limit_s
        tasks = {name: asyncio.ensure_future(awaitable) for name, awaitable in work.items()}
        failures: dict[str, HostFailed] = {}
        waiting: list[str] = []
        try:
            while waiting := [name for name, task in tasks.items() if not task.done()]:
                left_s = until - loop.time()
                if left_s <= 0:
                    break
                await asyncio.wait([tasks[name] for name in waiting], timeout=left_s, return_when="FIRST_COMPLETED")
                show_waiting([name for name, task in tasks.items() if not task.done()])
                failed = [task for task in tasks.values() if task.done() and task.exception() is not None]
                if failed and not failures:
                    until = min(until, loop.time() + MORE_FAILURES_S)
                failures = {name: _failure_of(name, task) for name, task in tasks.items() if task in failed}
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        if not failures:
            for name in waiting:
                last_error = self.contacts[name].last_error
                late = f"not {what} within {limit_s:g} s ({key})"
                failures[name] = HostFailed(name, late + (f": {last_error}" if last_error else ""))
        if failures:
            raise self._show_and_combine(failures)
        return {name: task.result() for name, task in tasks.items()}

    def _show_and_combine(self, failures: Mapping[str, HostFailed]) -> HostFailed:
        """Return the only failure. If there are several, show all, and return an error with their number."""
        self.progress.end()
        if len(failures) == 1:
            return next(iter(failures.values()))
        self.progress.warn([f"  {failure}" for failure in failures.values()])
        reason = f"{len(failures)} of {self.count} hosts cannot take part, for the reasons listed above"
        return HostFailed(", ".join(failures), reason, exit_code=max(f.exit_code for f in failures.values()))


def _failure_of(name: str, task: asyncio.Future[Any]) -> HostFailed:
    """Return the error of a host's failed task as HostFailed. Raises an unexpected error as it is."""
    error = task.exception()
    assert error is not None
    if isinstance(error, HostFailed):
        return error
    if isinstance(error, AsyncRLError | OSError | msgspec.MsgspecError | ValueError):
        return HostFailed(name, str(error))
    raise error
