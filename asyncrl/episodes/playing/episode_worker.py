"""A worker process of the episode host: ``python -m asyncrl.episodes.playing.episode_worker FD [RUN_DIR]``.

Runs many episodes at a time as tasks of one event loop; plain code runs in threads. Invariant: errors, output and tasks
of an episode stay its own. The worker cancels the tasks that an episode leaves behind, and reports to the host how many
ignore it. A worker ends when the host closes the socket FD, or when its parent process dies. With RUN_DIR, the folder
of the run, it isolates itself (workers/isolation.py).

Output is separated by a context variable, which tasks and plain code of an episode inherit. Other output (of programs,
of users' own threads, of code in other languages, at import) is the worker's own. The first ``max_output_bytes`` of an
episode's output are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import ContextVar
from typing import Any, TextIO
from weakref import WeakSet

import msgspec

from asyncrl.core.errors import ChatRefused, EpisodeOver
from asyncrl.episodes.playing import episode_frames as frames
from asyncrl.episodes.playing.client import Client, Task
from asyncrl.episodes.playing.players import Player, resolve
from asyncrl.messages.episodes import Chat, ChatReply
from asyncrl.messages.reward import BadOutcome, read_outcome
from asyncrl.workers.user_code import NotCallable, Ready, describe, find_place, kind_of
from asyncrl.workers.worker import NO_SOCKET_EXIT, READ_BYTES, FrameReader, begin, end, framed

STOPPED = "it was stopped"
LINES_BYTES = 8192
"""Size up to which the text of an incomplete line is held back (bytes)."""
CHAT_PLACE = re.compile(r"\$\[1\]\.")
"""Prefix of field names in msgspec's errors, which the user does not see."""


class EpisodePrinter:
    """Passes an episode's output to ``send``, in whole lines where possible and up to ``limit`` bytes in all.

    ``send`` gets text and the number of bytes dropped since its last call. It is called from any thread.
    """

    def __init__(self, limit: int, send: Callable[[str, int], None]) -> None:
        self._send = send
        self._left = limit
        """Bytes that the episode may still print."""
        self._held: list[str] = []
        """Text that is held back until its line ends, or it has LINES_BYTES."""
        self._size = 0
        """Bytes of the text that is held back."""
        self._dropped = 0
        """Bytes dropped since the last call of ``send``."""

    def write(self, text: str) -> None:
        """Add text; bytes beyond the limit are dropped and counted."""
        # Half of a surrogate pair cannot be sent, so it is escaped.
        data = text.encode(errors="backslashreplace")
        if len(data) > self._left:
            # Cut between two characters. Later text is dropped even if it would fit.
            kept = data[: self._left].decode(errors="ignore").encode()
            self._dropped += len(data) - len(kept)
            data, self._left = kept, len(kept)
        if not data:
            return
        text = data.decode()
        self._left -= len(data)
        self._size += len(data)
        self._held.append(text)
        if "\n" in text or self._size >= LINES_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the text that is held back."""
        held, self._held, self._size = self._held, [], 0
        dropped, self._dropped = self._dropped, 0
        if held or dropped:
            self._send("".join(held), dropped)


current: ContextVar[EpisodePrinter | None] = ContextVar("current", default=None)
"""EpisodePrinter of the episode whose code runs; None outside of episodes."""


class Apart:
    """Replaces a standard stream: text goes to the EpisodePrinter of the episode that writes it.

    Bytes, and text that no episode writes, go to the original ``stream``.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text for the episode whose code runs, or to the original stream outside of episodes."""
        printer = current.get()
        if printer is None:
            return self._stream.write(text)
        printer.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines as ``write`` does."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the original stream outside of episodes. Text of an episode is sent by lines."""
        if current.get() is None:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def separate_output() -> None:
    """Separate the output of episodes from now on, in this process."""
    sys.stdout, sys.stderr = Apart(sys.stdout), Apart(sys.stderr)


class PlayedEpisode:
    """One episode: its calls of the policy, as a PolicyHandler (client.py), and the tasks that its code has made."""

    def __init__(self, worker: EpisodeWorker, key: str) -> None:
        self._worker, self.key = worker, key
        self._open_calls: dict[str, asyncio.Future[ChatReply]] = {}
        """Future answers of open calls of the policy, by the call's name."""
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        """asyncio tasks that the user's code has made; those that it leaves are cancelled."""
        self.over = ""
        """Reason that the episode takes no more calls; empty while it does."""
        self.running = False
        """Whether the user's code runs."""

    async def chat(self, chat: Chat) -> ChatReply:
        """Send a call of the policy to the host and wait for its answer, as PolicyHandler says."""
        if self.over:
            raise EpisodeOver(self.over)
        answer = self._open_calls[chat.call] = asyncio.get_running_loop().create_future()
        try:
            self._worker.ask(chat)
            try:
                reply: ChatReply = await answer
            except asyncio.CancelledError:
                self._worker.send(frames.GaveUp(self.key, chat.call))
                raise
            return reply
        finally:
            del self._open_calls[chat.call]

    def reward(self, node: int | None, value: float) -> None:
        """Send a turn's reward to the host, as PolicyHandler says; callable from any thread."""
        if not self.over:
            self._worker.send_soon(frames.Rewarded(self.key, node, value))

    def answer(self, call: str, reply: ChatReply | Exception) -> None:
        """Give the host's answer, or its refusal, to the call that waits for it."""
        answer = self._open_calls.get(call)
        if answer is None or answer.done():
            return
        if isinstance(reply, Exception):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)

    def end(self, reason: str) -> None:
        """End the open calls with EpisodeOver, and refuse later ones."""
        self.over = self.over or reason
        for call in list(self._open_calls):
            self.answer(call, EpisodeOver(reason))


