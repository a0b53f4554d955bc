"""The calls of the core that HTTP requests are waiting for, or have stopped waiting for.

A call outlives the connection that asked for it: for a grace in which a marked retry may come and listen to it again.
Then it is cancelled, which keeps its sampled tokens; a later retry calls the core again by the same name, and goes on.
Its outcome is kept for a while, and answers a retry as well. One task, ``watch``, does the forgetting.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from asyncrl.episodes.http.call_book import Call, CallBook
from asyncrl.episodes.http.dialects.dialect import ChatRequest
from asyncrl.errors import ChatRefused, EpisodeOver
from asyncrl.messages.episodes import Chat, ChatDelta, ChatReply
from asyncrl.telemetry.logging import Logger

MOST_OPEN = 1024
"""Calls of a session at a time."""
WATCH_SHARE = 0.25
"""Share of the shorter of grace and keeping that is the pause between two looks."""


class Core(Protocol):
    """The policy, for all sessions of this host."""

    model: str
    """The name under which the policy answers, under any name that it is asked by."""

    def knows(self, key: str) -> bool:
        """Whether there is such a session. It stays known for a while after its end, so that calls are told why.

        A key is 128 random bits and is looked up by its hash: the time it takes tells nothing of another.
        """

    async def chat(self, key: str, call: Chat, on_delta: Callable[[ChatDelta], None]) -> ChatReply:
        """The next message of the assistant; it waits for as long as that takes.

        The same call again goes on from its sampled tokens. Raises EpisodeOver, ChatRefused.
        """

    async def turn_reward(self, key: str, node: int | None, value: float) -> int:
        """Credit a node, or the one answered last; returns the node. Raises EpisodeOver, ChatRefused."""


class TooManyCalls(Exception):
    """A session has more calls open than any program needs."""


class Calls:
    """The open and kept calls of all sessions; ``grace_s`` and ``kept_s`` are seconds without a listener."""

    def __init__(
        self,
        core: Core,
        *,
        grace_s: float,
        kept_s: float,
        counts: Counter[str],
        log: Logger,
    ) -> None:
        self._core = core
        self._grace_s, self._kept_s = grace_s, kept_s
        self._counts = counts
        self._log = log
        self._books: dict[str, CallBook] = {}
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def held(self) -> tuple[int, int]:
        """Sessions with calls, and calls."""
        return len(self._books), sum(len(book.calls) for book in self._books.values())

    def find(self, key: str, asked: ChatRequest, identity: bytes, *, retried: bool, untrained: bool) -> Call:
        """The call that a request is. It is under way, unless its outcome is known. Raises TooManyCalls."""
        book = self._books.setdefault(key, CallBook())
        call = book.retried(identity) if retried else None
        if call is None:
            if book.open() >= MOST_OPEN:
                raise TooManyCalls(f"{MOST_OPEN} calls of the session are open already")
            call = book.new(identity, choices=asked.n, created=int(time.time()))
        else:
            self._counts["replayed" if call.settled else "joined" if call.running else "resumed"] += 1
        if not call.running and not call.settled:
            self._start(key, book, call, asked, untrained)
        return call

    @contextmanager
    def listening(self, call: Call) -> Iterator[asyncio.Event]:
        """An event that is set, for as long as this lasts, whenever there is more of the call."""
        news = asyncio.Event()
        call.listeners.add(news)
        try:
            yield news
        finally:
            call.listeners.discard(news)
            call.left = asyncio.get_running_loop().time()

    def node(self, key: str, number: int) -> int | None:
        """The node that answered a call."""
        book = self._books.get(key)
        return None if book is None else book.nodes.get(number)

    async def watch(self) -> None:
        """Give up and forget calls; a task of the actor's own, for as long as the endpoint lives."""
        pause = WATCH_SHARE * min(self._grace_s, self._kept_s)
        while True:
            await asyncio.sleep(pause)
            now = asyncio.get_running_loop().time()
            for key, book in list(self._books.items()):
                for call in book.given_up(now, grace_s=self._grace_s):
                    # It has another grace to end in.
                    call.left = now
                    self._tasks[call].cancel()
                book.forget(now, kept_s=self._kept_s)
                # A session that has calls is over only when these are.
                if not self._core.knows(key) and not book.open():
                    del self._books[key]

    async def close(self) -> None:
        """Cancel all that is under way."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: str, book: CallBook, call: Call, asked: ChatRequest, untrained: bool) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[call]
            call.running = False
            call.left = asyncio.get_running_loop().time()
            if task.cancelled() and call.listeners and not self._closed:
                # A retry came while it was being given up.
                self._start(key, book, call, asked, untrained)
            call.wake()

        call.running, call.outcome = True, None
        self._tasks[call] = asyncio.create_task(self._run(key, book, call, asked, untrained), name="chat")
        self._tasks[call].add_done_callback(ended)

    async def _run(self, key: str, book: CallBook, call: Call, asked: ChatRequest, untrained: bool) -> None:
        try:
            replies = await self._ask(key, call, asked, untrained)
            book.nodes[call.number] = replies[0].node
            call.outcome = replies
        except Exception as error:
            call.outcome = error
            if not call.settled:
                self._counts["failed"] += 1
                self._log.exception("a call of an episode failed", call=call.number)

    async def _ask(self, key: str, call: Call, asked: ChatRequest, untrained: bool) -> list[ChatReply]:
        def chat(choice: int) -> Chat:
            return Chat(
                session=key,
                call=f"http-{call.number}" if asked.n == 1 else f"http-{call.number}.{choice}",
                messages=asked.messages,
                tools=asked.tools,
                template_options=asked.template_options,
                max_tokens=asked.max_tokens,
                stop=asked.stop,
                # Calls of tools are read from the whole answer: there is no content before its end.
                stream=asked.stream and not asked.tools,
                untrained=untrained,
            )

        try:
            async with asyncio.TaskGroup() as group:
                chats = [
                    group.create_task(self._core.chat(key, chat(at), partial(call.hear, at))) for at in range(asked.n)
                ]
        except ExceptionGroup as failed:
            told = [error for error in failed.exceptions if isinstance(error, EpisodeOver | ChatRefused)]
            # An error that the client can be told is worth more than one of which it can only hear that there was one.
            raise (told[0] if told else failed.exceptions[0]) from None
        return [each.result() for each in chats]
