"""The doctor's end of its talk with one host: a process (ssh, or Python on this host) that answers lines.

Every answer is waited for under a deadline. A host that does not answer is lost for the rest of the examination, with
what ssh last said, and nothing of it is left running here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncrl.doctor.talk import Answer, Begin, Failed, HostFacts, ReadClock, Request, Time
from asyncrl.launcher.several import PASSED_ON
from asyncrl.launcher.start import StartCommand, last_line

REMOTE = ("-m", "asyncrl.doctor.host")
LONGEST_LINE = 16 << 20
CLOCK_ROUNDS = 5
KEPT_ERRORS = 64 << 10
END_S = 2.0
AnswerT = TypeVar("AnswerT", bound=Answer)
_DECODER: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class HostLost(Exception):
    """The host gives no more answers; its text says why."""


class Conversation:
    """The talk with one host; use it as a context."""

    def __init__(self, host: str, start: StartCommand, answer_s: float) -> None:
        self.host = host
        self._start, self._answer_s = start, answer_s
        self._process: asyncio.subprocess.Process | None = None
        self._errors = ""
        self._reading: asyncio.Task[None] | None = None

    async def begin(self) -> HostFacts:
        """Start the host's part. Raises HostLost."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._start.argv(self.host),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LONGEST_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise HostLost(f"{error.filename}: {error.strerror}") from None
        assert self._process.stderr is not None
        self._reading = asyncio.create_task(self._read_errors(self._process.stderr))
        env = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
        return await self.ask(Begin(deadline_s=3 * self._answer_s, folder=str(Path.cwd()), env=env), HostFacts)

    async def ask(self, request: Request, kind: type[AnswerT]) -> AnswerT:
        """The answer. Raises HostLost."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._answer_s):
                with contextlib.suppress(ConnectionError):
                    self._process.stdin.write(msgspec.json.encode(request) + b"\n")
                    await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError:
            what = type(request).__name__.lower()
            said = f"; it last said: {last_line(self._errors)}" if last_line(self._errors) else ""
            raise HostLost(f"no answer to {what!r} within {self._answer_s:g} s{said}") from None
        except ValueError:
            raise HostLost(f"a line of more than {LONGEST_LINE} bytes came") from None
        if not line:
            raise HostLost(await self._why_it_ended())
        try:
            answer = _DECODER.decode(line)
        except msgspec.DecodeError:
            raise HostLost(f"it said {line[:80]!r}, which is none of our words; is the shell there silent?") from None
        if isinstance(answer, Failed):
            raise HostLost(answer.reason)
        if not isinstance(answer, kind):
            raise HostLost(f"it answered {type(answer).__name__} where {kind.__name__} was due")
        return answer

    async def clock(self) -> list[tuple[float, float, float]]:
        """Rounds of (asked, the host's time, answered), s. Raises HostLost."""
        rounds = []
        for _ in range(CLOCK_ROUNDS):
            # The span by the clock that never jumps; only its beginning is taken from the other.
            begun, asked = time.monotonic(), time.time()
            there = (await self.ask(ReadClock(), Time)).wall_ns / 1e9
            rounds.append((asked, there, asked + time.monotonic() - begun))
        return rounds

    async def close(self) -> None:
        """Let the host's part end; after END_S it is killed."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert self._reading is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        finally:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def __aenter__(self) -> Conversation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read_errors(self, errors: asyncio.StreamReader) -> None:
        while data := await errors.read(4096):
            self._errors = (self._errors + data.decode(errors="replace"))[-KEPT_ERRORS:]

    async def _why_it_ended(self) -> str:
        assert self._process is not None
        assert self._reading is not None
        try:
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
                await asyncio.wait([self._reading])
        except TimeoutError:
            return f"it closed its output and does not end; it last said: {last_line(self._errors)}"
        return self._start.explain(self.host, code, self._errors)
