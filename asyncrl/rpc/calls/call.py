"""Parts of a peer: a call in flight, and the order in which calls may go.

``SendQueue`` is pure. Invariants: no more calls are sent than the credit allows; the large payloads on their way are
together within BUDGET_BYTES, or there is one of them alone; small calls, and large calls, go in the order in which they
came, and a small one never waits for a large one. A payload is on its way until the peer says that it has it, even if
its caller no longer waits. It cannot fail: each call has a deadline of its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from asyncrl.messages import Request

if TYPE_CHECKING:
    from asyncrl.rpc.calls.peer import Peer

LARGE_BYTES = 1 << 16
"""Payloads of this size and more take of the budget."""
BUDGET_BYTES = 16 << 20


class CallFuture(asyncio.Future[Any]):
    """A call in flight. Cancelling it cancels the handler on the other side."""

    __slots__ = (
        "answered_by",
        "deadline",
        "frames",
        "heard",
        "id",
        "kind",
        "lacked",
        "peer",
        "placed",
        "sent",
        "silence",
        "size",
        "started",
        "tick",
        "times",
    )

    peer: Peer
    answered_by: int
    """Incarnation of the peer that has replied; 0 before."""
    id: int
    kind: type[Request]
    frames: list[Any]
    started: float
    deadline: float
    sent: bool
    """Whether this incarnation of the peer may have seen it."""
    placed: int
    """Smallest id of an ASK that was sent after the call went to this incarnation; 0 if it was not sent, or if the
    peer has said since that it lacks the call."""
    lacked: bool
    """Whether the peer has said that it lacks the call, and its timer has not asked after it since."""
    size: int
    """Bytes of body and buffers."""
    times: int
    """Number of times that it has been asked after or sent again."""
    silence: float
    """Longest time without a word of the peer that it has the call, or is being set up (s)."""
    heard: float
    """Time at which the peer said so last, or the call began."""
    tick: int
    """Tick of its deadline or its repeat, the earlier of the two."""

    def cancel(self, msg: Any = None) -> bool:
        if not self.done():
            self.peer.forget(self, cancel=True)
        return super().cancel(msg)


class SendQueue:
    """The calls to one peer on one connection, by their ids."""

    def __init__(self) -> None:
        self.credit = 0
        self.under_way = 0
        """Bytes of large payloads that are sent, and not known to have arrived."""
        self._out: dict[int, int] = {}
        """Bytes that each call which is out has under way."""
        self._abandoned: dict[int, int] = {}
        """Bytes under way of calls that are over."""
        self._small: OrderedDict[int, int] = OrderedDict()
        self._large: OrderedDict[int, int] = OrderedDict()
        """Bytes of the calls that wait."""

    def __contains__(self, id: int) -> bool:
        """Whether a call is out."""
        return id in self._out

    def begin(self, credit: int) -> None:
        """Nothing is out or waits."""
        self.credit, self.under_way = credit, 0
        for calls in (self._out, self._abandoned, self._small, self._large):
            calls.clear()

    def add(self, id: int, size: int) -> None:
        """A call that is neither out nor waits comes; ``size`` is what is to be sent for it."""
        (self._small if size < LARGE_BYTES else self._large)[id] = size

    def next(self) -> int | None:
        """A call whose turn it is; it is out from now on."""
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
        """The peer has the payload, or will not take it now."""
        self.under_way -= self._abandoned.pop(id, 0)
        if self._out.get(id):
            self.under_way -= self._out[id]
            self._out[id] = 0

    def remove(self, id: int) -> None:
        """A call is over, or starts again."""
        self.under_way -= self._out.pop(id, 0)
        self._small.pop(id, None)
        self._large.pop(id, None)

    def abandon(self, id: int) -> None:
        """A call is over for its caller; what is under way stays so until it has arrived."""
        size = self._out.get(id, 0)
        self.remove(id)
        if size:
            self._abandoned[id] = size
            self.under_way += size

    @property
    def abandoned(self) -> list[int]:
        """Calls that are over and still under way."""
        return list(self._abandoned)
