"""The recorded snapshots of a run, for its replay: RUN/monitor/snapshots-ATTEMPT-SEGMENT.msgpack.

A segment is a stream of MessagePack arrays [wall (Unix, s), body]. The body is a snapshot in MessagePack, compressed
with Zstandard. If the complete segments together exceed ``most_bytes``, two neighbouring segments are merged, and every
second snapshot of the two is dropped. The pair with the shortest time between snapshots is merged first, and the oldest
among equal pairs. So the recording covers a run of any length, its past more coarsely. Invariant: in a segment with a
torn end, every snapshot before that end can be read. Raises OSError if a write fails. The reader reads each segment up
to its first unreadable entry, and raises PermissionError.
"""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import msgpack
import msgspec
import zstandard
from msgspec.structs import replace

from asyncrl.core.files import append_whole, replace_file
from asyncrl.messages.monitor import OVER, SCHEMA, Snapshot, decode_snapshot

FOLDER = "monitor"
LAST_WALL = 253_402_128_000.0
"""Unix time (s) two days before the year 10000, the end of Python's calendar."""
LARGEST_SNAPSHOT_BYTES = 1 << 28
SEGMENTS = 16
"""Approximate number of segments."""
LOOK_BACK = 8
"""Number of segments, and of snapshots in each, that are searched for a readable one."""
LEVEL = 3
"""Level of the compression by Zstandard."""
_NAME = re.compile(r"snapshots-(\d+)-(\d+)\.msgpack")


def is_wall(value: float) -> bool:
    """Whether a Unix time (s) can be shown as a date."""
    return 0.0 <= value <= LAST_WALL


@dataclass(frozen=True, slots=True, order=True)
class RecordingFile:
    """A segment of the recording. Segments sort in order of time."""

    attempt: int
    number: int
    path: Path


def entries_of(folder: Path) -> list[Path]:
    """The paths in a folder, sorted; an empty list if there is no folder. Raises OSError."""
    try:
        # Not by glob, which finds nothing in a folder without permission, instead of raising.
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def segments(run_dir: Path) -> list[RecordingFile]:
    """Segments of a run, in order of time. Raises OSError."""
    named = [(_NAME.fullmatch(path.name), path) for path in entries_of(run_dir / FOLDER)]
    return sorted(RecordingFile(int(match[1]), int(match[2]), path) for match, path in named if match)


class Recorder:
    """Writes the snapshots of one controller. Blocks; to be used by one thread at a time."""

    def __init__(self, run_dir: Path, attempt: int, most_bytes: int) -> None:
        self._folder = run_dir / FOLDER
        self._run_dir, self._attempt, self._most_bytes = run_dir, attempt, most_bytes
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._packer = msgpack.Packer()
        self._path: Path | None = None
        """The open segment; None if the next snapshot begins one."""
        self._size = 0
        """Size of the open segment (bytes)."""
        self._complete_sizes: dict[Path, int] = {}
        """Sizes of the complete segments (bytes)."""
        self._strides: dict[Path, float] = {}
        """Results of ``_stride``, because each costs a read of the segment."""

    @property
    def size(self) -> int:
        """Size of all segments (bytes)."""
        return self._size + sum(self._complete_sizes.values())

    def record(self, wall: float, snapshot: bytes) -> None:
        """Append a snapshot in MessagePack, taken at ``wall``; end the segment if it is large enough, and ``_thin``.

        Raises OSError if the snapshot was not written, or if ``_thin`` failed after that.
        """
        if self._path is None:
            self._begin()
        assert self._path is not None
        body = self._packer.pack([wall, self._compressor.compress(snapshot)])
        _append(self._path, body)
        self._size += len(body)
        if self._size > self._most_bytes // SEGMENTS:
            self._complete_sizes[self._path] = self._size
            self._path, self._size = None, 0
            self._thin()

    def _begin(self) -> None:
        """Begin a segment with the next free number, and read the sizes of all others. Raises OSError."""
        self._folder.mkdir(exist_ok=True)
        known = segments(self._run_dir)
        self._complete_sizes = {segment.path: segment.path.stat().st_size for segment in known}
        number = max((segment.number for segment in known if segment.attempt == self._attempt), default=-1) + 1
        self._path = self._folder / f"snapshots-{self._attempt:03}-{number:06}.msgpack"
        self._path.touch(exist_ok=False)
        self._size = 0

    def _thin(self) -> None:
        """Merge pairs of complete segments, with every second snapshot, until all fit or two segments are left."""
        while sum(self._complete_sizes.values()) > self._most_bytes and len(self._complete_sizes) > 2:
            paths = sorted(self._complete_sizes)
            # The newest complete segment keeps all of its snapshots.
            pairs = pairwise(paths[:-1])
            older, newer = min(pairs, key=lambda pair: sum(map(self._stride, pair)))
            entries = [entry for path in (older, newer) for entry in _entries(path)]
            replace_file(older, b"".join(self._packer.pack([wall, body]) for wall, body in entries[::2]))
            # ``newer`` goes last: if the writer dies before, some snapshots are there twice, and none is lost.
            newer.unlink()
            for path in (older, newer):
                self._strides.pop(path, None)
                del self._complete_sizes[path]
            self._complete_sizes[older] = older.stat().st_size

    def _stride(self, path: Path) -> float:
        """Mean seconds between two snapshots of a segment."""
        if path not in self._strides:
            walls = [wall for wall, _ in _entries(path)]
            # ``abs``, because the Unix clock may have been set back.
            seconds = sum(abs(later - earlier) for earlier, later in pairwise(walls))
            self._strides[path] = seconds / (len(walls) - 1) if len(walls) > 1 else 0.0
        return self._strides[path]


