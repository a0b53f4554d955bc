"""The calling side: the calls in flight to one peer, on the connection of connection.py.

Delivery is at least once. Until a call ends, a timer asks the peer whether it has the call (ASK), with exponential
backoff and full jitter. The peer answers HELD or NOT_HELD. On NOT_HELD the call is sent again under the same id. On a
second NOT_HELD, as for a call that the peer cannot read, it is sent again only after the next pause. So asking costs
the same for any size, and a large payload or answer is never queued twice. A budget limits the large payloads under way
to one peer (call.py); other large calls wait for their turn within their deadlines.

When a new incarnation replaces the peer, calls go to it at once if they are idempotent or were not sent. All others
fail with PeerRestarted. Every call ends: with its reply, cancelled, or with RemoteError, PeerRestarted, Refused,
MessageTooLarge, ProtocolError for a wrong reply, OSError if no connection can be opened, or DeadlineExceeded.
DeadlineExceeded also ends calls beyond MOST_CALLS and calls of a closed peer. It names the waiting actor, the peer, the
call, and the state of the connection. Cancelling the awaited future cancels the handler on the other side.

A reply may have arrived just before its sender is known to be replaced; ``answered_by`` of its call is the incarnation
that sent it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

from asyncrl.core.errors import DeadlineExceeded, MessageTooLarge, PeerRestarted, ProtocolError, Refused, RemoteError
from asyncrl.messages import Message, Request
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.monitor import Wait
from asyncrl.rpc.calls.call import LARGE_BYTES, CallFuture, SendQueue
from asyncrl.rpc.calls.connection import PeerConnection
from asyncrl.rpc.calls.deadlines import Deadlines
from asyncrl.rpc.calls.endpoint import CREDIT, NOT_READY, Endpoint, size_of
from asyncrl.rpc.calls.retry import DOUBLINGS, pause
from asyncrl.rpc.wire.envelope import (
    NIL,
    PROTOCOL_VERSION,
    ErrorBody,
    Header,
    Kind,
    OtherProtocol,
    Refuse,
    Welcome,
    decode_header,
)
from asyncrl.rpc.wire.transport import Frames

REPEAT_S = 5.0
"""Longest first pause before the first ASK for a call (s)."""
PARKED_S = 15.0
"""Time for which no ASK is sent for a parked call, or a thousand idle actors would ask all the time (s). Its peer
answers it before half of its deadline in any case (handlers.py)."""
SET_UP_REPEAT_S = 0.5
"""Longest first pause before an ASK to a peer that is not set up yet (s)."""
ASKED_WITHIN_SILENCE = 3
"""Least number of ASKs for a call before the peer's silence ends it."""
MOST_CALLS = 16 * CREDIT
"""Largest number of calls in flight to one peer, including those not sent yet; one more fails at once."""
ROUND_TRIP = "calls/round_trip_s"
LOOKED_AT = 64
"""Largest number of calls in flight that ``oldest_calls`` reads."""


