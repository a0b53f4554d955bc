"""The end of a connection to one host at the launcher, before its agent lives, or at the doctor: reach it, ask it.

A contact is a process whose standard input and output lead to ``remote`` on the host, or to its like. It is in a
session of its own, so Ctrl-C reaches the launcher alone. Every answer has the caller's deadline. Lines that do not
belong to us, as a greeting by the user's shell, may come before the first answer and are passed over.

Fails with HostFailed, which names the host and why, in the words of the way that leads there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, Union

import msgspec

from asyncrl.core.errors import HostFailed
from asyncrl.launcher.common.agent_messages import HostOffer, Refusal
from asyncrl.launcher.hosts.start import StartCommand, last_line

LONGEST_LINE_BYTES = 64 << 20
GREETING_LINES = 1000
EXIT_S = 15.0
"""Time that a command has to exit once its output has ended."""
ERRORS_KEPT = 16 << 10
A = TypeVar("A")


class Contact:
    """The connection to one host. ``process`` is handed on to the follower of the host's agent.

    With ``any_host`` a host may have another version or unknown GPUs.
    """

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