_session: ContextVar[PlayedEpisode | None] = ContextVar("session", default=None)
"""The episode whose code runs; None outside of episodes."""


class EpisodeWorker:
    """Plays episodes for the host at the other end of the socket."""

    def __init__(self, setup: frames.EpisodeSetup, player: Player, writer: asyncio.StreamWriter) -> None:
        self._setup, self._player, self._writer = setup, player, writer
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._loop.set_task_factory(_owned_task)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(frames.Asked)
        self._sessions: dict[str, PlayedEpisode] = {}
        """Episodes whose end was not reported, by session key."""
        self._episodes: dict[str, asyncio.Task[None]] = {}
        """The task that runs each of these episodes (``_play``)."""

    def take(self, message: frames.ToWorker) -> None:
        """Act on a message of the host: begin or stop an episode, or give an answer or a refusal to its call."""
        match message:
            case frames.Play(key, task):
                session = self._sessions[key] = PlayedEpisode(self, key)
                self._episodes[key] = self._loop.create_task(self._play(key, session, task))
            case frames.Answered(key, call, reply):
                if key in self._sessions:
                    self._sessions[key].answer(call, reply)
            case frames.Denied(key, call):
                if key in self._sessions:
                    self._sessions[key].answer(call, _denial(message))
            case frames.StopEpisode(key):
                if key in self._sessions:
                    self._sessions[key].end(STOPPED)
                    # Cancel only the user's code. Before and after it, the task has to report the end.
                    if self._sessions[key].running:
                        self._episodes[key].cancel()

    def ask(self, chat: Chat) -> None:
        """Send a call of the policy. Raises ChatRefused for one that is too large, or that the host could not read."""
        try:
            body = self._encoder.encode(frames.Asked(chat))
        except Exception as error:
            raise ChatRefused(self._unsendable(chat), f"cannot be sent: {error}") from error
        if len(body) > self._setup.max_request_bytes:
            raise ChatRefused(
                "messages",
                f"are {len(body)} bytes, {self._setup.max_request_bytes} are allowed (episode.max_request_bytes)",
            )
        try:
            # Decoded as the host does it: there an invalid call would end this worker instead of being refused.
            self._decoder.decode(body)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at ")
            raise ChatRefused(CHAT_PLACE.sub("", place).strip("`") or "messages", problem) from error
        self._write(body)

    def _unsendable(self, chat: Chat) -> str:
        """The first field that cannot be encoded."""
        for name, value in msgspec.structs.asdict(chat).items():
            try:
                self._encoder.encode(value)
            except Exception:
                return name
        return "messages"

    def send(self, message: frames.ToHost) -> None:
        """Send to the host, from the event loop."""
        self._write(self._encoder.encode(message))

    def send_soon(self, message: frames.ToHost) -> None:
        """Send to the host, from any thread, in order."""
        if threading.get_ident() == self._thread:
            self.send(message)
        else:
            self._loop.call_soon_threadsafe(self.send, message)

    def _write(self, body: bytes) -> None:
        self._writer.write(framed(body))

    async def beat(self) -> None:
        """Send Alive every ``alive_s``, for as long as the event loop runs."""
        while True:
            self.send(frames.Alive())
            await asyncio.sleep(self._setup.alive_s)

    async def _play(self, key: str, session: PlayedEpisode, task: Task) -> None:
        """Run the user's code for one task, end the asyncio tasks that it left behind, and report the outcome.

        An episode that was stopped before this coroutine began does not run.
        """
        if session.over:
            self._report_end(frames.Ended(key, error=STOPPED))
            return
        printer = EpisodePrinter(
            self._setup.max_output_bytes, lambda text, dropped: self.send_soon(frames.Printed(key, text, dropped))
        )
        client = Client(session, session=key, model=self._setup.model, base_url=self._setup.base_url)
        ended = await self._outcome(key, session, printer, self._player(task, client))
        # The session ends first, so that calls of the policy raise EpisodeOver while the tasks end.
        session.end("the user's code has ended")
        ended = msgspec.structs.replace(ended, left=await self._end_tasks(session))
        printer.flush()
        # The report must follow the messages that threads have queued for this episode.
        self._loop.call_soon(self._report_end, ended)

    def _report_end(self, ended: frames.Ended) -> None:
        """Forget an episode and report its end. A result that cannot be sent or is too large becomes an error."""
        del self._sessions[ended.session], self._episodes[ended.session]
        try:
            body = self._encoder.encode(ended)
        except Exception as error:
            body = self._encoder.encode(
                frames.Ended(ended.session, error=f"ended with a result that cannot be sent: {describe(error)}")
            )
        if len(body) > frames.SMALL_BYTES:
            body = self._encoder.encode(
                frames.Ended(ended.session, error=f"returned components of {len(body)} bytes in all")
            )
        self._write(body)

    async def _outcome(self, key: str, session: PlayedEpisode, printer: EpisodePrinter, playing: Any) -> frames.Ended:
        """Await the user's code (``playing``) and return its outcome, or its error as text.

        EpisodeOver, alone or in groups, is a good end without a reward. Nothing that the code raises, SystemExit
        included, may end the worker.
        """
        current.set(printer)
        _session.set(session)
        session.running = True
        try:
            value = await playing
            return frames.Ended(key) if value is None else frames.Ended(key, *read_outcome(value))
        except EpisodeOver:
            return frames.Ended(key)
        except BadOutcome as error:
            place = find_place(self._setup.code[0])
            return frames.Ended(key, error=f"{error}{f' ({place})' if place else ''}", kind="no reward")
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and session.over:
                return frames.Ended(key, error=STOPPED)
            if isinstance(error, BaseExceptionGroup) and error.split(EpisodeOver)[1] is None:
                # A TaskGroup raises its errors as a group; this one holds EpisodeOver alone.
                return frames.Ended(key)
            return frames.Ended(key, error=f"raised {describe(error)}", kind=kind_of(error))
        finally:
            # Output and new tasks belong to the worker from here on.
            session.running = False
            current.set(None)
            _session.set(None)

    async def _end_tasks(self, session: PlayedEpisode) -> int:
        """Cancel the tasks that the episode has left behind; returns how many still run after ``close_timeout_s``."""
        leftover = [task for task in session.tasks if not task.done()]
        for task in leftover:
            task.cancel()
        if not leftover:
            return 0
        _, still_running = await asyncio.wait(leftover, timeout=self._setup.close_timeout_s)
        return len(still_running)


