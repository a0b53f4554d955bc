"""Parts of a peer: a call in flight, and the order in which calls are sent.

The peer's *credit* is the number of calls that may be unanswered at once. A call is *out* from its turn until it
ends or is queued again. A large payload is *under way* until the peer has it or does not take it, even if its caller no
longer waits.

``SendQueue`` is pure. Invariants: no more calls are out than the credit allows. The large payloads under way sum to at
most BUDGET_BYTES, or there is only one. Small calls keep their order, and so do large calls. A small call goes before
every queued large one, and waits for credit only. The queue cannot fail: each call has a deadline of its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from asyncrl.messages import Request

if TYPE_CHECKING:
    from asyncrl.rpc.calls.peer import Peer

LARGE_BYTES = 1 << 16
"""Smallest size of a large payload."""
BUDGET_BYTES = 16 << 20


class CallFuture(asyncio.Future[Any]):
    """A call in flight, whose result is the reply. Cancelling it cancels the handler on the other side."""

    __slots__ = (
        "answered_by",
        "asks_count_from",
        "deadline",
        "frames",
        "heard",
        "id",
        "kind",
        "lacked",
        "peer",
        "sent",
        "silence",
        "size",
        "started",
        "tick",
        "times",
    )

    peer: Peer
    answered_by: int
    """Incarnation of the peer that sent the reply; 0 before the reply."""
    id: int
    kind: type[Request]
    frames: list[Any]
    started: float
    deadline: float
    sent: bool
    """Whether the peer may have received the call."""
    asks_count_from: int
    """Smallest id of an ASK that was sent after the call was last sent; an answer to an earlier ASK does not count.
    It is 0 if this incarnation of the peer was not sent the call, or has answered since that it lacks it."""
    lacked: bool
    """Whether the peer has answered that it lacks the call, and the timer has not asked again since."""
    size: int
    """Bytes of body and buffers."""
    times: int
    """Number of times that the timer has asked this incarnation of the peer after the call or sent the call again."""
    silence: float
    """Longest time without word from the peer that it has the call or is being set up (s)."""
    heard: float
    """Time at which the peer last said that it has the call or is being set up; before that the call's start (s)."""
    tick: int
    """Tick (deadlines.py) at which the timer looks at the call next: to ask, to repeat or to end it."""

    def cancel(self, msg: Any = None) -> bool:
        if not self.done():
            self.peer.forget(self, cancel=True)
        return super().cancel(msg)


class SendQueue:
    """The calls to one peer on one connection, by their ids."""

    def __init__(self) -> None:
        self.credit = 0
        """Largest number of calls that may be out."""
        self.under_way = 0
        """Bytes of large payloads that were sent and are not known to have arrived."""
        self._out: dict[int, int] = {}
        """Bytes under way for each call that is out, by its id."""
        self._abandoned: dict[int, int] = {}
        """Bytes under way for each call that is over."""
        self._small: OrderedDict[int, int] = OrderedDict()
        self._large: OrderedDict[int, int] = OrderedDict()
        """Bytes of each call that waits for its turn."""

    def __contains__(self, id: int) -> bool:
        """Whether a call is out."""
        return id in self._out

    def begin(self, credit: int) -> None:
        """Start empty on a new connection, with the credit that its WELCOME grants."""
        self.credit, self.under_way = credit, 0
        for calls in (self._out, self._abandoned, self._small, self._large):
            calls.clear()

    def add(self, id: int, size: int) -> None:
        """Queue a call that is neither out nor queued. ``size`` is the number of bytes to send for it."""
        (self._small if size < LARGE_BYTES else self._large)[id] = size

    def next(self) -> int | None:
        """Returns the id of the next call to send, which is out from now on; None if no call may be sent now."""
        if len(self._out) >= self.credit:
            return None
        if self._small:
            id, _ = self._small.popitem(last=False)
            self._out[id] = 0
            return id
        if self._large:
            id, size = next(iter(self._large.items()))
            if not self.under_way or self.under_way + size <= BUDGET_BYTES:
                del self._large[id]
                self._out[id] = size
                self.under_way += size
                return id
        return None

    def arrived(self, id: int) -> None:
        """Free the budget of a call: the peer has its payload, or will not take it now."""
        self.under_way -= self._abandoned.pop(id, 0)
        if self._out.get(id):
            self.under_way -= self._out[id]
            self._out[id] = 0

    def remove(self, id: int) -> None:
        """Forget a call, which is over or will be queued again, and free its budget."""
        self.under_way -= self._out.pop(id, 0)
        self._small.pop(id, None)
        self._large.pop(id, None)

    def abandon(self, id: int) -> None:
        """Forget a call whose caller no longer waits. Its payload keeps its budget until it has arrived."""
        size = self._out.get(id, 0)
        self.remove(id)
        if size:
            self._abandoned[id] = size
            self.under_way += size

    @property
    def abandoned(self) -> list[int]:
        """Ids of the calls that are over and whose payload is still under way."""
        return list(self._abandoned)
