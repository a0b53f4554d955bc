"""Structured logs: one JSON object a line on standard error, which the node agent keeps in the actor's log file.

Lines that cannot be written, for example on a full disk, stay in memory in order and are written later. The oldest
beyond MOST_BYTES are lost and counted. Logging never fails.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

# structlog imports rich for its console formatter, which takes a sixth of an actor's start. Here lines are JSON.
_without_rich = "rich" not in sys.modules
if _without_rich:
    sys.modules["rich"] = None  # type: ignore[assignment]
import structlog  # noqa: E402

if _without_rich:
    del sys.modules["rich"]

from asyncrl.core.files import KeptWrites  # noqa: E402

Logger = structlog.typing.FilteringBoundLogger

STANDARD_ERROR = 2
MOST_BYTES = 1 << 20
"""Most bytes of lines that are kept in memory while they cannot be written."""
QUIET = frozenset({"debug", "info"})
"""Levels of lines that do not go to the listener."""
_listener: Callable[[str, str], None] | None = None
_level: int | None = None
"""Number of the least severe level that is written; None before ``configure_logging``."""


def configure_logging(level: str) -> None:
    """Set up this process. ``level`` is debug, info, warning or error."""
    global _level
    _level = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            # Before the timestamp: the listener (an actor's heartbeat) adds its own time.
            _pass_to_listener,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # Leave out the values of local variables, because some are secret keys.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_level),
        # All loggers of the process share one writer, which counts all lost lines.
        logger_factory=lambda *_: _lines,
        cache_logger_on_first_use=True,
    )


def listen(listener: Callable[[str, str], None]) -> None:
    """Call ``listener`` with the level and the text of each written line of level warning and above."""
    global _listener
    _listener = listener


def _pass_to_listener(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Give the listener the text of a warning or an error; returns the line unchanged. A processor of structlog."""
    if _listener is not None and line["level"] not in QUIET:
        facts = [
            f"{key}={value}"
            for key, value in line.items()
            if key not in ("event", "actor", "level", "exc_info", "notice")
        ]
        if facts:
            _listener(line["level"], f"{line['event']}: {', '.join(facts)}")
        else:
            _listener(line["level"], str(line["event"]))
    return line


def writes(level: str) -> bool:
    """Whether lines of this level are written here."""
    return _level is not None and logging.getLevelNamesMapping()[level.upper()] >= _level


def lost_lines() -> int:
    """Lines of this process that were dropped because too many could not be written."""
    return _lines.lost


def write_line(line: str) -> None:
    """Write a line of the log, given without its newline."""
    _lines.msg(line)


def write_text(text: str) -> None:
    """Write text for people, such as stacks, to standard error as it is. On an error the rest of it is lost.

    It bypasses ``sys.stderr``: after a full disk its buffer keeps the text, and fails again when the process ends.
    """
    rest = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(STANDARD_ERROR, rest) :]


class _Lines:
    """Writes each line with one system call, so that lines of several threads and processes do not mix."""

    def __init__(self) -> None:
        self._prefix = b""
        """A newline if the last write tore its line, else empty."""
        self._kept = KeptWrites(MOST_BYTES)
        # Reentrant: a signal handler may log while its thread writes a line.
        self._writing = threading.RLock()

    @property
    def lost(self) -> int:
        return self._kept.lost

    def msg(self, message: str) -> None:
        line = message.encode(errors="replace") + b"\n"
        with self._writing:
            self._kept.add(partial(self._write, line), len(line))

    def _write(self, line: bytes) -> None:
        """Write a line with one system call, or raise OSError so that ``_kept`` writes the whole line again later."""
        written = os.write(STANDARD_ERROR, self._prefix + line)
        if written < len(self._prefix + line):
            # The full disk took only the beginning of the line: the next write ends this torn line first.
            self._prefix = b"\n"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._prefix = b""

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


_lines = _Lines()


def get_logger(actor: str, **facts: Any) -> Logger:
    """The logger of one actor."""
    logger: Logger = structlog.get_logger(actor=actor, **facts)
    return logger
