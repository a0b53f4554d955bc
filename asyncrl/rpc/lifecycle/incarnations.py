"""Incarnations: numbers that identify the successive processes of an actor. A node agent assigns them.

An incarnation is B * SPAN + N, where B grows with each attempt of the run. N grows with each process of one actor name
within the attempt, from 1. A *rank group* is a set of actors that must start together, such as the ranks of the
learner. Its members share one incarnation, the *generation* of the group. A new member gets a number above its
predecessor's, and at least the newest known generation. So members that may meet have one number, even if different
agents started them while the controller was away. Clocks are not used: those of two hosts differ, and any clock may
step back.

Invariant: the numbers of one name only grow, also over attempts, and no two of its processes have the same. An agent
knows the processes that it has started. The controller reports those that another agent has started (``hear``). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from asyncrl.core.roles import rank_group_of
from asyncrl.messages.actors import Dead

SPAN = 1 << 32
"""More than the number of processes of one name within one attempt."""
LEAP = 1 << 16
"""More than the number of times that a host which is cut off restarts an actor before it is heard of again."""
STRIDE = 1 << 46
"""More numbers than one process assigns to its items, even with 2^20 a second for two years. Within 63 bits, the limit
of a message, there are such ranges for 2^17 processes: one every eight minutes for two years."""


def attempt_begins_above(attempt: int, written: int) -> int:
    """Returns a number below all incarnations of this attempt, and not below any incarnation of an earlier attempt.

    ``written`` is the incarnation of the newest learner that was allowed to write checkpoints, or 0. The checkpoint
    folder refuses every older learner, and may come from another run with larger numbers.
    """
    return (written // SPAN + attempt) * SPAN


def numbers_begin_above(incarnation: int) -> int:
    """Returns the start of the range from which a process of this incarnation numbers its own items.

    The range is above those of all predecessors within the attempt.
    """
    return incarnation % SPAN * STRIDE


@dataclass(slots=True)
class Incarnations:
    """Assigns the incarnations of one node agent's actors. ``above`` is below all incarnations of this attempt."""

    above: int
    _newest: dict[str, int] = field(default_factory=dict)
    """Newest incarnation of each name."""
    _generations: dict[str, int] = field(default_factory=dict)
    """Newest generation of each rank group."""

    def next(self, name: str) -> int:
        """Assigns the incarnation of a process of actor ``name`` that starts now."""
        number = self._newest.get(name, self.above) + 1
        if rank_group := rank_group_of(name):
            number = self._generations[rank_group] = max(number, self._generations.get(rank_group, 0))
        self._newest[name] = number
        return number

    def stay_above(self, dead: Iterable[Dead], generations: Mapping[str, int]) -> None:
        """Raise the numbers above the dead incarnations and the generations that the controller reports."""
        for actor in dead:
            if actor.incarnation > self._newest.get(actor.name, 0):
                # Another agent has started it, and may be cut off and continue to assign numbers.
                self._newest[actor.name] = actor.incarnation + LEAP
        for rank_group, number in generations.items():
            self._generations[rank_group] = max(number, self._generations.get(rank_group, 0))
