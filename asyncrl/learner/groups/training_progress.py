"""The numbers that the parts of the learner's loop share.

Training counts steps, VersionSchedule counts versions, the actor sets ``preempted``; all other parts only read. A
change that others wait for is followed by ``news.announce``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


class News:
    """A signal to several waiters. Each has its own event and clears it itself."""

    def __init__(self) -> None:
        self._events: list[asyncio.Event] = []

    def listen(self) -> asyncio.Event:
        """A new event that every announcement sets."""
        self._events.append(event := asyncio.Event())
        return event

    def announce(self) -> None:
        """Wake all waiters: groups or prompts have come, a teacher has scored, a version was lost, or the run ends."""
        for event in self._events:
            event.set()


@dataclass(slots=True)
class TrainingProgress:
    """Progress of the training of a run."""

    step: int = 0
    """Steps trained so far."""
    version: int = -1
    """The newest version; -1 before the first."""
    trained_at_version: int = 0
    """Groups that were trained when that version was published."""
    unpublished: int = 0
    """Steps trained since that version."""
    preempted: bool = False
    """Whether the run is preempted: it stops at the next version boundary."""
    finished: bool = False
    """Whether the last step was trained."""
    news: News = field(default_factory=News)
