"""Prints to a terminal, a pipe or a file without blocking on one that accepts no output. Standard library only.

``PRINTER`` writes text on a thread of its own, in the order of the calls. A terminal may accept nothing for a while: a
pager, Ctrl-S, a stopped reader. Its text waits in a bounded queue, which drops the oldest text first. Dropped lines are
counted, and a line in the output reports their number where they are missing.

Invariant: ``print_to`` blocks for PRINT_WAIT_S at most, ``finish`` for the time that it is given. A stream that accepts
nothing raises no error. If a stream is closed for good, its text is discarded; text that does not fit on a full disk is
dropped and counted. A stream without a descriptor, as in a test, is written directly and may raise.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

REPLACED = "asyncrl.replaced"
"""Name of an error handler for encodings: writes a character that the encoding lacks as similar ASCII, or as an escape.
"""
_ASCII = {"→": "->", "←": "<-", "–": "-", "…": "...", "≤": "<=", "±": "+-", "×": "x", "·": "|", "µ": "u"}
PRINT_WAIT_S = 0.05
"""Longest wait of ``print_to``; nearly every stream has taken the text by then."""
LAST_S = 5.0
"""Longest wait at the end of a command for a stream that accepts nothing."""
MOST_BYTES = 1 << 20
"""Most bytes of text that wait."""
LOOK_S = 0.05
"""Seconds between two looks for a signal in ``finish``."""
_CHUNK = 4096
_CLOSED = frozenset({errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET})
"""Errors after which a stream never accepts output again."""


def _replace(error: UnicodeError) -> tuple[str, int]:
    """The handler REPLACED. Returns the replacement and the index after the characters that it replaces."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_ASCII.get(each) or _escaped(each) for each in lacking), error.end


def _escaped(character: str) -> str:
    return character.encode("ascii", "backslashreplace").decode()


codecs.register_error(REPLACED, _replace)


def replace_unknown(*streams: TextIO | None) -> None:
    """Make these streams replace characters that their encoding lacks, instead of raising."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=REPLACED)


def send_nowhere(stream: TextIO) -> None:
    """Redirect a stream to /dev/null: later output and text in its buffer are discarded.

    A command does not end because its terminal or reader has closed. Without this, Python would write the buffered text
    when the process ends, and fail.
    """
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class Printer:
    """The writer thread and its queue, by the rules of the module. Its methods are called by one thread."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[TextIO, bytes]] = deque()
        """Texts that the thread has not taken, oldest first."""
        self._bytes = 0
        """Bytes of these texts."""
        self._idle = True
        """Whether all text is written: the thread writes nothing, and nothing waits."""
        self._lost: dict[TextIO, int] = {}
        """Number of lines dropped since the last text that was written, by stream."""
        self._changed = threading.Condition()
        """Guards the attributes above; notified when text is added, and when all is written."""
        self._thread: threading.Thread | None = None

    def print_to(self, stream: TextIO, text: str) -> None:
        """Queue ``text`` for ``stream``. If nothing waited before, wait PRINT_WAIT_S at most until it is written.

        If more than ``most_bytes`` wait, the oldest texts are dropped. Raises OSError for a stream without a
        descriptor, which is written directly.
        """
        data = text.encode(stream.encoding or "utf-8", REPLACED)
        if _descriptor(stream) < 0:
            stream.write(data.decode(stream.encoding or "utf-8"))
            stream.flush()
            return
        with self._changed:
            was_idle, self._idle = self._idle, False
            self._waiting.append((stream, data))
            self._bytes += len(data)
            while self._bytes > self._most_bytes and len(self._waiting) > 1:
                self._drop(*self._waiting.popleft())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="printer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if was_idle:
                # If other text waits already, the stream accepts nothing, so another wait would be in vain.
                self._changed.wait_for(lambda: self._idle, PRINT_WAIT_S)

    def finish(self, within_s: float = LAST_S) -> bool:
        """Wait until all text is written, a signal comes, or ``within_s`` are over. Returns whether it is written."""
        until = time.monotonic() + within_s
        with _signals_noted() as signals, self._changed:
            while not self._idle and not signals and time.monotonic() < until:
                self._changed.wait(LOOK_S)
            return self._idle

    def _drop(self, stream: TextIO, data: bytes) -> None:
        """Count the lines of a text that was taken from the queue unwritten."""
        self._bytes -= len(data)
        self._lost[stream] = self._lost.get(stream, 0) + data.count(b"\n")

    def _run(self) -> None:
        """The thread: write the queue in order, and before a text the number of lines that were dropped there."""
        while True:
            with self._changed:
                self._idle = not self._waiting
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                stream, data = self._waiting.popleft()
                self._bytes -= len(data)
                lost = self._lost.pop(stream, 0)
            notice = f"({lost} lines are missing here: the output took no text)\n".encode() if lost else b""
            if unwritten := _write(stream, notice + data):
                # If a part of the notice is not written, the lines that it reports are still to be reported.
                unreported = lost if len(unwritten) > len(data) else 0
                with self._changed:
                    self._lost[stream] = self._lost.get(stream, 0) + unreported + unwritten[-len(data) :].count(b"\n")


PRINTER = Printer()
"""The printer of this process."""


def _descriptor(stream: TextIO) -> int:
    """The descriptor of a stream; -1 without one."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return -1


def _write(stream: TextIO, data: bytes) -> bytes:
    """Write ``data``, without a deadline. Returns the bytes that an error left unwritten, as on a full disk.

    Output to a closed stream is discarded, and nothing is returned.
    """
    try:
        # By the descriptor: with the stream, the end of the interpreter would wait for the stream's lock.
        descriptor = stream.fileno()
        while data:
            try:
                data = data[os.write(descriptor, data[:_CHUNK]) :]
            except BlockingIOError:
                # Another program on the same terminal has made the descriptor non-blocking.
                select.select([], [descriptor], [], 1.0)
    except ValueError:
        return b""
    except OSError as error:
        if error.errno not in _CLOSED:
            return data
        with contextlib.suppress(OSError, ValueError):
            send_nowhere(stream)
        return b""
    return b""


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Context that collects signals asking for an end, instead of handling them: this process is ending anyway.

    On any thread but the main one it collects nothing, since only the main thread can set handlers.
    """
    noted: list[int] = []
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
            # None: the handler is not Python's, so Python cannot restore it.
            if (handler := signal.getsignal(number)) is not None and handler != signal.SIG_IGN:
                handlers[number] = handler
                signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
