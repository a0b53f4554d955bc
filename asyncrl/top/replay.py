"""The sources of snapshots for the terminal: a live run, or a recording with a position.

Recorded snapshots stay encoded until they are shown. Invariant: the last snapshot of an ended run shows its end. For a
killed run it is made from the last recorded or seen snapshot. Raises UsageError if nothing is recorded or readable.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from asyncrl.core.errors import UsageError
from asyncrl.messages.monitor import Snapshot
from asyncrl.observe.recording import FOLDER, decode, ended, read_latest, segments
from asyncrl.top.client import Away
from asyncrl.top.view import LONGEST_S, RATES_S, History

LEAST_S = 0.001
"""Smallest time between two snapshots of a recording, for example where the clock was set back."""
SPEEDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
ELSE = "--report and --explain show what the run measured and logged"
FRAMES = 24
"""Snapshots that shares are taken from after a jump."""


class Replay:
    """Place of the viewer in a recording; ``position`` is Unix time, s."""

    def __init__(self, entries: Sequence[tuple[float, bytes]], *, lives: bool = False) -> None:
        """``entries`` are (wall, recorded snapshot), at least one, in the order of the recording. Unreadable entries at
        the end are left out. ``lives``: the run is alive, so the last entry is not its end."""
        self.lives = lives
        count = len(entries)
        while count > 1 and decode(entries[count - 1][1]) is None:
            count -= 1
        # Positions must ascend: where the clock was set back, the later positions are shifted.
        walls = [wall for wall, _ in entries[:count]]
        passed = (max(LEAST_S, later - earlier) for earlier, later in pairwise(walls))
        self._walls: list[float] = list(accumulate(passed, initial=walls[0]))
        """Position of each snapshot (Unix time, s), strictly ascending."""
        self._bodies = [body for _, body in entries[:count]]
        """Each snapshot as recorded (``decode``)."""
        self.position = self._walls[0]
        # The speed at first: ten times that of the run.
        self.speed = SPEEDS[3]
        self.playing = True
        self._history_end = -1
        """Index of the newest snapshot in ``_history``; -1 if a new history is needed."""
        self._history = History()

    @property
    def begin(self) -> float:
        return self._walls[0]

    @property
    def end(self) -> float:
        return self._walls[-1]

    @property
    def at_end(self) -> bool:
        """Whether there is nothing left to play."""
        return self.position >= self.end

    def advance(self, seconds: float) -> None:
        if self.playing:
            self.position = min(self.end, self.position + seconds * self.speed)
            self.playing = not self.at_end

    def play_or_stop(self) -> None:
        """Play or stop; at the end play from the beginning."""
        if self.at_end and not self.playing:
            self.jump(self.begin)
        self.playing = not self.playing

    def jump(self, position: float) -> None:
        self.position = max(self.begin, min(self.end, position))

    def seek(self, share: float) -> None:
        """Move by a share of the recording."""
        self.jump(self.position + share * (self.end - self.begin))

    def step(self, by: int) -> None:
        """Move by so many snapshots, and stop."""
        self.playing = False
        self.position = self._walls[max(0, min(len(self._walls) - 1, self._index() + by))]

    def faster(self, by: int) -> None:
        """Take the next speed, or the previous one."""
        self.speed = SPEEDS[max(0, min(len(SPEEDS) - 1, SPEEDS.index(self.speed) + by))]

    def history(self) -> History:
        """The history at the position. After a short move forwards, snapshots are added to the last history; after any
        other move, a new history is made."""
        index = self._index()
        if index != self._history_end:
            # After a move backwards, or more than FRAMES ahead, a few of the snapshots are enough for a new history.
            if not self._history_end < index <= self._history_end + FRAMES:
                self._history = History()
                numbers = self._needed_at(index)
            else:
                numbers = list(range(self._history_end + 1, index + 1))
            for number in numbers:
                if (snapshot := self._decoded(number)) is not None:
                    self._history.add(snapshot)
            self._history_end = index
        return self._history

    def _index(self) -> int:
        """Index of the newest snapshot that is not after the position."""
        return max(0, bisect_right(self._walls, self.position) - 1)

    def _needed_at(self, index: int) -> list[int]:
        """Indices of the snapshots that a history at ``index`` needs: all of the last RATES_S, and about FRAMES of its
        window."""
        last = self._decoded(index)
        window = LONGEST_S if last is None else History.window_s(last)
        window_begin, rates_begin = (
            max(0, bisect_right(self._walls, self._walls[index] - seconds) - 1) for seconds in (window, RATES_S)
        )
        stride = max(1, -(-(index - window_begin) // FRAMES))
        return sorted({*range(window_begin, index, stride), *range(rates_begin, index + 1)})

    def _decoded(self, index: int) -> Snapshot | None:
        """The snapshot at ``index``; None if it is unreadable. The last one shows the end of an ended run."""
        snapshot = decode(self._bodies[index])
        if snapshot is None or index < len(self._bodies) - 1:
            return snapshot
        return ended(snapshot, lives=self.lives)


def open_replay(run_dir: Path, *, lives: bool) -> Replay:
    """The recording of a run, which may be alive. Raises UsageError."""
    folder, entries = run_dir / FOLDER, read_latest(run_dir, math.inf)
    if not entries:
        damaged = [segment.path.name for segment in segments(run_dir) if segment.path.stat().st_size]
        why = "monitor.record_bytes was 0, or the run ended before its first snapshot"
        if damaged:
            why = f"damaged: {', '.join(damaged)}"
        raise UsageError(f"{folder}: nothing readable is recorded there; {why}. {ELSE}")
    if all(decode(body) is None for _, body in entries):
        raise UsageError(f"{folder}: the snapshots there are damaged, or of another version of asyncrl. {ELSE}")
    return Replay(entries, lives=lives)


def recent_history(run_dir: Path) -> History:
    """Recorded snapshots of the last minutes, so that a new viewer has rates at once."""
    try:
        entries = read_latest(run_dir, LONGEST_S)
    except OSError:
        entries = []
    if not entries:
        return History()
    replay = Replay(entries, lives=True)
    replay.jump(replay.end)
    return replay.history()


Feed = Callable[[], AsyncIterator[Snapshot | Away]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSource:
    """Source of snapshots: a feed, or a recording."""

    feed: Feed | None = None
    replay: Replay | None = None
    history: History = field(default_factory=History)
    """Snapshots that are known before the feed brings one."""
    run_dir: Path | None = None
    """Run folder with the logs and samples, if it is on this host."""
    trace: Callable[[], Awaitable[str]] | None = None
    """Has a trace written, and returns the outcome in words."""