def _owned_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """Task factory of the event loop: adds each new task to the episode whose code makes it."""
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **kwargs)
    if (session := _session.get()) is not None:
        session.tasks.add(task)
    return task


def _denial(message: frames.Denied) -> Exception:
    """Make the exception that the call of the policy raises in the user's code."""
    if message.over:
        return EpisodeOver(message.reason)
    return ChatRefused(message.field, message.reason) if message.field else ConnectionError(message.reason)


async def serve(connection: socket.socket) -> None:
    """Receive EpisodeSetup, load the user's code, send Ready, then play episodes until the host hangs up.

    If the code cannot be used, Ready has the problems, and no episode is played.
    """
    reader, writer = await asyncio.open_connection(sock=connection)
    messages = _messages(reader)
    setup = await anext(messages, None)
    if not isinstance(setup, frames.EpisodeSetup):
        return

    def note(tool: str, error: Exception | None, mistaken: bool) -> None:
        """Report a tool call of the episode whose code runs. ``worker`` is made below, before the first episode."""
        if (session := _session.get()) is not None:
            error_and_kind = ("", "") if error is None else (describe(error), kind_of(error))
            worker.send_soon(frames.Noted(session.key, tool, *error_and_kind, mistaken))

    try:
        player = resolve(setup.kind, setup.code, setup.options, note)
    except NotCallable as error:
        writer.write(framed(msgspec.msgpack.encode(Ready(error.problems))))
        await writer.drain()
        return
    worker = EpisodeWorker(setup, player, writer)
    writer.write(framed(msgspec.msgpack.encode(Ready())))
    beating = asyncio.create_task(worker.beat())
    async for message in messages:
        worker.take(message)
    beating.cancel()


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[frames.ToWorker]:
    """Yield the messages of the host until it hangs up."""
    whole, decoder = FrameReader(1 << 30), msgspec.msgpack.Decoder(frames.ToWorker)
    while data := await reader.read(READ_BYTES):
        for body in whole.feed(data):
            yield decoder.decode(body)


def main() -> None:
    """Serve the host at the other end of the socket whose file descriptor is the first argument."""
    connection = begin("asyncrl episodes worker")
    separate_output()
    try:
        with contextlib.suppress(ConnectionError):
            asyncio.run(serve(connection))
    except OSError:
        # The user's code has closed the socket.
        end(NO_SOCKET_EXIT)
    # Threads of the user's code may never end.
    os._exit(0)


if __name__ == "__main__":
    main()
