"""The snapshots that the terminal shows: of a run that lives, or of a recording that is gone through at will.

Recorded snapshots stay as they lie on disk until they are shown. Invariant: the last snapshot of a run that has ended
is one of its end; of a run that was killed as a whole it is made of what was recorded or seen last. Fails with
UsageError when nothing is recorded, or nothing of it can be read.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from msgspec.structs import replace

from asyncrl.errors import UsageError
from asyncrl.snapshot import OVER, Snapshot
from asyncrl.telemetry.snapshots.recording import FOLDER, decode, read_latest, segments
from asyncrl.top.source.client import Away, WatchedRun, watch
from asyncrl.top.source.history import LONGEST_S, RATES_S, History

LEAST_S = 0.001
"""Least time between two places of a recording, as where the clock was set back between them."""
SPEEDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
ELSE = "What the run measured and logged is shown by --report and --explain"
FRAMES = 24
"""Snapshots from which shares are taken after a jump."""


class Replay:
    """Place of the viewer in a recording; ``position`` is Unix time, s."""

    def __init__(self, entries: Sequence[tuple[float, bytes]], *, lives: bool = False) -> None:
        """``entries`` are (wall, snapshot as recorded), in the order of the recording; there is at least one. Those
        behind the newest that can be read are left out.

        ``lives``: more may come.
        """
        self.lives = lives
        count = len(entries)
        while count > 1 and decode(entries[count - 1][1]) is None:
            count -= 1
        # Each place is after the one before: where the clock was set back, later ones are shifted by as much.
        walls = [wall for wall, _ in entries[:count]]
        passed = (max(LEAST_S, later - earlier) for earlier, later in pairwise(walls))
        self._walls: list[float] = list(accumulate(passed, initial=walls[0]))
        self._bodies = [body for _, body in entries[:count]]
        self.position = self._walls[0]
        self.speed = SPEEDS[3]
        self.playing = True
        self._shown = -1
        self._history = History()

    def take(self, whole: Replay) -> None:
        """Go on in ``whole``, a later look at the same recording, from the present position."""
        self.lives, self._walls, self._bodies = whole.lives, whole._walls, whole._bodies
        # Drawn anew: whether the run lives, and which snapshot is the last, changes the picture of its end.
        self._shown = -1

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
        """Play if it is stopped, and stop if it plays; at the end play from the beginning."""
        if self.at_end and not self.playing:
            self.jump(self.begin)
        self.playing = not self.playing

    def jump(self, position: float) -> None:
        self.position = max(self.begin, min(self.end, position))

    def seek(self, share: float) -> None:
        """Go by a share of the recording."""
        self.jump(self.position + share * (self.end - self.begin))

    def step(self, by: int) -> None:
        """Go by so many snapshots, and stay."""
        self.playing = False
        self.position = self._walls[max(0, min(len(self._walls) - 1, self._index() + by))]

    def faster(self, by: int) -> None:
        """Take the next speed, or the one before."""
        self.speed = SPEEDS[max(0, min(len(SPEEDS) - 1, SPEEDS.index(self.speed) + by))]

    def history(self) -> History:
        """The snapshots up to the position, the newest of them that of the position."""
        index = self._index()
        if index != self._shown:
            # Backwards, or so far ahead that some of the snapshots in between will do.
            if not self._shown < index <= self._shown + FRAMES:
                self._history = History()
                numbers = self._before(index)
            else:
                numbers = list(range(self._shown + 1, index + 1))
            for number in numbers:
                if (snapshot := self._decoded(number)) is not None:
                    self._history.add(snapshot)
            self._shown = index
        return self._history

    def _index(self) -> int:
        return max(0, bisect_right(self._walls, self.position) - 1)

    def _before(self, index: int) -> list[int]:
        """The snapshot at ``index``, and those before it that lie within its window: some, and all of the latest."""
        last = self._decoded(index)
        window = LONGEST_S if last is None else History.window_s(last)
        first, latest = (
            max(0, bisect_right(self._walls, self._walls[index] - seconds) - 1) for seconds in (window, RATES_S)
        )
        stride = max(1, -(-(index - first) // FRAMES))
        return sorted({*range(first, index, stride), *range(latest, index + 1)})

    def _decoded(self, index: int) -> Snapshot | None:
        snapshot = decode(self._bodies[index])
        if snapshot is None or index < len(self._bodies) - 1:
            return snapshot
        return ended(snapshot, lives=self.lives)


def ended(last: Snapshot, *, lives: bool) -> Snapshot:
    """The last picture of a run: one that does not live and of which no end is recorded has failed."""
    run, actors = last.run, last.actors
    if lives or run.phase in OVER:
        return last
    why = "it was killed, or told to end at once, or its host went down"
    why = f"nothing is known after this, when it was {run.phase}: {why}; see logs/attempt_{run.attempt}"
    return replace(
        last,
        run=replace(run, phase="failed", reason=why, stalled="", exit_code=1),
        actors=[replace(actor, condition="dead") for actor in actors],
    )


def ending(run_dir: Path, seen: Snapshot | None) -> Snapshot | None:
    """End of a run that does not live, as far as it is recorded, readably, or was ``seen``; None if neither. Blocks."""
    last = seen
    try:
        entries = read_latest(run_dir, 0.0)
    except OSError:
        entries = []
    for _, body in reversed(entries):
        if (found := decode(body)) is not None:
            # An end comes after all that was seen, whatever the clock says.
            newer = seen is None or found.wall > seen.wall or found.run.phase in OVER
            if newer and (seen is None or found.run.run_id == seen.run.run_id):
                last = found
            break
    return None if last is None else ended(last, lives=False)


def open_replay(run_dir: Path, *, lives: bool) -> Replay:
    """The recording of a run, which may live. Raises UsageError."""
    folder, entries = run_dir / FOLDER, read_latest(run_dir, math.inf)
    if not entries:
        damaged = [segment.path.name for segment in segments(run_dir) if segment.path.stat().st_size]
        why = "monitor.record_bytes was 0, or the run ended before it had begun"
        if damaged:
            why = f"damaged: {', '.join(damaged)}"
        raise UsageError(f"{folder}: nothing is recorded there that can be read; {why}. {ELSE}")
    if all(decode(body) is None for _, body in entries):
        raise UsageError(f"{folder}: no snapshot there can be read, damaged or of another version of asyncrl. {ELSE}")
    return Replay(entries, lives=lives)


def recent_history(run_dir: Path) -> History:
    """Recorded snapshots of the last minutes, so that a viewer that has just come knows shares at once."""
    try:
        entries = read_latest(run_dir, LONGEST_S)
    except OSError:
        entries = []
    if not entries:
        return History()
    replay = Replay(entries, lives=True)
    replay.jump(replay.end)
    return replay.history()


async def follow(target: WatchedRun) -> AsyncIterator[Snapshot | Away]:
    """Snapshots of ``watch``, and then one of the end. Raises UsageError as ``watch`` does."""
    last: Snapshot | None = None
    async for seen in watch(target):
        yield seen
        if isinstance(seen, Snapshot):
            last = seen
    if target.run_dir is not None and (last is None or last.run.phase not in OVER):
        end = await asyncio.to_thread(ending, target.run_dir, last)
        if end is not None:
            yield end


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
