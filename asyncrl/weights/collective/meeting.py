"""Rank 0 and the members of an epoch find one another, form its group, and leave it when the epoch is over.

A member calls, says HELLO with epoch and rank, and waits; rank 0 lets all begin at once when all are there. A caller
for an epoch that is over is turned away; one that comes early for a later epoch is kept for it.

Fails with TimeoutError naming the ranks that did not come, ConnectionError, ValueError, and as the waiter does.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from asyncrl.messages.weights import CollectiveGroup
from asyncrl.weights.collective.framing import Frame, FrameKind, check
from asyncrl.weights.collective.links import ANY, Link, Listener, dial, dialled
from asyncrl.weights.collective.waiting import Waiter

MAX_WAITING = 1024
"""Connections that have not said HELLO, and as many that have said it for a later epoch; for a larger group, as many as
it has members."""


class FormedGroup(Protocol):
    """One rank's end of a group that was formed."""

    def close(self) -> None:
        """Leave, also in the middle of a transfer. May be repeated."""


G = TypeVar("G", bound=FormedGroup)


class Epoch(Generic[G]):
    """One rank's part in an epoch. One thread uses it, but for ``call_off``."""

    def __init__(self, group: CollectiveGroup, rank: int, timeout_s: float) -> None:
        self.group, self.rank = group, rank
        self.waiter = Waiter(timeout_s)
        self.links: list[Link] = []
        """Links of rank 0 to all members, in the order of their ranks; of a member the one to rank 0."""
        self.formed: G | None = None
        self.over = ""
        """Reason that nothing goes on in the epoch."""

    def form(self, form: Callable[[], G]) -> None:
        """Form the group by ``form``, which blocks, for as long as all links hold."""
        self.formed = self.waiter.call(
            form,
            f"the group of epoch {self.group.epoch} to be formed",
            discard=lambda formed: formed.close(),
            watching=self.links,
        )

    def call_off(self, reason: str) -> None:
        """Make the thread that uses the epoch stop, and all others that are linked. From any thread."""
        self.over = self.over or reason
        self.waiter.stop(reason)
        for link in self.links:
            link.hang_up(reason)

    def end(self, reason: str) -> None:
        """Let go of everything, once nothing is being transferred; the first reason is told. May be repeated."""
        self.over = self.over or reason
        # The links go first: rank 0 has the reason before it sees the connections of the group break.
        for link in self.links:
            link.end(self.over)
        if self.formed is not None:
            self.formed.close()
        self.links, self.formed = [], None
        self.waiter.close()


