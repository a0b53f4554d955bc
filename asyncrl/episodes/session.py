"""The session of one episode: sends its calls of the policy to the rollouter that asked for the episode.

An episode is one attempt at a trajectory. A *turn* is one answer of the policy; its *node* is the number of this answer
in the conversation. Invariant: a session that has ended makes no call to the rollouter. The rewards of turns arrive
before the episode's result, because ``settle`` waits for the rewards; only the end of the session cancels them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from asyncrl.core.errors import ChatRefused, EpisodeOver, InvalidRequest, ProtocolError, RemoteError
from asyncrl.episodes.playing.client import Task
from asyncrl.messages import Message, Request
from asyncrl.messages.episodes import (
    Chat,
    ChatDelta,
    ChatReply,
    EpisodeBegan,
    EpisodeDone,
    RunEpisode,
    TurnReward,
    TurnRewarded,
)

OnDelta = Callable[[ChatDelta], None]
CAST_AGAIN_S = 0.1
"""Seconds after which a cast is repeated, if it was not sent because the rollouter was not connected."""


class RolloutPeer(Protocol):
    """The connection to the rollouter whose policy answers; the Peer of asyncrl.rpc is one."""

    name: str

    def call(self, request: Request, timeout: float | None = None) -> asyncio.Future[Any]:
        """Send a request, as Peer.call."""

    def cast(self, message: Message) -> int:
        """Send a message, as Peer.cast. Returns 0 if it was not sent."""


class Playing(asyncio.Future[EpisodeDone]):
    """Future of an episode's result. Cancelling it calls ``on_stop``, which stops the episode."""

    __slots__ = ("on_stop",)
    on_stop: Callable[[], None]
    """Set by the pool, once the future is made."""

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self.on_stop()
        return cancelled

    def end(self, done: EpisodeDone) -> None:
        """End the episode, if it was not cancelled."""
        if not self.done():
            self.set_result(done)


class PolicySession:
    """Sends the calls of one episode to the rollouter that asked for it.

    ``deadline`` is a time of the event loop (s), after which calls fail. ``incarnation`` numbers the starts of the
    rollouter: the death of an earlier start does not end this session.
    """

    def __init__(self, request: RunEpisode, rollouter: RolloutPeer, deadline: float, incarnation: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._rollouter, self._deadline = rollouter, deadline
        self.incarnation = incarnation
        self._calls: set[asyncio.Future[Any]] = set()
        """Requests to the rollouter without an answer."""
        self._deltas: dict[str, OnDelta] = {}
        """By name of each open streaming call: the receiver of its new text."""
        self._credits: set[asyncio.Task[int]] = set()
        """Calls of ``turn_reward`` that ``credit`` has started."""
        self._end_reason = ""
        """First reason given to ``end``; empty while the session takes calls."""
        self._quiet_since = time.monotonic()
        """Monotonic time (s) when the last call of the policy ended, or the session began."""
        self.key = request.session
        self.task = msgspec.convert(request, Task, from_attributes=True)

    @property
    def rollouter(self) -> str:
        """Name of the actor that asked for the episode."""
        return self._rollouter.name

    @property
    def quiet_s(self) -> float:
        """Seconds since the user's code last waited for the policy; 0 while it waits. Any thread may read it."""
        return 0.0 if self._calls else time.monotonic() - self._quiet_since

    def begin(self) -> None:
        """Report to the rollouter that the user's code has begun."""
        if not self._end_reason and not self._rollouter.cast(EpisodeBegan(session=self.key)):
            self._loop.call_later(CAST_AGAIN_S, self.begin)

    async def chat(self, chat: Chat, on_delta: OnDelta = lambda delta: None) -> ChatReply:
        """Ask the policy for the next message. If ``chat.stream`` is set, ``on_delta`` gets its text piece by piece.

        Raises EpisodeOver after the end of the session, ChatRefused for an invalid call, and OSError if the rollouter
        cannot answer.
        """
        if chat.stream:
            self._deltas[chat.call] = on_delta
        try:
            reply = await self._ask(chat)
        except ProtocolError as error:
            # The call is larger than a message between actors may be.
            raise ChatRefused("messages", str(error)) from error
        finally:
            self._deltas.pop(chat.call, None)
        assert isinstance(reply, ChatReply)
        return reply

    def hear(self, delta: ChatDelta) -> None:
        """Pass new text of an answer to the ``on_delta`` of its call, if that call is open."""
        if (on_delta := self._deltas.get(delta.call)) is not None:
            on_delta(delta)

    async def turn_reward(self, node: int | None, value: float) -> int:
        """Give the turn ``node`` the reward ``value``; without ``node``, the turn that was answered last.

        Returns the turn's node. Raises EpisodeOver, ChatRefused, OSError.
        """
        reply = await self._ask(TurnReward(session=self.key, node=node, value=value))
        assert isinstance(reply, TurnRewarded)
        return reply.node

    def credit(self, node: int | None, value: float) -> None:
        """Start ``turn_reward`` and return at once; ``settle`` waits for its end."""
        self._credits.add(self._loop.create_task(self.turn_reward(node, value)))

    async def settle(self) -> str:
        """Wait until all rewards that ``credit`` sends have arrived. Returns the first failure as text, or "".

        EpisodeOver is not a failure: a conversation that has ended takes no rewards.
        """
        results = await asyncio.gather(*self._credits, return_exceptions=True)
        failures = [one for one in results if isinstance(one, BaseException) and not isinstance(one, EpisodeOver)]
        return f"the reward of a turn could not be noted: {failures[0]}" if failures else ""

    def end(self, reason: str) -> None:
        """Cancel the open calls and refuse later ones. Both raise EpisodeOver with the first ``reason``."""
        self._end_reason = self._end_reason or reason
        for call in list(self._calls):
            call.cancel()
        for credit in self._credits:
            credit.cancel()

    async def _ask(self, request: Request) -> Message:
        """Send a request to the rollouter and return its answer, until the session's deadline.

        Raises EpisodeOver, ChatRefused, OSError.
        """
        if over := self._end_reason:
            raise EpisodeOver(over)
        call = self._rollouter.call(request, timeout=max(0.0, self._deadline - self._loop.time()))
        self._calls.add(call)
        try:
            reply: Message = await call
            return reply
        except asyncio.CancelledError:
            # Either ``end`` cancelled the call, or the task that waits for it was cancelled.
            if call.cancelled() and self._end_reason:
                raise EpisodeOver(self._end_reason) from None
            raise
        except RemoteError as error:
            field = "completion" if isinstance(request, TurnReward) else "messages"
            raise _exception_for(error, field) from error
        finally:
            self._calls.discard(call)
            self._quiet_since = time.monotonic()


def _exception_for(error: RemoteError, field: str) -> Exception:
    """Translate an error that the rollouter sent into the exception for the user's code.

    ``field`` is the field that counts as wrong if the error names none.
    """
    if error.code == EpisodeOver.code:
        # The message begins with the words that EpisodeOver puts before each reason.
        return EpisodeOver(error.message.removeprefix(str(EpisodeOver(""))))
    if error.code == ChatRefused.code:
        field, _, problem = error.message.partition(": ")
        return ChatRefused(field, problem)
    if error.code == InvalidRequest.code:
        return ChatRefused(field, error.message)
    return error
