"""The thread and the queue of one sink: a sink that blocks or fails does not delay the others.

The thread opens the sink, writes each record and closes it. If the sink raises, the record is lost and counted. The
thread then closes the sink and opens it again after a pause that grows with each failure. Lines beyond ROOM, and update
lines beyond half of it, are dropped and counted. Only the newest snapshot is queued, because snapshots are large.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import ClassVar, Protocol

from asyncrl.messages.monitor import Snapshot
from asyncrl.observe.metrics_line import room_for
from asyncrl.observe.sinks.history_sinks import Line
from asyncrl.rpc.calls.retry import backoff

ROOM = 4000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
TROUBLE_CHARACTERS = 500
SECRETS = ("WANDB_API_KEY",)
"""Environment variables whose values no error shows."""


class Sink(Protocol):
    """A sink, called from one thread. Any exception is a failure of this sink alone."""

    name: ClassVar[str]
    address: str
    """Path or URL of the sink's output; empty while the sink is not open, or if it names none."""

    def open(self) -> None:
        """Prepare to write; called again after each failure."""

    def write(self, record: Line | Snapshot) -> None:
        """Write one record."""

    def close(self) -> None:
        """Write buffered data, and release all resources."""


class SinkThread:
    """Runs one sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._lines: deque[Line] = deque()
        self._snapshot: Snapshot | None = None
        """The newest snapshot, until it is written."""
        self._news = threading.Condition()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self.name = sink.name
        self.dropped = 0
        """Number of lines that found no room in the queue."""
        self.lost = 0
        """Number of records that were lost by failures."""
        self.failures = 0
        """Number of failures so far."""
        self.trouble = ""
        """Reason of the present failure; empty while the sink works."""

    @property
    def address(self) -> str:
        """Path or URL of the sink's output."""
        return self._sink.address

    def start(self) -> None:
        """Start the thread, which opens the sink."""
        self._thread.start()

    def put(self, record: Line | Snapshot) -> None:
        """Queue a record, or drop it; never waits."""
        with self._news:
            if isinstance(record, Snapshot):
                self._snapshot = record
            elif len(self._lines) >= room_for(record, ROOM):
                self.dropped += 1
            else:
                self._lines.append(record)
            self._news.notify()

    def end(self) -> None:
        """Let the thread close the sink once it has written the queue."""
        self._ending.set()
        with self._news:
            self._news.notify()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread. Returns whether it has ended within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def fail(self, trouble: str) -> None:
        """Count a failure."""
        self.failures, self.trouble = self.failures + 1, trouble

    def _run(self) -> None:
        """Open the sink, write records until the end, and close it; after a failure, pause and open it again.

        ``failures`` counts failures in a row. A failed write sets ``takes_lines`` to False, and the next written line
        sets it to True again. A written record resets ``failures`` only while ``takes_lines`` is True. A snapshot does
        not set it, because some sinks only keep snapshots in memory. At the end of the run, a second failure in a row
        ends the thread.
        """
        is_open, failures, takes_lines = False, 0, True
        while True:
            record: Line | Snapshot | None = None
            try:
                if not is_open:
                    self._sink.open()
                    is_open = True
                record = self._next()
                if record is None:
                    break
                self._sink.write(record)
            # Some libraries raise SystemExit.
            except (Exception, SystemExit) as error:
                self.lost += record is not None
                takes_lines = takes_lines and record is None
                self.fail(describe(error))
                self._close_quietly()
                is_open, failures = False, failures + 1
                pause_s = backoff(FIRST_PAUSE_S, failures - 1, LONGEST_PAUSE_S)
                if self._ending.wait(pause_s) and failures > 1:
                    self._lose_queue()
                    return
            else:
                takes_lines = takes_lines or not isinstance(record, Snapshot)
                if takes_lines:
                    failures, self.trouble = 0, ""
        try:
            self._sink.close()
        except (Exception, SystemExit) as error:
            self.fail(describe(error))

    def _next(self) -> Line | Snapshot | None:
        """Wait for the next record, a snapshot first; None at the end."""
        with self._news:
            self._news.wait_for(lambda: self._snapshot or self._lines or self._ending.is_set())
            if self._snapshot is not None:
                snapshot, self._snapshot = self._snapshot, None
                return snapshot
            return self._lines.popleft() if self._lines else None

    def _lose_queue(self) -> None:
        with self._news:
            self.lost += len(self._lines)
            self._lines.clear()

    def _close_quietly(self) -> None:
        # The caller reports the failure before, so an error of the close adds nothing.
        with contextlib.suppress(Exception, SystemExit):
            self._sink.close()


def describe(error: BaseException) -> str:
    """The error in one line, without the values of SECRETS."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for name in SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return text[:TROUBLE_CHARACTERS]
