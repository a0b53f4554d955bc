"""Rank 0's place: who is let in, who is kept for later, and who is turned away."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from collective_peers import HOST, group_at

from asyncrl.messages.weights import CollectiveGroup
from asyncrl.weights.collective import meeting
from asyncrl.weights.collective.framing import Frame, FrameKind
from asyncrl.weights.collective.links import Link
from asyncrl.weights.collective.meeting import Meeting
from asyncrl.weights.collective.waiting import Waiter


class Callers:
    """Connections to a meeting, in the order in which they were made."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.links: list[Link] = []

    def come(self, count: int) -> list[Link]:
        """Callers that say nothing."""
        came = [Link(socket.create_connection((HOST, self._port)), "rank 0") for _ in range(count)]
        self.links += came
        return came

    def members(self, group: CollectiveGroup) -> list[Link]:
        """All members of a group, each of which has said HELLO."""
        came = self.come(group.world_size - 1)
        for rank, link in enumerate(came, 1):
            link.send(Frame(kind=FrameKind.HELLO, number=group.epoch, index=rank, size=group.world_size))
        return came


class Place(Meeting):
    """A meeting, and the names of those who were let in."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.links: list[Link] = []

    def names(self, group: CollectiveGroup, waiter: Waiter) -> list[str]:
        links = self.gather(group, waiter)
        self.links += links
        return [link.name for link in links]


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    for link in made.links:
        link.end("over")
    made.close()


@pytest.fixture
def callers(place: Place) -> Iterator[Callers]:
    made = Callers(place.port)
    yield made
    for link in made.links:
        link.end("over")


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    made = Waiter(10.0)
    yield made
    made.close()


def turned_away(links: list[Link]) -> list[str]:
    return [reason for link in links if (reason := link.obituary())]


def test_all_members_of_a_group_are_let_in_however_many_they_are(
    place: Place, callers: Callers, waiter: Waiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "MAX_WAITING", 2)
    first, second = group_at(place.port, 1, 6), group_at(place.port, 2, 6)
    early = callers.members(second)
    came = callers.members(first)
    # As many may be silent. Of those who came before, members have spoken, and none of them makes way for these.
    silent = callers.come(8)
    ranks = [f"rank {rank}" for rank in range(1, 6)]
    assert place.names(first, waiter) == ranks
    assert not turned_away(early + came)
    assert turned_away(silent) == ["rank 0: said nothing"] * 2
    # They have called already.
    assert place.names(second, waiter) == ranks


def test_a_caller_that_speaks_after_it_was_looked_at_is_heard_before_it_makes_way(
    place: Place, callers: Callers, waiter: Waiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "MAX_WAITING", 2)
    group = group_at(place.port, 1, 2)
    [member] = callers.come(1)
    hurried = Waiter(0.05)
    with pytest.raises(TimeoutError, match="ranks 1 of epoch 1"):
        place.names(group, hurried)
    hurried.close()
    member.send(Frame(kind=FrameKind.HELLO, number=1, index=1, size=2))
    callers.come(2)
    assert place.names(group, waiter) == ["rank 1"]
    assert not turned_away(callers.links)
