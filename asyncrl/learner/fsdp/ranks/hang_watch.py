"""Detects that the learner's ranks hang, and names the waiting rank, what it waits for, and the ranks it waits on.

Under gloo a collective that not all ranks enter raises at its timeout; under NCCL it spins until a signal ends the
process. So each rank writes its Position to the ranks' store every BEAT_S, and in a long wait also reads those of the
others. A wait is a block of code around collectives, with a name. If the training thread makes no progress in a wait
for longer than the limit, the process ends with an error. Progress is the end of a wait inside it, or a ``mark``. On
CUDA a mark counts twice: at once, and when the device reaches it.

Invariant: the watch enters no collective, and its thread that reads the clock calls no other process. If all ranks
compute at the same place, no rank is to blame, and without NCCL that is not a hang, however long it lasts.

Fails by ending the process (``end_process``). If the store does not answer, learner/0 is to blame, which holds it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import torch
from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.formatting import name_some
from asyncrl.observe.logging import write_text

BEAT_S = 2.0
"""Seconds between two positions that a rank writes, and between two looks at the clock."""
SILENT_S = 15.0
"""Seconds without a new position after which a rank counts as stopped."""
AFTER_S = 5.0
"""Seconds past the limit that a collective has to raise by itself, before the process is ended."""
ASK_FROM = 0.5
"""Share of the limit after which a waiting rank begins to read the positions of the others."""
MOST_NAMED = 4
"""Most ranks that an error names."""
_LOG = logging.getLogger(__name__)


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank's training thread is; the rank writes it to the store."""

    beat: int
    """Index of this position, from 1; it grows as long as the process lives."""
    waits: int
    """Number of waits begun so far; all ranks begin the same waits in the same order."""
    what: str
    """Name of the present wait; empty outside of waits."""


@dataclass
class Others:
    """Remembers the positions of the other ranks, and finds the ranks to blame. Pure: the caller passes the time."""

    rank: int
    world_size: int
    _seen: dict[int, Position] = field(default_factory=dict)
    """The last position of each rank that was read."""
    _heard_at: dict[int, float] = field(default_factory=dict)
    """Time at which each rank's position was first seen with its present beat."""
    _asked_at: float | None = None
    """Time at which the present read of positions began; None outside of a read."""

    def ask(self, now: float) -> None:
        """Record that the caller begins to read the positions; a read that has not ended keeps its time."""
        self._asked_at = now if self._asked_at is None else self._asked_at

    def note(self, positions: dict[int, Position], now: float) -> None:
        """Record the positions that were read, by rank, and that the read has ended."""
        self._asked_at = None
        for rank, position in positions.items():
            known = self._seen.get(rank)
            if known is None or known.beat != position.beat:
                self._heard_at[rank] = now
            self._seen[rank] = position

    def blame(self, waits: int, what: str, now: float) -> list[str]:
        """Find the ranks that have stopped, or have not reached the wait of this rank. Returns one text for each.

        ``waits`` and ``what`` are those of this rank's own Position. If the store does not answer, rank 0 is to blame.
        Before the first read of positions no other rank is blamed.
        """
        if self.rank and self._asked_at is not None and now - self._asked_at > SILENT_S:
            return [f"learner/0 (its store has not answered for {now - self._asked_at:.0f} s)"]
        blamed = list[str]()
        if not self._seen:
            return blamed
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            seen = self._seen.get(rank)
            if seen is None:
                blamed.append(f"learner/{rank} (never heard of)")
            elif (silence := now - self._heard_at[rank]) > SILENT_S:
                blamed.append(f"learner/{rank} (silent for {silence:.0f} s, last {_describe(seen)})")
            # A rank in the same wait, or one that has begun more waits than this one, is not to blame: it waits itself.
            elif (seen.waits, seen.what) != (waits, what) and seen.waits <= waits:
                blamed.append(f"learner/{rank} ({_describe(seen)})")
        return blamed


def _describe(position: Position) -> str:
    return f"in {position.what}" if position.what else "outside of any wait"


def in_words(blamed: list[str]) -> str:
    """Join the texts of ``Others.blame`` for an error, at most MOST_NAMED of them."""
    if not blamed:
        return "the other ranks of the learner"
    return name_some(blamed, MOST_NAMED)


def end_process(error: DeadlineExceeded) -> NoReturn:
    """Log and print the error, and end this process at once; the node agent reports the last output."""
    _LOG.error("%s", error)
    write_text(f"{error.who}: {error}\n")
    # The training thread is in a call that nothing ends, and an orderly exit would wait for it.
    os._exit(error.exit_code)


@dataclass(slots=True)
class _Wait:
    what: str
    progress_at: float
    """Time of the last progress, at first that of the beginning."""


