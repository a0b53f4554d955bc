"""The calls that may be on their way to a peer: its credit, and a budget of bytes for large payloads. Pure.

Invariants: no more calls are out than the credit; the payloads under way together are within BUDGET_BYTES, or there is
one of them alone; calls of a kind, small or large, go in the order in which they came, and a small one never waits for
a large one. A payload is under way from its sending until the peer has said that it has it, also where its caller waits
no more. A call that waits is let go when others arrive, end or are taken back: ``next`` says which.

It cannot fail: how long a call may wait is its own deadline's business.
"""

from __future__ import annotations

from collections import OrderedDict

LARGE_BYTES = 1 << 16
"""Payloads of this size and more take of the budget."""
BUDGET_BYTES = 16 << 20


class Turns:
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
        """A call is over, or begins anew."""
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
