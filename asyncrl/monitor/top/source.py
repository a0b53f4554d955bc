"""Source of the snapshots for the terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.monitor.client import Away
from asyncrl.monitor.top.history import History
from asyncrl.monitor.top.replay import Replay
from asyncrl.snapshot import Snapshot

Feed = Callable[[], AsyncIterator[Snapshot | Away]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Source of snapshots: a feed, or a recording."""

    feed: Feed | None = None
    replay: Replay | None = None
    history: History = field(default_factory=History)
    """Snapshots that are known before the first one comes."""
    whole: Callable[[], Replay | None] | None = None
    """The recording once more, as a whole, when the run has ended; None before. Blocks; raises UsageError, OSError."""
    run_dir: Path | None = None
    """Run folder that holds the logs, if they can be read."""
    trace: Callable[[], Awaitable[str]] | None = None
    """Function that has a trace written; says what came of it."""
