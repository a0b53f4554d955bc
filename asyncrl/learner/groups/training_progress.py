"""The numbers of the run's progress that the parts of the learner's loop share.

Training counts steps, Versions counts versions, Rank0 sets ``preempted``; all other parts only read. After a
change that others wait for, the writer calls ``news.announce``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


class News:
    """A signal to several waiters. Each gets an event of its own from ``listen`` and clears it itself."""

    def __init__(self) -> None:
        self._events: list[asyncio.Event] = []
        """The event of each waiter."""

    def listen(self) -> asyncio.Event:
        """Make a new event, which every later announcement sets."""
        self._events.append(event := asyncio.Event())
        return event

    def announce(self) -> None:
        """Wake all waiters: groups or prompts came, a teacher has scored, a version was lost, or the run ends."""
        for event in self._events:
            event.set()


@dataclass(slots=True)
class TrainingProgress:
    """Progress of a run: its steps, its newest version, and whether it ends."""

    step: int = 0
    """Steps trained so far."""
    version: int = -1
    """The newest version of the weights; -1 before the first."""
    trained_at_version: int = 0
    """Number of groups that were trained when ``version`` was published."""
    unpublished: int = 0
    """Steps trained since ``version`` was published."""
    preempted: bool = False
    """Whether the run is preempted: it stops at the next version boundary."""
    finished: bool = False
    """Whether the last step was trained."""
    news: News = field(default_factory=News)
