"""Exactly once, for what goes ahead of its step: taken it is trained, once; void it never is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from examples import examples
from hypothesis import event, given, settings
from hypothesis import strategies as st

from asyncrl.learner.exchange.sent_ahead import ParcelSlot, Sending, Sendings


@pytest.mark.parametrize(
    ("happened", "void"),
    [
        ([], False),
        ([Sendings.take], False),
        # Other groups came, the version was not made, the step was filtered or refused, the run makes way.
        ([Sendings.withdraw], True),
        ([Sendings.take, Sendings.begin, Sendings.withdraw], False),
        ([Sendings.take, Sendings.begin, Sendings.take], True),
    ],
)
def test_what_no_step_can_take_any_more_is_void(happened: list[Callable[[Sendings], object]], void: bool) -> None:
    sendings = Sendings()
    first = sendings.begin()
    for happens in happened:
        happens(sendings)
    assert sendings.is_void(first.number) == void


def test_a_rank_trains_what_it_is_told_or_fails() -> None:
    slot, parcel = ParcelSlot(), np.zeros(1, np.uint8)
    with pytest.raises(ValueError, match="parcel 1 is to be trained, and none is held"):
        slot.take(1)
    slot.put(2, parcel)
    with pytest.raises(ValueError, match="parcel 1 is to be trained, and parcel 2 is held"):
        slot.take(1)
    assert slot.take(2) is parcel
    with pytest.raises(ValueError, match="parcel 2 is to be trained, and none is held"):
        slot.take(2)


class World:
    """Rank 0 with its loop and its planning thread, and one rank with a thread that trains and one that receives.

    All go on whenever they are asked to and can; the rank may lag behind by all that the protocol lets it.
    """

    def __init__(self) -> None:
        self.sendings, self.slot = Sendings(), ParcelSlot()
        self.planned: Sending | None = None
        """By the planning thread, until it is sent."""
        self.announced: Sending | None = None
        self.step: int | None = None
        """Number of the step that rank 0 is in; 0 for one that was not sent ahead."""
        self.commands: deque[int] = deque()
        self.taken: list[int] = []
        self.withdrawn: set[int] = set()
        self.trained: list[int] = []

    def _withdraw(self) -> None:
        if self.sendings.wanted:
            self.withdrawn.add(self.sendings.wanted)
        self.sendings.withdraw()

    @property
    def sends(self) -> bool:
        return self.planned is not None or self.announced is not None

    def expect_another(self) -> bool:
        """Groups came: what was planned for the next step is planned anew."""
        if self.sends:
            return False
        self._withdraw()
        self.planned = self.sendings.begin()
        return True

    def step_with_that_plan(self) -> bool:
        if self.step is not None or not self.sendings.wanted:
            return False
        self.step = self.sendings.take()
        self.taken.append(self.step)
        return True

    def step_with_another_plan(self) -> bool:
        if self.step is not None:
            return False
        self._withdraw()
        self.step = 0
        self.commands.append(0)
        return True

    def send(self) -> bool:
        if self.planned is None:
            return False
        if not self.sendings.is_void(self.planned.number):
            self.announced = self.planned
        self.planned = None
        return True

    def receive(self) -> bool:
        if self.announced is None or not self.slot.make_room(self.announced.taken):
            return False
        self.slot.put(self.announced.number, np.full(1, self.announced.number))
        self.announced = None
        return True

    def command(self) -> bool:
        """Once the plan that was taken is there, and sent."""
        under_way = {each.number for each in (self.planned, self.announced) if each is not None}
        if not self.step or self.step in under_way or self.step in self.commands:
            return False
        self.commands.append(self.step)
        return True

    def train(self) -> bool:
        """The rank does what it was told; rank 0's step ends with it."""
        if not self.commands:
            return False
        number = self.commands.popleft()
        if number:
            self.trained.append(int(self.slot.take(number)[0]))
        self.step = None
        return True


DO = (
    World.expect_another,
    World.step_with_that_plan,
    World.step_with_another_plan,
    World.send,
    World.receive,
    World.command,
    World.train,
)


@settings(max_examples=examples(200))
@given(st.lists(st.sampled_from(DO), max_size=60))
def test_what_was_taken_is_trained_once_and_what_was_withdrawn_never(happens: list[Callable[[World], bool]]) -> None:
    world = World()
    for do in happens:
        do(world)
        assert not world.withdrawn.intersection(world.trained)
    # Whatever waits for something gets it.
    while any(do(world) for do in (World.send, World.receive, World.command, World.train)):
        pass
    assert world.step is None
    assert not world.sends
    event(f"{len(world.trained)} trained, {len(world.withdrawn)} withdrawn")
    assert world.trained == world.taken
    assert not world.withdrawn.intersection(world.trained)
