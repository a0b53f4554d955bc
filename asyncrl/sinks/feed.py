"""The controller's end of the sinks: a bounded queue, and a thread that brings it to their process.

``line`` and ``picture`` never wait. The thread starts the process, writes what it takes, starts it again when it has
died, a bounded number of times with growing pauses, and ends it: at the end of the run it has a limited time to bring
out what it holds, after which it is killed with all that it has started. Only the newest snapshot waits; a line that
finds no room, or nobody who takes all of it, is dropped and counted. Nothing here fails the caller; a process that
cannot be started is one that has died.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import MutableMapping
from typing import Any

import msgspec
import psutil
from structlog.typing import FilteringBoundLogger

from asyncrl.sinks.records import READ_BYTES, Line, Picture, Record, Report, Setup, Stream

DROPPED, LOST, RESTARTS = "sinks/dropped", "sinks/lost", "sinks/restarts"
ROOM = 1000
MOST_RESTARTS = 5
FIRST_PAUSE_S = 1.0
LONG_LIFE_S = 600.0
"""Life (s) after which a process has died of something else than those before it."""
KILLED_S = 5.0
"""Time that a killed process has to be gone; one that the kernel holds longer is left to the node agent."""

_encoder = msgspec.msgpack.Encoder()


class SinkFeed:
    """Feeds one process of sinks. ``counters`` gets the counts."""

    def __init__(
        self,
        setup: Setup,
        *,
        counters: MutableMapping[str, float],
        log: FilteringBoundLogger,
        room: int = ROOM,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._setup = setup
        self._counters = counters
        self._log = log
        self._room = room
        self._first_pause_s = first_pause_s
        self._queue: deque[Line] = deque()
        self._picture: Picture | None = None
        """The newest snapshot, while it waits."""
        self._last_picture: Picture | None = None
        """The snapshot that was handed on last: a process that is started again begins with it."""
        self._sending: Record | None = None
        """The record of which a part is with the process at most."""
        self._lock = threading.Lock()
        self._reported = Report()
        """The newest report of the process that lives."""
        self._flush_until: float | None = None
        self._given_up = False
        self.pid = 0
        """Id of the process, while there is one."""
        # Set here, for other threads go through the counters, which must not grow meanwhile.
        for name in (DROPPED, LOST, RESTARTS):
            counters[name] = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="sinks", daemon=True)
        self._thread.start()

    def line(self, line: dict[str, Any]) -> None:
        """Hand over a line of metrics.jsonl, which nobody changes any more."""
        if self._is_over or len(self._queue) >= self._room:
            self._count(DROPPED)
        else:
            self._queue.append(Line(line))
            self._notify()

    def picture(self, snapshot: bytes) -> None:
        """Hand over a snapshot, encoded, in place of one that still waits."""
        if not self._is_over:
            with self._lock:
                self._picture = Picture(snapshot)
            self._notify()

    def close(self, flush_s: float) -> None:
        """Let the sinks bring out what they hold, for as long as ``flush_s``, and end their process. Blocks so long."""
        if self._wake < 0:
            return
        self._flush_until = time.monotonic() + flush_s
        self._notify()
        self._thread.join(flush_s + 2 * KILLED_S)
        if self._thread.is_alive():
            self._log.error("process of the sinks does not end", pid=self.pid)
        else:
            os.close(self._wake)
            self._wake = -1

    @property
    def _is_over(self) -> bool:
        return self._given_up or self._flush_until is not None

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counters[name] += by

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    # --- the thread ---

    def _run(self) -> None:
        deaths = 0
        try:
            while True:
                began = time.monotonic()
                try:
                    ended = self._live()
                except (OSError, ValueError) as error:
                    ended = str(error)
                if self._flush_until is not None:
                    break
                deaths = 1 if time.monotonic() - began >= LONG_LIFE_S else deaths + 1
                if deaths > MOST_RESTARTS:
                    self._log.error("sinks are given up", reason=ended, restarts=MOST_RESTARTS)
                    break
                pause = self._first_pause_s * 2 ** (deaths - 1)
                self._log.warning("sinks are started again", reason=ended, after_s=pause)
                self._sleep(pause)
                self._count(RESTARTS)
        except BaseException as error:
            self._log.error("sinks are given up", exc_info=error)
        finally:
            self._given_up = True
            self._count(DROPPED, len(self._queue))
            self._queue.clear()
            self._picture = None

    def _sleep(self, seconds: float) -> None:
        """Sleep so long, or until the feed is closed."""
        until = time.monotonic() + seconds
        while self._flush_until is None and (left := until - time.monotonic()) > 0:
            _poll({self._wake: False}, left)
            self._drain_wake()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _live(self) -> str:
        """Live one life of the process; the reason of its end."""
        # Libraries keep temporary files until the regular end of a process, which theirs never has.
        with tempfile.TemporaryDirectory(prefix="asyncrl-sinks-", ignore_cleanup_errors=True) as temporary:
            return self._live_with(temporary)

    def _live_with(self, temporary: str) -> str:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "asyncrl.sinks", str(theirs.fileno()), temporary],
                    env={**os.environ, "TMPDIR": temporary},
                    stdin=subprocess.DEVNULL,
                    # Libraries print; the standard error of an actor is its log.
                    stdout=2,
                    pass_fds=[theirs.fileno()],
                    # Signals for the terminal are not for it; its session stays the actor's, by which the node
                    # agent finds what a killed actor leaves behind.
                    process_group=0,
                )
            self.pid = process.pid
            try:
                return self._serve(ours)
            finally:
                ours.close()
                code = self._end(process)
                self.pid = 0
                self._log.debug("process of the sinks has ended", exit_code=code)
                # No process has all of the record.
                self._count(DROPPED, isinstance(self._sending, Line))
                self._sending = None

    def _serve(self, connection: socket.socket) -> str:
        """Talk to the process until one of the two ends it."""
        connection.setblocking(False)
        reports: Stream[Report] = Stream(Report)
        self._reported = Report()
        outgoing = memoryview(_encoder.encode(self._setup))
        # Steps go on, and an endpoint has figures, from the beginning.
        with self._lock:
            self._picture = self._picture or self._last_picture
        closed = False
        while True:
            if not outgoing:
                self._sending = self._next()
                if self._sending is not None:
                    outgoing = memoryview(_encoder.encode(self._sending))
            left: float | None = None
            if self._flush_until is not None:
                if not outgoing and not closed:
                    connection.shutdown(socket.SHUT_WR)
                    closed = True
                left = self._flush_until - time.monotonic()
                if left <= 0:
                    self._log.warning("sinks did not end in time", held=len(self._queue))
                    return "they did not end in time"
            ready = _poll({connection.fileno(): bool(outgoing), self._wake: False}, left)
            self._drain_wake()
            if ready.get(connection.fileno(), 0) & ~select.POLLOUT:
                try:
                    data = connection.recv(READ_BYTES)
                except ConnectionError:
                    data = b""
                if not data:
                    return "their process has ended"
                for report in reports.feed(data):
                    self._take(report)
            if ready.get(connection.fileno(), 0) & select.POLLOUT:
                try:
                    outgoing = outgoing[connection.send(outgoing) :]
                except BlockingIOError:
                    continue
                except ConnectionError:
                    return "their process has ended"

    def _next(self) -> Record | None:
        with self._lock:
            picture, self._picture = self._picture, None
        if picture is not None:
            self._last_picture = picture
            return picture
        return self._queue.popleft() if self._queue else None

    def _take(self, report: Report) -> None:
        before, self._reported = self._reported, report
        self._count(DROPPED, report.dropped - before.dropped)
        self._count(LOST, report.lost - before.lost)
        for name, text in report.trouble.items():
            if name not in before.trouble:
                self._log.warning("sink has trouble", sink=name, reason=text)
        for name in before.trouble.keys() - report.trouble.keys():
            self._log.info("sink is well again", sink=name)
        for name, address in report.addresses.items():
            if before.addresses.get(name) != address:
                self._log.info("sink is ready", sink=name, address=address)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> int | None:
        """Reap the process, having killed it with all that it has started, if it lives; its exit code."""
        if process.poll() is None:
            try:
                descendants = psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                descendants = []
            # Not reaped yet, so that no other group can have its number.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            for descendant in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    descendant.kill()
        try:
            return process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            return None


def _poll(files: dict[int, bool], timeout: float | None) -> dict[int, int]:
    """Wait for files that can be read and, where wanted, written. Not select: descriptors may be above 1,023."""
    poll = select.poll()
    for file, for_writing in files.items():
        poll.register(file, select.POLLIN | (select.POLLOUT if for_writing else 0))
    return dict(poll.poll(None if timeout is None else timeout * 1000))
