"""The serving side: HELLO, then calls and casts to typed handlers.

Only HELLO is served on a connection before its WELCOME. A peer is refused if it speaks another protocol, belongs to
another run, or has another secret or another actor's key. A peer that is dead or was replaced is refused too, and so is
one beyond a limit on names or connections. A call that the role of its sender may not send gets an ERROR
(messages/__init__.py), and such a cast is dropped.

A caller may send the same call again. The server ignores the repeat while the handler of the call runs. The reply to a
call that is not idempotent is stored until the caller has it, and answers each repeat. A caller without an answer asks
whether the server has its call (ASK). The answer is HELD while the handler runs, else NOT_HELD, and then the caller
sends the call again. These answers queue behind a reply to the same caller, so nothing is done or sent twice meanwhile.

No handler runs before its actor is set up: calls are answered with ERROR ``not_ready``, and casts are dropped. A
failure of a handler becomes an ERROR for its caller. Malformed frames are counted and change nothing.

All state is bounded for any messages: names, connections, calls, stored replies, and the time for which a call is
parked. Four counters count messages that are not served. ``wire/early``: messages before the setup. ``wire/strangers``:
rejected connections, and messages without WELCOME. ``wire/refused``: HELLOs and messages of wrong, foreign or dead
senders, and forbidden messages. ``wire/malformed``: unreadable messages.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.core.errors import AsyncRLError, ProtocolError
from asyncrl.messages import Message, may_send
from asyncrl.rpc.calls.deadlines import Deadlines
from asyncrl.rpc.calls.endpoint import CREDIT, NOT_READY, Endpoint, size_of
from asyncrl.rpc.calls.handlers import Caller, Connection, Handler, handlers_of
from asyncrl.rpc.calls.retry import CANCELLED, DEADLINE
from asyncrl.rpc.wire.codec import encodable
from asyncrl.rpc.wire.envelope import (
    NIL,
    PROTOCOL_VERSION,
    ErrorBody,
    Header,
    Hello,
    Kind,
    OtherProtocol,
    Refuse,
    Welcome,
    decode_header,
)
from asyncrl.rpc.wire.keys import LAUNCHER, SHARED_INCARNATION, VIEWER
from asyncrl.rpc.wire.transport import Frames
from asyncrl.rpc.wire.transport import Server as BoundSocket

STRANGERS, REFUSED, MALFORMED = "wire/strangers", "wire/refused", "wire/malformed"
EARLY = "wire/early"
MAX_SESSIONS_PER_NAME = 4
"""Most connections of one actor: one for its calls, one for its heartbeats, and old ones from before a reconnect."""
SHARED = {LAUNCHER: 64, VIEWER: 32}
"""Most connections of each name that several commands or viewers share. No connection in use is dropped."""
UNUSED_S = 30.0
"""Seconds without a message and without a running call after which a connection of a shared name counts as unused.
Commands end without a message."""
VIEWER_CREDIT = 16
"""Credit of a viewer: it has one request at a time, and each parked request costs something at every event."""
CROWDED = "connections"
"""Code of the refusal of a connection above the limit."""
MAX_NAMES = 16384
"""Largest number of names of callers; it matters without CURVE, where any name may come."""
MAX_STORED = 4 * CREDIT
"""Most replies stored for one connection."""
LONGEST_CALL_S = 7 * 86400.0
"""Longest time until the deadline of a call (s). The server ends calls with a later deadline after this time."""
MOST_UNEXPECTED, UNEXPECTED_WINDOW_S = 64, 600.0
"""Unexpected failures of handlers on a connection, within so many seconds, that are retryable; later ones are final."""
UNEXPECTED_MOMENT_S = 0.2
"""A failure within this time after the last one that counted does not count: all calls may fail together (s)."""
LONGEST_ERROR = 16384
"""Most characters of an error's text, which may quote a long message."""


@dataclass(slots=True)
class _Session:
    """An open connection of a caller, from its HELLO on."""

    routing_id: bytes
    name: str
    incarnation: int
    limit: int
    """Size of the largest message that the caller accepts (bytes)."""
    heard: float
    """Time at which its last message came (s)."""
    connection: Connection = field(default_factory=Connection)
    running: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """Handlers that run, by the id of the call."""
    stored: dict[int, list[Any]] = field(default_factory=dict)
    """Replies, as frames, to calls that are not idempotent, by the id of the call, until the caller has them."""
    unexpected: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_UNEXPECTED))
    """Times of the newest unexpected failures of its handlers (s), see MOST_UNEXPECTED."""

    @property
    def credit(self) -> int:
        """Number of calls that the caller may leave unanswered."""
        return VIEWER_CREDIT if self.name == VIEWER else CREDIT


