"""The calls of the policy that HTTP requests wait for, and their retries.

A listener of a call is a request that waits for it. If the last listener's connection breaks, the call continues for
``Patience.grace_s``, in which a marked retry may join it. Then it is cancelled, which keeps its sampled tokens; a later
retry makes the same call and continues them. Outcomes are kept for ``Patience.kept_s`` and answer retries too.
``PolicyCalls.cancel_abandoned`` cancels and forgets calls.

Invariant: a request without the mark of a retry (endpoint.py) is a new sample, even if its body was seen before. A
marked retry gets a kept call of the same request, or a new call without one. The first choice is the oldest call that
lost its connection, then the newest delivered call, then the newest call with a listener. A session keeps at most
MOST_KEPT ended calls, each for ``kept_s``.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from asyncrl.core.errors import ChatRefused, EpisodeOver
from asyncrl.episodes.http.dialect import ChatRequest
from asyncrl.messages.episodes import Chat, ChatDelta, ChatReply
from asyncrl.observe.logging import Logger

MOST_KEPT = 16
"""Most ended calls of a session that are kept for retries."""

Outcome = Sequence[ChatReply] | Exception
MOST_OPEN = 1024
"""Most calls of a session that may be open at a time."""
WATCH_SHARE = 0.25
"""Pause between two checks of ``cancel_abandoned``, as a share of the shorter of ``grace_s`` and ``kept_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The time limits of an endpoint, in seconds."""

    keep_alive_s: float = 1.0
    """Longest pause between two signs of life to a client that waits."""
    client_timeout_s: float = 60.0
    """Longest time in which a client sends a body, or takes a part of the answer."""
    grace_s: float = 10.0
    """Time for which a call continues after its last connection broke, so that a retry may join it."""
    kept_s: float = 60.0
    """Time for which the outcome of a call is kept."""


USUAL = Patience()


@dataclass(eq=False, kw_only=True)
class Call:
    """One request to the policy for n choices; each choice is one ``Core.chat``."""

    number: int
    """Number within the session, from 0."""
    identity: bytes
    """Digest of the request; a retry has the same."""
    created: int
    """Unix seconds."""
    texts: list[str]
    """Content of each choice that has been sampled so far."""
    running: bool = False
    outcome: Outcome | None = None
    """The replies, one for each choice, or the error in their place; None before the end."""
    delivered: bool = False
    """Whether a client has received the whole answer."""
    listeners: set[asyncio.Event] = field(default_factory=set)
    """One event for each listener, set when there is new text and at the end."""
    left: float = 0.0
    """Loop time (s) when a listener last left, or the call ended."""

    @property
    def settled(self) -> bool:
        """Whether a retry gets this outcome: the replies or a refusal. Before the end, and after another error, it is
        False: then a retry joins the call or asks the policy again."""
        return not isinstance(self.outcome, Exception | None) or isinstance(self.outcome, EpisodeOver | ChatRefused)

    def hear(self, choice: int, delta: ChatDelta) -> None:
        """Add the new text of ``delta`` to a choice, without the part that is there already.

        After a gap nothing is added: the reply has all text.
        """
        text = self.texts[choice]
        overlap = len(text) - delta.offset
        if 0 <= overlap < len(delta.text):
            self.texts[choice] = text + delta.text[overlap:]
            self.wake()

    def wake(self) -> None:
        """Wake the listeners."""
        for listener in self.listeners:
            listener.set()


class CallBook:
    """The calls of one session."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        """Calls of the session, oldest first."""
        self.nodes: dict[int, int] = {}
        """By call number: the node of its first choice. A stream's id has the call's number, as its node is unknown."""
        self._next = 0
        """Number of the next call."""

    def new(self, identity: bytes, *, choices: int, created: int) -> Call:
        """Add a call for a new sample."""
        call = Call(number=self._next, identity=identity, created=created, texts=[""] * choices)
        self._next += 1
        self.calls.append(call)
        return call

    def retried(self, identity: bytes) -> Call | None:
        """Find the call that a marked retry repeats, in the order that the module gives; None without one."""
        same = [call for call in self.calls if call.identity == identity]
        disconnected = [call for call in same if not call.listeners and not call.delivered]
        if disconnected:
            return disconnected[0]
        answered = [call for call in same if not call.listeners]
        return (answered or same)[-1] if same else None

    def open(self) -> int:
        """Number of calls that run or have a listener."""
        return sum(1 for call in self.calls if call.running or call.listeners)

    def given_up(self, now: float, *, grace_s: float) -> Iterator[Call]:
        """Return the running calls without a listener whose last one left at least ``grace_s`` ago."""
        return (call for call in self.calls if call.running and not call.listeners and now - call.left >= grace_s)

    def forget(self, now: float, *, kept_s: float) -> None:
        """Drop ended calls that had no listener for ``kept_s``, and the oldest ended calls beyond MOST_KEPT."""
        ended = [call for call in self.calls if not call.running and not call.listeners]
        surplus = len(ended) - MOST_KEPT
        dropped = {call for at, call in enumerate(ended) if at < surplus or now - call.left >= kept_s}
        self.calls = [call for call in self.calls if call not in dropped]


class Core(Protocol):
    """The policy as the endpoint sees it, with all sessions of this host."""

    model: str
    """Name of the policy in answers; requests may use any name."""

    def knows(self, key: str) -> bool:
        """Whether the session is known. It stays known for a while after its end, so that later calls get the reason.

        A key is 128 random bits and is looked up by its hash, so timing reveals nothing about other keys.
        """

    async def chat(self, key: str, call: Chat, on_delta: Callable[[ChatDelta], None]) -> ChatReply:
        """Ask for the next message of the assistant; waits until the deadline of the episode.

        The same call again continues its sampled tokens. Raises EpisodeOver, ChatRefused, OSError.
        """

    async def turn_reward(self, key: str, node: int | None, value: float) -> int:
        """Reward ``node``, or the newest answer without it; returns the node. Raises as ``chat``."""


class TooManyCalls(Exception):
    """A session has more calls open than any program needs."""


class PolicyCalls:
    """The open and kept calls of all sessions."""

    def __init__(self, core: Core, patience: Patience, counts: Counter[str], log: Logger) -> None:
        self._core, self._patience, self._counts, self._log = core, patience, counts, log
        self._books: dict[str, CallBook] = {}
        """Calls of each session, by its key."""
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        """By running call: the task that asks the policy."""
        self._closed = False
        """Whether ``close`` was called: a cancelled call then does not start again."""

    @property
    def held(self) -> tuple[int, int]:
        """Number of sessions with calls, and number of calls."""
        return len(self._books), sum(len(book.calls) for book in self._books.values())

    def find(self, key: str, asked: ChatRequest, identity: bytes, *, retried: bool, untrained: bool) -> Call:
        """Find the call that a marked retry repeats, or else make a new one; start it unless it runs or is settled.

        ``identity`` is the digest of the request. Raises TooManyCalls.
        """
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
        """Make a listener of the call for the context: yields an event that is set at new text and at the end."""
        news = asyncio.Event()
        call.listeners.add(news)
        try:
            yield news
        finally:
            call.listeners.discard(news)
            call.left = asyncio.get_running_loop().time()

    def node(self, key: str, number: int) -> int | None:
        """The node of a call's answer; None if it is not known."""
        book = self._books.get(key)
        return None if book is None else book.nodes.get(number)

    async def cancel_abandoned(self) -> None:
        """Cancel calls that had no listener for ``grace_s``, and forget old ones. The actor runs this as a task."""
        grace_s, kept_s = self._patience.grace_s, self._patience.kept_s
        pause = WATCH_SHARE * min(grace_s, kept_s)
        while True:
            await asyncio.sleep(pause)
            now = asyncio.get_running_loop().time()
            for key, book in list(self._books.items()):
                for call in book.given_up(now, grace_s=grace_s):
                    # The cancelled call has another ``grace_s`` in which to end.
                    call.left = now
                    self._tasks[call].cancel()
                book.forget(now, kept_s=kept_s)
                # The book of an ended session stays until its calls have ended.
                if not self._core.knows(key) and not book.open():
                    del self._books[key]

    async def close(self) -> None:
        """Cancel the running calls."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: str, book: CallBook, call: Call, asked: ChatRequest, untrained: bool) -> None:
        """Run a call as a task. If a retry joins the call during its cancellation, the call starts again."""

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[call]
            call.running = False
            call.left = asyncio.get_running_loop().time()
            if task.cancelled() and call.listeners and not self._closed:
                # A retry has joined the call while it was being cancelled.
                self._start(key, book, call, asked, untrained)
            call.wake()

        call.running, call.outcome = True, None
        self._tasks[call] = asyncio.create_task(self._run(key, book, call, asked, untrained), name="chat")
        self._tasks[call].add_done_callback(ended)

    async def _run(self, key: str, book: CallBook, call: Call, asked: ChatRequest, untrained: bool) -> None:
        """Ask the policy, and store the replies or the error as the call's outcome. Logs an unexpected error."""
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
        """Ask the policy for all choices of a call at once; returns a reply for each.

        Raises the first refusal (EpisodeOver, ChatRefused), or else the first error.
        """

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
            refusals = [error for error in failed.exceptions if isinstance(error, EpisodeOver | ChatRefused)]
            # The client may see a refusal, and no other error.
            raise (refusals[0] if refusals else failed.exceptions[0]) from None
        return [each.result() for each in chats]