class Meeting:
    """Rank 0's place, over all epochs. One thread uses it."""

    def __init__(self, host: str, ports: str = ANY) -> None:
        self._listener = Listener(host, ports)
        self.port = self._listener.port
        self._strangers: list[Link] = []
        self._early: dict[tuple[int, int], tuple[Link, int]] = {}
        """Link to each early caller, and the size of the group that it knows, by epoch and rank."""

    def close(self) -> None:
        """Turn everybody away. May be repeated."""
        self._listener.close()
        for link in [*self._strangers, *(link for link, _ in self._early.values())]:
            link.end("the learner has ended")
        self._strangers.clear()
        self._early.clear()

    def gather(self, group: CollectiveGroup, waiter: Waiter) -> list[Link]:
        """Links to all members, in the order of their ranks; they wait for a BEGIN."""
        found: dict[int, Link] = {}
        for epoch, rank in [key for key in self._early if key[0] <= group.epoch]:
            link, size = self._early.pop((epoch, rank))
            if epoch < group.epoch:
                link.end(f"epoch {epoch} is over, this is {group.epoch}")
            else:
                _let_in(link, rank, size, group, found)
        # All waits have one deadline, so that nobody who comes puts it off.
        deadline = waiter.deadline()
        try:
            while len(found) < group.world_size - 1:
                waiter.until(
                    lambda: self._admit(group, found),
                    lambda: f"ranks {_few(set(range(1, group.world_size)) - found.keys())} of epoch {group.epoch}",
                    watching=list(found.values()),
                    reading=[self._listener, *self._strangers],
                    deadline=deadline,
                )
        except BaseException as error:
            for link in found.values():
                link.end(str(error))
            raise
        return [found[rank] for rank in sorted(found)]

    def _admit(self, group: CollectiveGroup, found: dict[int, Link]) -> bool:
        """Take in new callers; whether that changed the links to wait on."""
        before = list(self._strangers), len(found)
        most = max(MAX_WAITING, group.world_size)
        while (link := self._listener.accept()) is not None:
            if self._is_silent(link, group, found):
                self._strangers.append(link)
            if len(self._strangers) > most:
                # It may have spoken since it was looked at.
                oldest = self._strangers.pop(0)
                if self._is_silent(oldest, group, found):
                    oldest.end("said nothing")
        self._strangers = [link for link in self._strangers if self._is_silent(link, group, found)]
        return (self._strangers, len(found)) != before

    def _is_silent(self, link: Link, group: CollectiveGroup, found: dict[int, Link]) -> bool:
        """Greet a caller that has said something; whether it has still to."""
        try:
            hello = link.receive()
        except (ConnectionError, ValueError) as error:
            link.end(str(error))
            return False
        if hello is None:
            return True
        self._greet(link, hello, group, found)
        return False

    def _greet(self, link: Link, hello: Frame, group: CollectiveGroup, found: dict[int, Link]) -> None:
        if hello.kind is not FrameKind.HELLO or not 0 < hello.index < hello.size:
            link.end("this is no HELLO")
        elif not hmac.compare_digest(hello.text, group.token.encode()):
            link.end("this is not the token of the group")
        elif hello.number < group.epoch:
            link.end(f"epoch {hello.number} is over, this is {group.epoch}")
        elif hello.number == group.epoch:
            _let_in(link, hello.index, hello.size, group, found)
        elif len(self._early) >= max(MAX_WAITING, group.world_size):
            link.end("too many wait already")
        else:
            known = self._early.pop((hello.number, hello.index), None)
            if known is not None:
                known[0].end(f"another rank {hello.index} of epoch {hello.number} has come")
            self._early[hello.number, hello.index] = link, hello.size


def _let_in(link: Link, rank: int, size: int, group: CollectiveGroup, found: dict[int, Link]) -> None:
    """Take a caller of this epoch, which knows a group of this size, among its members, or turn it away."""
    if size != group.world_size or rank >= size or rank in found:
        link.end(f"epoch {group.epoch} has {group.world_size} members, and no second rank {rank} of {size}")
    else:
        link.name = f"rank {rank}"
        found[rank] = link


def call(group: CollectiveGroup, rank: int, waiter: Waiter) -> tuple[Link, bytes]:
    """Link to rank 0, and the invitation that it sends when all are there. Called by a member."""
    connection = dial(group.host, group.port)
    try:
        waiter.until(lambda: dialled(connection), "the learner to answer", writing=[connection])
    except BaseException:
        connection.close()
        raise
    link = Link(connection, "the learner")
    try:
        link.send(
            Frame(
                kind=FrameKind.HELLO, number=group.epoch, index=rank, size=group.world_size, text=group.token.encode()
            )
        )
        frame = next_frame(link, waiter, f"all members of epoch {group.epoch}")
        check(frame, Frame(kind=FrameKind.BEGIN, number=group.epoch, text=frame.text))
    except BaseException as error:
        link.end(str(error))
        raise
    return link, frame.text


def _few(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown + (", ..." if len(ranks) > 8 else "")


def next_frame(link: Link, waiter: Waiter, what: str) -> Frame:
    """The next frame of a link."""
    frames: list[Frame] = []

    def came() -> bool:
        frame = link.receive()
        if frame is not None:
            frames.append(frame)
        return bool(frames)

    waiter.until(came, what, reading=[link])
    return frames[0]
