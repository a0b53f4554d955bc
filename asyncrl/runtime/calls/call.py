"""A call in flight: the future of its reply, and what its peer (peer.py) knows of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asyncrl.messages import Request

if TYPE_CHECKING:
    from asyncrl.runtime.calls.peer import Peer


class CallFuture(asyncio.Future[Any]):
    """A call in flight. Cancelling it tells the other side."""

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
    """Least id of an ASK that was sent after the call had gone whole to this incarnation, which has not said that it
    lacks the call; 0 where it has not gone."""
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
            self.peer.forget(self, tell=True)
        return super().cancel(msg)
