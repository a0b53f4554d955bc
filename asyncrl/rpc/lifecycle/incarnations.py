"""The numbers that a node agent gives to the lives of its actors.

An incarnation is ATTEMPT * SPAN + N: N counts the lives of one name within one attempt of the run, the first is 1. The
ranks of a gang share theirs, the *generation* of the gang. A new rank has a number above its predecessor's, and at
least the newest known generation. So ranks that may meet have one number, even if different agents have started them
while the controller was away. Clocks are not used: those of two hosts differ, and any may step back.

Invariant: the numbers of one name only grow, also over attempts, and no two of its lives have the same. An agent knows
the lives that it has started. The controller reports those that another agent has started (``hear``). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from asyncrl.messages.actors import Dead

SPAN = 1 << 32
"""More than the lives of a name within one attempt."""
LEAP = 1 << 16
"""More numbers than a host that is cut off gives to an actor before it is heard of again."""
STRIDE = 1 << 46
"""More numbers than a process gives in its life, if it counts 2^20 a second for two years. So 2^17 lives have numbers
that a message can carry: those of one that dies every eight minutes for as long."""


def attempt_begins_above(attempt: int, written: int) -> int:
    """A number that is below all of an attempt, and not below any of an earlier one.

    ``written`` is the newest learner of those that was let write checkpoints, or 0. It counts because the folder of
    checkpoints may have been written under another numbering, and refuses every learner that is older than that.
    """
    return (written // SPAN + attempt) * SPAN


def numbers_begin_above(incarnation: int) -> int:
    """A number below all that a process of this incarnation assigns, and above those of its predecessors."""
    return incarnation % SPAN * STRIDE


@dataclass(slots=True)
class Incarnations:
    """The numbers that one node agent gives. ``above`` is below all numbers of this attempt."""

    above: int
    gang_of: Callable[[str], str]
    """(name of an actor) → the name of its gang; empty for one of none."""
    _newest: dict[str, int] = field(default_factory=dict)
    """Newest incarnation of each name."""
    _generations: dict[str, int] = field(default_factory=dict)
    """Newest generation of each gang."""

    def next(self, name: str) -> int:
        """Incarnation of an actor that is started now."""
        number = self._newest.get(name, self.above) + 1
        if gang := self.gang_of(name):
            number = self._generations[gang] = max(number, self._generations.get(gang, 0))
        self._newest[name] = number
        return number

    def hear(self, dead: Iterable[Dead], generations: Mapping[str, int]) -> None:
        """Take in the dead and the generations that the controller knows of."""
        for actor in dead:
            if actor.incarnation > self._newest.get(actor.name, 0):
                # Started by another agent, which may be cut off and count on.
                self._newest[actor.name] = actor.incarnation + LEAP
        for gang, number in generations.items():
            self._generations[gang] = max(number, self._generations.get(gang, 0))