class HangWatch:
    """Watches the waits of one rank's training thread, which is the thread that creates the watch.

    Two threads of its own run until ``stop``: one writes and reads positions, one reads the clock.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: TCPStore,
        *,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """``store`` is a client of the ranks' store for this watch alone."""
        self._rank, self._world_size, self._store = rank, world_size, store
        self._on_cuda, self._timeout_s = device.type == "cuda", timeout_s
        self._others = Others(rank, world_size)
        self._watched_thread = threading.get_ident()
        """Thread whose waits are watched: the one that makes the watch."""
        self._lock = threading.Lock()
        """Guards the positions, the waits and the marks, which several threads use."""
        self._waits: list[_Wait] = []
        """The present waits, the innermost last."""
        self._waits_begun = 0
        self._marks: deque[torch.cuda.Event] = deque()
        """Marks that the device may not have reached, the oldest first."""
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._exchange_positions, "hang-exchange"), (self._watch_clock, "hang-clock"))
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Context that names a wait; on any thread but the watched one it does nothing.

        Contexts may be nested: the end of an inner wait is progress of the outer one.
        """
        if threading.get_ident() != self._watched_thread:
            yield
            return
        with self._lock:
            self._waits.append(_Wait(what, time.monotonic()))
            self._waits_begun += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits.pop()
                if self._waits:
                    self._waits[-1].progress_at = time.monotonic()

    def note_progress(self) -> None:
        """Record progress within a wait: now, and again once the device has done the work queued so far."""
        if self._on_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            with self._lock:
                self._marks.append(event)
        self._restart_clock()

    def blamed(self) -> list[str]:
        """Return texts on the ranks to blame for the present wait; empty on any thread but the watched one."""
        return self._blame() if threading.get_ident() == self._watched_thread else []

    def _blame(self) -> list[str]:
        """Return texts on the ranks to blame for the innermost wait, from any thread."""
        with self._lock:
            what = self._waits[-1].what if self._waits else ""
            return self._others.blame(self._waits_begun, what, time.monotonic())

    def stop(self) -> None:
        """End both threads; one that waits for the store ends with the process."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(BEAT_S)

    def _restart_clock(self) -> None:
        """Restart the clock of the innermost wait."""
        with self._lock:
            if self._waits:
                self._waits[-1].progress_at = time.monotonic()

    def _exchange_positions(self) -> None:
        """Thread: write this rank's position every BEAT_S; in a long wait also read those of the others.

        The thread ends when the store fails: rank 0 is gone or ending.
        """
        beat = 0
        while not self._stopped.wait(BEAT_S):
            beat += 1
            with self._lock:
                own = Position(beat, self._waits_begun, self._waits[-1].what if self._waits else "")
            try:
                self._store.set(f"position/{self._rank}", msgspec.msgpack.encode(own))  # type: ignore[arg-type]
                # Not in short waits: reads of all ranks would keep the store busy.
                if self._waited_s() > self._timeout_s * ASK_FROM:
                    with self._lock:
                        self._others.ask(time.monotonic())
                    positions = self._read_others()
                    with self._lock:
                        self._others.note(positions, time.monotonic())
            except (DistNetworkError, DistStoreError) as error:
                _LOG.debug("the ranks' store: %s", error)
                return

    def _read_others(self) -> dict[int, Position]:
        """Read the last position of each other rank that has written one."""
        keys = {rank: f"position/{rank}" for rank in range(self._world_size) if rank != self._rank}
        # multi_get would wait for the key of a rank that has written no position yet.
        present = [rank for rank, key in keys.items() if self._store.check([key])]
        bodies = self._store.multi_get([keys[rank] for rank in present])
        return {
            rank: msgspec.msgpack.decode(bytes(body), type=Position) for rank, body in zip(present, bodies, strict=True)
        }

    def _waited_s(self) -> float:
        """Seconds without progress in the present wait."""
        with self._lock:
            return time.monotonic() - self._waits[-1].progress_at if self._waits else 0.0

    def _watch_clock(self) -> None:
        """Thread: every BEAT_S record the marks that the device has reached, and end the process if it hangs."""
        while not self._stopped.wait(BEAT_S):
            # No lock is needed to look at the first mark: only this thread removes marks.
            while self._marks and self._marks[0].query():  # type: ignore[no-untyped-call]
                self._marks.popleft()
                self._restart_clock()
            waited_s, blamed = self._waited_s(), self._blame()
            # Without NCCL it is no hang if no rank is to blame: all compute at the same place.
            if waited_s > self._timeout_s + AFTER_S and (blamed or self._on_cuda):
                hint = "see their logs; the limit is learner.collective_timeout_s"
                with self._lock:
                    what = self._waits[-1].what if self._waits else ""
                end_process(DeadlineExceeded(f"learner/{self._rank}", in_words(blamed), what, waited_s, hint))