def _append(path: Path, body: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        append_whole(descriptor, body)
    finally:
        os.close(descriptor)


def read_bodies(run_dir: Path) -> Iterator[tuple[float, bytes]]:
    """Yields (wall, body for ``decode``) of all recorded snapshots, in the order of the segments, each once."""
    seen: set[float] = set()
    for segment in segments(run_dir):
        for wall, body in _entries(segment.path):
            # A writer that died in ``_thin`` may have left some snapshots twice.
            if wall not in seen:
                seen.add(wall)
                yield wall, body


def read_latest(run_dir: Path, seconds: float) -> list[tuple[float, bytes]]:
    """Returns entries as in ``read_bodies`` from the newest segments, which cover at least the last ``seconds``."""
    parts: list[list[tuple[float, bytes]]] = []
    newest = -math.inf
    for segment in reversed(segments(run_dir)):
        parts.append(list(_entries(segment.path)))
        newest = max([newest, *(wall for wall, _ in parts[-1])])
        if parts[-1]:
            oldest_here, _ = parts[-1][0]
            if oldest_here < newest - seconds:
                break
    # The keys are walls, so that a snapshot which a dead writer left twice counts once.
    backwards = dict(chain.from_iterable(map(reversed, parts)))
    return list(backwards.items())[::-1]


def last_recorded(run_dir: Path, attempt: int) -> Snapshot | None:
    """Return the newest readable snapshot of an attempt, from its newest LOOK_BACK segments; None without one."""
    own = [segment for segment in segments(run_dir) if segment.attempt == attempt]
    for segment in reversed(own[-LOOK_BACK:]):
        for _, body in reversed(deque(_entries(segment.path), maxlen=LOOK_BACK)):
            if (snapshot := decode(body)) is not None:
                return snapshot
    return None


def decode(body: bytes) -> Snapshot | None:
    """A recorded snapshot; None if it is damaged, too large or of another schema."""
    try:
        if zstandard.frame_content_size(body) > LARGEST_SNAPSHOT_BYTES:
            return None
        snapshot = decode_snapshot(zstandard.ZstdDecompressor().decompress(body))
    except (zstandard.ZstdError, msgspec.DecodeError):
        return None
    return snapshot if snapshot.schema == SCHEMA else None


def ended(last: Snapshot, *, lives: bool) -> Snapshot:
    """Returns ``last``, the last snapshot of a run. If the run neither lives nor has ended, marks it as failed."""
    run, actors = last.run, last.actors
    if lives or run.phase in OVER:
        return last
    why = "it was killed, stopped at once, or its host went down"
    why = f"nothing is known after this, when it was {run.phase}: {why}; see logs/attempt_{run.attempt}"
    return replace(
        last,
        run=replace(run, phase="failed", reason=why, stalled="", exit_code=1),
        actors=[replace(actor, condition="dead") for actor in actors],
    )


def ending(run_dir: Path, seen: Snapshot | None) -> Snapshot | None:
    """Return the last snapshot of a run that is not alive: the newer one of the last recorded one and ``seen``.

    A recorded snapshot of another run than that of ``seen`` does not count. A run without a recorded end counts as
    failed. None without any snapshot. Blocks.
    """
    last = seen
    try:
        entries = read_latest(run_dir, 0.0)
    except OSError:
        entries = []
    for _, body in reversed(entries):
        if (recorded := decode(body)) is not None:
            # The snapshot of a run that is over is the newest, even if the clock was set back.
            newer = seen is None or recorded.wall > seen.wall or recorded.run.phase in OVER
            if newer and (seen is None or recorded.run.run_id == seen.run.run_id):
                last = recorded
            break
    return None if last is None else ended(last, lives=False)


def _entries(path: Path) -> Iterator[tuple[float, bytes]]:
    """Yields (wall, body) of a segment up to the first unreadable entry. Raises PermissionError."""
    try:
        with path.open("rb") as file:
            unpacker = msgpack.Unpacker(file, max_buffer_size=LARGEST_SNAPSHOT_BYTES)
            while True:
                match unpacker.unpack():
                    case [float() as wall, bytes() as body]:
                        yield wall, body
                    case _:
                        return
    except PermissionError:
        raise
    except (OSError, msgpack.OutOfData, msgpack.UnpackException, ValueError):
        # The end of the file, a torn or damaged entry, or a segment that a writer has removed meanwhile.
        return