class Peer(PeerConnection):
    """The calls and casts of an actor to one peer."""

    def __init__(self, endpoint: Endpoint, name: str, record: ActorRecord | None = None) -> None:
        super().__init__(endpoint, name, record)
        self._limit = endpoint.max_message_bytes
        """Size of the largest message that the peer accepts (bytes)."""
        self._pending: dict[int, CallFuture] = {}
        """Calls that have not ended, by id, the smallest first."""
        self._deadlines = Deadlines(self._loop, self._on_timer)
        self._queue = SendQueue()
        """Calls on the present connection. Calls that wait for a connection are in ``_pending`` only."""
        self._unready = False
        """Whether the peer's last answer was that it is not set up."""

    # --- the caller's side ---

    def call(self, request: Request, timeout: float | None = None, *, silence: float = math.inf) -> CallFuture:
        """Send a request. Await the returned future for the reply.

        ``timeout`` is in seconds; None means the endpoint's ``call_timeout_s``. The call also ends with
        DeadlineExceeded if for ``silence`` seconds the peer has not said that it has the call or is being set up.
        """
        endpoint = self._endpoint
        if timeout is None:
            timeout = endpoint.call_timeout_s
        kind = type(request)
        future = CallFuture(loop=self._loop)
        future.peer, future.kind, future.sent, future.lacked = self, kind, False, False
        future.answered_by = future.asks_count_from = future.times = 0
        future.silence = silence
        future.frames = endpoint.codec.encode(request)
        future.size = size_of(future.frames)
        future.id = self._next_id
        self._next_id += 1
        future.started = future.heard = now = self._loop.time()
        future.deadline = now + timeout
        if future.size > self._limit:
            future.set_exception(self._too_large(kind.__name__, future.frames))
            return future
        if self._closed or len(self._pending) >= MOST_CALLS:
            future.set_exception(self._expired(future))
            return future
        self._pending[future.id] = future
        future.tick = self._deadlines.add(future, self._next_timer(future, REPEAT_S))
        if self.ready:
            self._queue.add(future.id, future.size)
            self._send_queued()
        else:
            self._connect_for([future])
        return future

    def cast(self, message: Message) -> int:
        """Send a one-way message. Returns its size in bytes, or 0 if it was dropped.

        Without a connection it is dropped, and a connection is opened for the next one. Raises MessageTooLarge.
        """
        if not self.ready:
            # If no connection can be opened, the calls to this peer fail with the reason.
            with contextlib.suppress(OSError):
                self.connect()
            return 0
        assert self._client is not None
        frames = self._endpoint.codec.encode(message)
        size = size_of(frames)
        if size > self._limit:
            raise self._too_large(type(message).__name__, frames)
        is_sent = self._client.send([self._endpoint.header(Kind.CAST, type(message).__name__), *frames])
        return size if is_sent else 0

    def close(self) -> None:
        """Disconnect for good. Calls in flight, and all later ones, end with DeadlineExceeded."""
        super().close()
        for future in list(self._pending.values()):
            self._finish(future).set_exception(self._expired(future))
        self._deadlines.close()

    @property
    def in_flight(self) -> int:
        """Number of calls that have not ended."""
        return len(self._pending)

    def oldest_calls(self) -> list[Wait]:
        """One wait for each request type among the LOOKED_AT oldest calls in flight: that of its oldest call.

        Callable from any thread.
        """
        if not self._pending:
            return []
        oldest: dict[type[Request], float] = {}
        for future in list(self._pending.values())[:LOOKED_AT]:
            oldest.setdefault(future.kind, future.started)
        now = self._loop.time()
        return [Wait(self.name, kind.__name__, now - since, kind.idle) for kind, since in oldest.items()]

    def forget(self, future: CallFuture, *, cancel: bool) -> None:
        """Stop waiting for a call, and with ``cancel`` send CANCEL to the peer. Does nothing if the call is over."""
        if self._pending.get(future.id) is future:
            # Before ``_finish``: a payload under way keeps its budget until it is known to have arrived.
            self._queue.abandon(future.id)
            self._finish(future)
            if cancel and future.sent and self.ready and self._client is not None:
                self._client.send([self._endpoint.header(Kind.CANCEL, "", in_reply_to=future.id), NIL])
            self._send_queued()

    def _connect_for(self, calls: Iterable[CallFuture]) -> None:
        """Connect. If no connection can be opened, fail ``calls`` with the OSError."""
        try:
            self.connect()
        except OSError as error:
            for future in list(calls):
                self._finish(future).set_exception(error)

    def _cannot_connect(self, error: OSError) -> None:
        for future in list(self._pending.values()):
            self._finish(future).set_exception(error)

    # --- messages ---

    def _transmit(self, future: CallFuture) -> None:
        """Send a call whose turn it is, or only an ASK for it if the peer may have it already.

        An ASK follows a large call at once: the HELD that answers it frees the budget of the payload.
        """
        assert self._client is not None
        if future.asks_count_from:
            self._ask(future.id)
            return
        # 0 would mean that the caller does not wait.
        left_ms = max(1, int((future.deadline - self._loop.time()) * 1000))
        header = self._endpoint.header(
            Kind.CALL, future.kind.__name__, id=future.id, deadline_ms=left_ms, answered_below=self._answered_below
        )
        # Counts as sent even if the socket is full: the timer's ASK finds out that the peer lacks it. Ids only grow, so
        # an ASK that is sent after the call has this id or a larger one.
        future.sent, future.asks_count_from = True, self._next_id
        self._client.send([header, *future.frames])
        if future.size >= LARGE_BYTES:
            self._ask(future.id)

    @property
    def _answered_below(self) -> int:
        # Smallest id that is not answered: ids only grow, so the first pending call has it.
        return next(iter(self._pending), self._next_id)

    def _ask(self, id: int) -> None:
        """Send an ASK for the call ``id``."""
        assert self._client is not None
        header = self._endpoint.header(
            Kind.ASK, "", id=self._next_id, in_reply_to=id, answered_below=self._answered_below
        )
        self._next_id += 1
        self._client.send([header, NIL])

    def _on_timer(self, future: CallFuture) -> None:
        """End a call whose time is over; else connect, send the call again, or ask after it, and set the next timer.

        If the call still waits for its turn, ask instead whether the payloads of ended calls have arrived.
        """
        now = self._loop.time()
        if now >= future.deadline or now >= future.heard + future.silence:
            # Before ``forget`` removes the call from the queue: the text says whether its turn has come.
            error = self._expired(future)
            self.forget(future, cancel=True)
            future.set_exception(error)
            return
        is_out = future.id in self._queue
        # Only ASKs and repeats lengthen the pause; a call whose turn has not come has none of them.
        future.times += is_out
        future.tick = self._deadlines.add(future, self._next_timer(future, REPEAT_S))
        if not self.ready:
            self._connect_for([future])
        elif is_out and not future.asks_count_from:
            self._send_again(future)
        elif is_out:
            future.lacked = False
            self._transmit(future)
        else:
            # Payloads of calls that are over may delay the turn of this call: ask whether they have arrived.
            for id in self._queue.abandoned:
                self._ask(id)

    def _next_timer(self, future: CallFuture, first_s: float) -> float:
        """Time at which the timer looks at a call again, to ask after it or to end it (s).

        ``first_s`` is the longest first pause. For a parked call, whose answer may take long, the pause begins up to
        PARKED_S later.
        """
        # At least ASKED_WITHIN_SILENCE times within ``silence``, even with the longest pause.
        first_s = min(first_s, future.silence / ASKED_WITHIN_SILENCE / 2**DOUBLINGS)
        soon = self._loop.time() + pause(first_s, future.times, self._draws.random())
        # Not if the caller limits the silence, and not while the peer is away or being set up.
        if future.kind.idle and future.silence == math.inf and self.ready and not self._unready:
            soon += min(PARKED_S, (future.deadline - future.started) / 2)
        return min(future.deadline, future.heard + future.silence, soon)

    def _receive(self, frames: Frames) -> None:
        """Dispatch a message by its kind. Ignores replaced incarnations, and counts messages that cannot be read."""
        try:
            header = decode_header(frames[0])
            if header.incarnation < max(self._incarnation, self._adopted):
                self._endpoint.counters.add("wire/from_replaced")
                return
            if header.kind == Kind.REPLY:
                self._on_reply(header, frames)
            elif header.kind == Kind.ERROR:
                self._on_error(header, self._endpoint.codec.decode(ErrorBody, frames[1]))
            elif header.kind in (Kind.HELD, Kind.NOT_HELD):
                self._on_ask_answer(header)
            elif header.kind == Kind.WELCOME:
                self._on_welcome(header, self._endpoint.codec.decode(Welcome, frames[1]))
            elif header.kind == Kind.REFUSE:
                self._on_refuse(self._endpoint.codec.decode(Refuse, frames[1]))
            else:
                raise ProtocolError(f"a server does not send {Kind(header.kind).name}")
        except OtherProtocol as other:
            # Such a server answers everything with a REFUSE, of which this side can read the version alone.
            self._on_refuse(Refuse(code="protocol", ours=str(other.version), theirs=str(PROTOCOL_VERSION)))
        except (ProtocolError, IndexError):
            self._endpoint.counters.add("wire/malformed")

    def _on_reply(self, header: Header, frames: Frames) -> None:
        """End the call with its reply, or with ProtocolError if the reply has another type or cannot be read."""
        self._unready = False
        self._mark_proven()
        future = self._pending.get(header.in_reply_to)
        if future is None:
            self._on_late_answer(header)
            return
        kind = future.kind.reply
        self._finish(future)
        if header.type != kind.__name__:
            future.set_exception(ProtocolError(f"{self.name} answered {future.kind.__name__} with {header.type!r}"))
            self._send_queued()
            return
        try:
            reply = self._endpoint.codec.decode(kind, frames[1], frames[2:])
        except ProtocolError as error:
            future.set_exception(error)
        else:
            # A parked call measures the time without news and not the round trip.
            if not future.kind.idle:
                self._endpoint.histograms.observe(ROUND_TRIP, self._loop.time() - future.started)
            future.answered_by = header.incarnation
            future.set_result(reply)
        self._send_queued()

    def _on_ask_answer(self, header: Header) -> None:
        """Handle the answer to an ASK: HELD frees the call's budget, NOT_HELD has the call sent again.

        The call is sent at once after the first NOT_HELD, and by the timer after the second in a row.
        """
        self._unready = False
        future = self._pending.get(header.in_reply_to)
        if future is None or future.id not in self._queue:
            self._on_late_answer(header)
            return
        if header.kind == Kind.HELD:
            future.heard = self._loop.time()
            self._queue.arrived(future.id)
        elif header.id >= future.asks_count_from:
            # Any other answer is ignored: its ASK was sent before the call was last sent.
            future.asks_count_from = 0
            if future.lacked:
                # The second NOT_HELD in a row: sending at once would fail again, so the timer sends it later.
                self._queue.arrived(future.id)
            else:
                future.lacked = True
                self._send_again(future)
        self._send_queued()

    def _send_again(self, future: CallFuture) -> None:
        """Queue again a call that the peer lacks."""
        self._queue.remove(future.id)
        self._queue.add(future.id, future.size)
        self._send_queued()

    def _on_late_answer(self, header: Header) -> None:
        """Handle an answer to a call that is over. It shows that the payload has arrived, so free its budget."""
        self._queue.arrived(header.in_reply_to)
        self._send_queued()

    def _on_error(self, header: Header, body: ErrorBody) -> None:
        """Say HELLO if the server asks for it, retry later if it is full or not set up, else fail the call."""
        # Each call in flight may get this answer. The first answer makes this side say HELLO, which ends ``ready``.
        if body.code == "hello_required":
            if self.ready:
                self._say_hello()
            return
        self._mark_proven()
        self._unready = body.code == NOT_READY
        future = self._pending.get(header.in_reply_to)
        if future is None:
            self._on_late_answer(header)
            return
        if body.code in ("over_credit", NOT_READY):
            # The timer asks after the call later.
            self._queue.arrived(future.id)
            if body.code == NOT_READY:
                future.heard = self._loop.time()
                self._deadlines.remove(future, future.tick)
                future.tick = self._deadlines.add(future, self._next_timer(future, SET_UP_REPEAT_S))
            self._send_queued()
            return
        error = RemoteError(body.actor or self.name, body.code, body.message, retryable=body.retryable)
        self._finish(future).set_exception(error)
        self._send_queued()

    def _on_welcome(self, header: Header, body: Welcome) -> None:
        """Queue all pending calls on the new connection.

        If the peer was replaced, fail those calls that are not idempotent and may have run.
        """
        restarted = self._incarnation not in (0, body.incarnation)
        if not self._take_welcome(header, body):
            return
        self._limit = min(body.max_message_bytes, self._endpoint.max_message_bytes)
        self._queue.begin(body.credit)
        for future in list(self._pending.values()):
            future.lacked = False
            if restarted:
                if future.sent and not future.kind.idempotent:
                    self._finish(future).set_exception(PeerRestarted(self.name, future.kind.__name__))
                    continue
                future.asks_count_from = future.times = 0
            # If the peer may have the call, only an ASK is sent, which takes no budget.
            self._queue.add(future.id, 0 if future.asks_count_from else future.size)
        self._send_queued()

    def _on_refuse(self, body: Refuse) -> None:
        """Disconnect and fail all calls with Refused. The next call connects again."""
        self._disconnect()
        self._unreached_since = None
        self._endpoint.counters.add("wire/refused_by_peer")
        for future in list(self._pending.values()):
            # The peer wrote the body: its "ours" is the value of the peer, which is "theirs" for this side.
            self._finish(future).set_exception(Refused(self.name, body.code, ours=body.theirs, theirs=body.ours))

    def _send_queued(self) -> None:
        """Send queued calls as long as credit and budget allow."""
        while self.ready and (id := self._queue.next()) is not None:
            self._transmit(self._pending[id])

    # --- the end of a call ---

    def _finish(self, future: CallFuture) -> CallFuture:
        """Forget a call that ends now. Returns it, for its result to be set."""
        del self._pending[future.id]
        self._queue.remove(future.id)
        self._deadlines.remove(future, future.tick)
        return future

    def _expired(self, future: CallFuture) -> DeadlineExceeded:
        """The error of a call whose time is over; it says in which state the connection is."""
        if self._closed:
            hint = "this actor is closing"
        elif self._record is None:
            hint = "the registry knows no living actor of this name"
        elif not self.ready:
            hint = f"HELLO to {self._record.address} is not answered"
        elif self._unready:
            hint = f"connected to {self._record.address}, which is not set up so far"
        elif future.id not in self._queue:
            hint = (
                f"connected to {self._record.address}, but its turn has not come: of {len(self._pending)} calls in "
                f"flight {self._queue.under_way} bytes have not arrived so far"
            )
        elif future.heard > future.started:
            ago = self._loop.time() - future.heard
            hint = f"connected to {self._record.address}, which said {ago:.1f} s ago that it has the call"
        else:
            hint = f"connected to {self._record.address}, which has not said that it has the call"
        waited = self._loop.time() - future.started
        return DeadlineExceeded(self._endpoint.name, self.name, future.kind.__name__, waited, hint)

    def _too_large(self, what: str, frames: list[Any]) -> MessageTooLarge:
        return MessageTooLarge(
            f"{self._endpoint.name}: {what} of {size_of(frames)} bytes is over the {self._limit} that {self.name} "
            "accepts; raise network.max_message_bytes"
        )