class CallServer:
    """Serves the handlers of ``parts``: an actor and its parts."""

    def __init__(self, endpoint: Endpoint, parts: Iterable[object]) -> None:
        self._endpoint = endpoint
        self._owner = endpoint.owner
        self._loop = asyncio.get_running_loop()
        self._handlers = {name: found for part in parts for name, found in handlers_of(part).items()}
        self._sessions: dict[bytes, _Session] = {}
        """Sessions by routing id."""
        self._by_name: dict[str, dict[bytes, _Session]] = {}
        """Sessions by name of the caller and routing id, the oldest first."""
        self._newest: dict[str, int] = {}
        """Newest incarnation of each caller that has said HELLO."""
        self._fenced: dict[str, int] = {}
        """By name: this incarnation and all older ones are dead."""
        self._deadlines: Deadlines[asyncio.Future[Any]] = Deadlines(self._loop, self._expire)
        self._expired: set[asyncio.Future[Any]] = set()
        """Running handlers that were cancelled because their deadline is over."""
        self._bound: BoundSocket | None = None
        for counter in (STRANGERS, REFUSED, MALFORMED, EARLY):
            endpoint.counters.setdefault(counter, 0)

    def bind(self, address: str) -> str:
        """Bind, and return the address with the port that was taken. Raises OSError."""
        self._bound = self._endpoint.transport.bind(
            address, self._receive, lambda: self._endpoint.counters.add(STRANGERS)
        )
        return self._bound.address

    @property
    def being_served(self) -> int:
        """Number of calls whose handlers run; callable from any thread."""
        return sum(len(session.running) for session in list(self._sessions.values()))

    def fence(self, name: str, incarnation: int) -> None:
        """Drop the connections of this incarnation and all older ones, which are dead, and refuse their HELLOs."""
        self._fenced[name] = max(incarnation, self._fenced.get(name, 0))
        for session in [s for s in self._by_name.get(name, {}).values() if s.incarnation <= incarnation]:
            self._drop(session)

    def close(self) -> None:
        """Unbind."""
        self._deadlines.close()
        if self._bound is not None:
            self._bound.close()

    # --- receiving ---

    def _receive(self, routing_id: bytes, frames: Frames, owner: str | None) -> None:
        """Check a message and dispatch it by its kind. Ignores all messages once the actor is ending.

        ``owner`` is the actor that owns the key; None without CURVE.
        """
        if self._endpoint.ending:
            return
        try:
            try:
                header = decode_header(frames[0])
            except OtherProtocol as other:
                self._refuse(routing_id, other.id, "protocol", str(PROTOCOL_VERSION), str(other.version))
                return
            if len(frames) < 2:
                raise ProtocolError("no body")
            if header.kind == Kind.HELLO:
                self._on_hello(routing_id, header, self._endpoint.codec.decode(Hello, frames[1]), owner)
                return
            session = self._sessions.get(routing_id)
            if session is None:
                self._endpoint.counters.add(STRANGERS)
                self._error(routing_id, header.id, "hello_required", "say HELLO first", retryable=True)
                return
            if owner is not None and owner != session.name:
                # The peer chooses its routing id, and this one has taken another actor's.
                self._refuse(routing_id, header.id, "key", f"the key of {owner}", session.name)
                return
            if header.sender != session.name or header.incarnation != session.incarnation:
                self._endpoint.counters.add(REFUSED)
                return
            session.heard = self._loop.time()
            if header.kind == Kind.CALL:
                self._on_call(session, header, frames)
            elif header.kind == Kind.CAST:
                self._on_cast(session, header, frames)
            elif header.kind == Kind.ASK:
                self._on_ask(session, header)
            elif header.kind == Kind.CANCEL:
                self._cancel(session, header.in_reply_to)
            else:
                raise ProtocolError(f"a client does not send {Kind(header.kind).name}")
        except ProtocolError:
            self._endpoint.counters.add(MALFORMED)

    def _on_hello(self, routing_id: bytes, header: Header, hello: Hello, owner: str | None) -> None:
        """Refuse the caller, with the reason; or open a session, drop replaced ones, and answer WELCOME."""
        credentials = self._endpoint.credentials
        # (code, expected value, the caller's value), from the first check that fails.
        refusal: tuple[str, str, str] | None = None
        if hello.run_id != credentials.run_id:
            refusal = ("run_id", credentials.run_id, hello.run_id)
        elif not hmac.compare_digest(hello.secret.encode(), credentials.secret.encode()):
            refusal = ("secret", "the run's", "another")
        elif hello.name != header.sender or hello.incarnation != header.incarnation:
            refusal = ("name", header.sender, hello.name)
        elif credentials.curve and owner != hello.name:
            refusal = ("key", f"the key of {owner}", hello.name)
        elif hello.incarnation < (newest := self._newest.get(hello.name, 0)):
            refusal = ("incarnation", str(newest), str(hello.incarnation))
        elif hello.incarnation <= (fenced := self._fenced.get(hello.name, 0)):
            refusal = ("incarnation", f"above {fenced}, which is dead", str(hello.incarnation))
        elif hello.name == VIEWER and hello.incarnation != SHARED_INCARNATION:
            refusal = ("incarnation", str(SHARED_INCARNATION), str(hello.incarnation))
        elif hello.name not in self._newest and len(self._newest) >= MAX_NAMES:
            refusal = ("name", f"one of {MAX_NAMES} known actors", hello.name)
        # Last, because ``_make_room`` drops connections that are not in use.
        elif hello.name in SHARED and not self._make_room(hello.name, routing_id):
            refusal = (CROWDED, f"at most {SHARED[hello.name]} at once", "one more")
        if refusal is not None:
            self._refuse(routing_id, header.id, *refusal)
            return
        incarnation_before = self._newest.get(hello.name, hello.incarnation)
        self._newest[hello.name] = hello.incarnation
        self._drop_sessions(hello.name, hello.incarnation, routing_id)
        if incarnation_before < hello.incarnation:
            self._owner.note_death(hello.name, incarnation_before)
        known = self._sessions.get(routing_id)
        # A HELLO that is said again keeps the session, with its running calls and stored replies.
        if known is None or (known.name, known.incarnation) != (hello.name, hello.incarnation):
            if known is not None:
                self._drop(known)
            session = _Session(routing_id, hello.name, hello.incarnation, hello.max_message_bytes, self._loop.time())
            self._sessions[routing_id] = self._by_name.setdefault(hello.name, {})[routing_id] = session
        welcome = Welcome(
            run_id=credentials.run_id,
            name=self._endpoint.name,
            incarnation=self._endpoint.incarnation,
            max_message_bytes=self._endpoint.max_message_bytes,
            credit=self._sessions[routing_id].credit,
        )
        self._send(routing_id, Kind.WELCOME, "Welcome", header.id, self._endpoint.codec.encode(welcome))

    def _drop_sessions(self, name: str, incarnation: int, but: bytes) -> None:
        """Drop the sessions of other incarnations of ``name``, and the oldest ones of ``incarnation`` beyond the limit.

        ``but`` is the routing id of the connection that says HELLO now; its session stays.
        """
        others = self._others_of(name, but)
        current = [s for s in others if s.incarnation == incarnation]
        limit = SHARED.get(name, MAX_SESSIONS_PER_NAME)
        # ``current`` has the oldest first. Its newest ``limit - 1`` stay, because the new connection counts too.
        for session in [s for s in others if s.incarnation != incarnation] + current[: 1 - limit]:
            self._drop(session)

    def _make_room(self, name: str, routing_id: bytes) -> bool:
        """Drop the unused connections of a shared name if it has no room for one more. Returns whether it has room."""
        others = self._others_of(name, routing_id)
        if len(others) < SHARED[name]:
            return True
        unused = [s for s in others if not s.running and self._loop.time() - s.heard >= UNUSED_S]
        for session in unused:
            self._drop(session)
        return bool(unused)

    def _others_of(self, name: str, but: bytes) -> list[_Session]:
        """Sessions of ``name``, the oldest first, without the one that has the routing id ``but``."""
        return [s for s in self._by_name.get(name, {}).values() if s.routing_id != but]

    def _drop(self, session: _Session) -> None:
        """Forget a session with its stored replies, and cancel its running handlers."""
        del self._sessions[session.routing_id], self._by_name[session.name][session.routing_id]
        if not self._by_name[session.name]:
            del self._by_name[session.name]
        for id in list(session.running):
            self._cancel(session, id)

    def _cancel(self, session: _Session, id: int) -> None:
        task = session.running.get(id)
        if task is not None:
            task.cancel()

    def _on_call(self, session: _Session, header: Header, frames: Frames) -> None:
        """Start the handler of a call, unless the call is a repeat or is rejected with an ERROR.

        Checks, in this order: whether its handler runs, whether its reply is stored, credit, type, sender, the actor's
        setup, and the body. A plain method answers at once, or returns a future; an async method runs as a task.
        """
        if header.id in session.running:
            return
        self._forget_answered(session, header)
        if header.id in session.stored:
            self._transmit(session.routing_id, session.stored[header.id])
            return
        if self._reject_if_full(session, header.id):
            return
        handler = self._handlers.get(header.type)
        if handler is None or not handler.answered:
            self._error(
                session.routing_id,
                header.id,
                "unknown_type",
                f"{self._endpoint.name} does not serve {header.type}",
            )
            return
        if not may_send(session.name, handler.senders):
            self._endpoint.counters.add(REFUSED)
            reason = f"{session.name} may not send {header.type}: {', '.join(sorted(handler.senders))} may"
            self._error(session.routing_id, header.id, "forbidden", reason)
            return
        # Before the body is decoded, because it may be large.
        if self._reject_if_early(session, header.id):
            return
        try:
            request = self._endpoint.codec.decode(handler.request, frames[1], frames[2:])
        except ProtocolError as error:
            self._endpoint.counters.add(MALFORMED)
            self._error(session.routing_id, header.id, "invalid", str(error))
            return
        deadline = self._loop.time() + min(header.deadline_ms / 1000, LONGEST_CALL_S)
        caller = Caller(session.name, session.incarnation, header.param_version, deadline, session.connection)
        if handler.is_async:
            task = self._owner.spawn(self._run_call(session, header, handler, request, caller))
            session.running[header.id] = task
            # A done callback runs even if the task is cancelled before it has begun.
            tick = self._deadlines.add(task, deadline)
            task.add_done_callback(lambda task: self._call_over(session, header, task, tick))
            return
        try:
            reply = handler.function(request, caller)
            if not isinstance(reply, asyncio.Future):
                self._reply(session, header, handler, reply)
                return
        except Exception as error:
            self._failed(session, header, error)
            return
        session.running[header.id] = reply
        tick = self._deadlines.add(reply, deadline)
        reply.add_done_callback(lambda reply: self._future_over(session, header, handler, reply, tick))

    def _on_ask(self, session: _Session, header: Header) -> None:
        """Answer HELD if the handler of the call runs, and NOT_HELD if the call may be sent again; else an ERROR."""
        id = header.in_reply_to
        self._forget_answered(session, header)
        if id in session.running:
            self._answer_ask(session, Kind.HELD, header)
        # A stored reply is sent when its call comes again.
        elif id in session.stored or not (self._reject_if_full(session, id) or self._reject_if_early(session, id)):
            self._answer_ask(session, Kind.NOT_HELD, header)

    @staticmethod
    def _forget_answered(session: _Session, header: Header) -> None:
        """Forget the stored replies that the caller has, as its header says."""
        for id in [id for id in session.stored if id < header.answered_below]:
            del session.stored[id]

    def _answer_ask(self, session: _Session, kind: Kind, ask: Header) -> None:
        header = self._endpoint.header(kind, "", id=ask.id, in_reply_to=ask.in_reply_to)
        self._transmit(session.routing_id, [header, NIL])

    def _reject_if_full(self, session: _Session, id: int) -> bool:
        """Answer call ``id`` with an ERROR if the connection has no room for it. Returns whether that is so."""
        if len(session.running) < session.credit and len(session.stored) < MAX_STORED:
            return False
        self._error(session.routing_id, id, "over_credit", "too many calls unanswered", retryable=True)
        return True

    def _reject_if_early(self, session: _Session, id: int) -> bool:
        """Answer call ``id`` with an ERROR if the actor is not set up yet. Returns whether that is so."""
        if self._owner.ready:
            return False
        self._endpoint.counters.add(EARLY)
        self._error(session.routing_id, id, NOT_READY, "this actor is not set up so far", retryable=True)
        return True

    async def _run_call(
        self, session: _Session, header: Header, handler: Handler, request: Message, caller: Caller
    ) -> None:
        try:
            self._reply(session, header, handler, await handler.function(request, caller))
        except Exception as error:
            self._failed(session, header, error)

    def _expire(self, running: asyncio.Future[Any]) -> None:
        # Remembered for ``_call_over``, because a cancelled task does not know the reason.
        self._expired.add(running)
        running.cancel()

    def _future_over(
        self,
        session: _Session,
        header: Header,
        handler: Handler,
        reply: asyncio.Future[Message],
        tick: int,
    ) -> None:
        """Send the result of a future that a plain method returned."""
        self._call_over(session, header, reply, tick)
        if reply.cancelled():
            return
        try:
            self._reply(session, header, handler, reply.result())
        except Exception as error:
            self._failed(session, header, error)

    def _call_over(self, session: _Session, header: Header, task: asyncio.Future[Any], tick: int) -> None:
        """Forget a handler that has ended. If it was cancelled, answer the call with the reason."""
        self._deadlines.remove(task, tick)
        del session.running[header.id]
        if task.cancelled():
            # Its caller no longer waits, its deadline is over, or this actor ends.
            code, message = CANCELLED, "the call was cancelled"
            if task in self._expired:
                code, message = DEADLINE, "the handler ran past the caller's deadline"
            self._error(session.routing_id, header.id, code, message, retryable=code == CANCELLED)
        self._expired.discard(task)

    def _on_cast(self, session: _Session, header: Header, frames: Frames) -> None:
        """Run the handler of a cast. Drops and counts a forbidden cast, or one before the actor is set up.

        Raises ProtocolError without such a handler, or for a body that cannot be read.
        """
        handler = self._handlers.get(header.type)
        if handler is None or handler.answered:
            raise ProtocolError(f"no handler of the cast {header.type!r}")
        if not may_send(session.name, handler.senders):
            self._endpoint.counters.add(REFUSED)
            return
        if not self._owner.ready:
            self._endpoint.counters.add(EARLY)
            return
        message = self._endpoint.codec.decode(handler.request, frames[1], frames[2:])
        caller = Caller(session.name, session.incarnation, header.param_version, self._loop.time(), session.connection)
        try:
            handler.function(message, caller)
        except Exception as error:
            self._owner.handler_failed(header.type, error)

    # --- answering ---

    def _reply(self, session: _Session, header: Header, handler: Handler, reply: Message) -> None:
        """Send the reply to a call, and store it if the call is not idempotent; or an error if it is too large."""
        frames = self._endpoint.codec.encode(reply)
        # ZeroMQ would drop the connection to a caller that gets a larger message than it accepts.
        if (size := size_of(frames)) > session.limit:
            self._error(
                session.routing_id,
                header.id,
                "too_large",
                f"a reply of {size} bytes is over the caller's {session.limit}",
            )
            return
        message = [self._endpoint.header(Kind.REPLY, type(reply).__name__, in_reply_to=header.id), *frames]
        if not handler.idempotent:
            session.stored[header.id] = message
        self._transmit(session.routing_id, message)

    def _failed(self, session: _Session, header: Header, error: BaseException) -> None:
        """Answer a call with the exception of its handler. An AsyncRLError says itself whether it is retryable."""
        if isinstance(error, AsyncRLError):
            retryable = bool(getattr(error, "retryable", False))
        else:
            self._owner.handler_failed(header.type, error)
            retryable = self._note_unexpected(session)
        # From the class: an instance's own ``code``, as of RemoteError or Refused, came from another peer.
        code = getattr(type(error), "code", type(error).__name__)
        self._error(session.routing_id, header.id, code, str(error) or repr(error), retryable=retryable)

    def _note_unexpected(self, session: _Session) -> bool:
        """Note an unexpected failure. Returns whether it is retryable.

        It is final if MOST_UNEXPECTED failures were noted within UNEXPECTED_WINDOW_S before it. Failures within
        UNEXPECTED_MOMENT_S of the last one that was noted are not noted again.
        """
        now, failures = self._loop.time(), session.unexpected
        too_often = len(failures) == failures.maxlen and now - failures[0] < UNEXPECTED_WINDOW_S
        if not failures or now - failures[-1] >= UNEXPECTED_MOMENT_S:
            failures.append(now)
        return not too_often

    def _error(self, routing_id: bytes, id: int, code: str, message: str, *, retryable: bool = False) -> None:
        message = encodable(message)[:LONGEST_ERROR]
        body = ErrorBody(code=code, message=message, retryable=retryable, actor=self._endpoint.name)
        self._send(routing_id, Kind.ERROR, "ErrorBody", id, self._endpoint.codec.encode(body))

    def _refuse(self, routing_id: bytes, id: int, code: str, ours: str, theirs: str) -> None:
        self._endpoint.counters.add(REFUSED)
        body = Refuse(code=code, ours=ours, theirs=theirs)
        self._send(routing_id, Kind.REFUSE, "Refuse", id, self._endpoint.codec.encode(body))

    def _send(self, routing_id: bytes, kind: Kind, type: str, in_reply_to: int, frames: list[Any]) -> None:
        self._transmit(routing_id, [self._endpoint.header(kind, type, in_reply_to=in_reply_to), *frames])

    def _transmit(self, routing_id: bytes, message: list[Any]) -> None:
        # If the queue is full the message is dropped: the caller asks again.
        if self._bound is not None and not self._bound.send(routing_id, message):
            self._endpoint.counters.add("wire/unsent")
