"""Matching of HTTP requests with a session's calls: a new sample, or a call under way, cut off or answered.

Invariant: a request that is not marked as a retry is a new sample, however often its body was seen before. A marked one
is given a call of the same body: first one that nobody listens to, for that is whose connection broke; then the newest
that was answered; then one that somebody listens to. Memory is bounded: by number of calls in a session, and for those
that have ended by time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from asyncrl.errors import ChatRefused, EpisodeOver
from asyncrl.messages.episodes import ChatDelta, ChatReply

MOST_KEPT = 16
"""Calls of a session that nobody waits for, kept for retries."""

Outcome = Sequence[ChatReply] | Exception


@dataclass(eq=False, kw_only=True)
class Call:
    """One request to the policy, whose n choices are as many calls of the core."""

    number: int
    """Number within the session, from 0."""
    identity: bytes
    """Digest of the request; a retry has the same."""
    created: int
    """Unix seconds."""
    texts: list[str]
    """Content of each choice, as far as it was told."""
    running: bool = False
    outcome: Outcome | None = None
    """The replies, one for each choice, or the error in their place."""
    delivered: bool = False
    listeners: set[asyncio.Event] = field(default_factory=set)
    """Events that are set when there is more of the call."""
    left: float = 0.0
    """Time when the last listener left, or the call ended without any."""

    @property
    def settled(self) -> bool:
        """Whether the outcome is one that a retry is to be given too."""
        return not isinstance(self.outcome, Exception | None) or isinstance(self.outcome, EpisodeOver | ChatRefused)

    def hear(self, choice: int, delta: ChatDelta) -> None:
        """Add the new text of ``delta``. One behind a gap adds nothing: the reply has it all."""
        text = self.texts[choice]
        known = len(text) - delta.offset
        if 0 <= known < len(delta.text):
            self.texts[choice] = text + delta.text[known:]
            self.wake()

    def wake(self) -> None:
        """Tell the listeners."""
        for listener in self.listeners:
            listener.set()


class CallBook:
    """The calls of one session."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        """Calls of the session, oldest first."""
        self.nodes: dict[int, int] = {}
        """Node that answered the first choice of a call whose number was told before its node was known."""
        self._next = 0

    def new(self, identity: bytes, *, choices: int, created: int) -> Call:
        """A call for a new sample."""
        call = Call(number=self._next, identity=identity, created=created, texts=[""] * choices)
        self._next += 1
        self.calls.append(call)
        return call

    def retried(self, identity: bytes) -> Call | None:
        """The call that a marked retry is of, if it is still known."""
        same = [call for call in self.calls if call.identity == identity]
        unheard = [call for call in same if not call.listeners and not call.delivered]
        if unheard:
            return unheard[0]
        answered = [call for call in same if not call.listeners]
        return (answered or same)[-1] if same else None

    def open(self) -> int:
        """Calls that somebody waits for, or that are under way."""
        return sum(1 for call in self.calls if call.running or call.listeners)

    def given_up(self, now: float, *, grace_s: float) -> Iterator[Call]:
        """Calls under way that no retry has come for in time."""
        return (call for call in self.calls if call.running and not call.listeners and now - call.left >= grace_s)

    def forget(self, now: float, *, kept_s: float) -> None:
        """Drop those that have ended too long ago, and the oldest of too many."""
        ended = [call for call in self.calls if not call.running and not call.listeners]
        surplus = len(ended) - MOST_KEPT
        dropped = {call for at, call in enumerate(ended) if at < surplus or now - call.left >= kept_s}
        self.calls = [call for call in self.calls if call not in dropped]
