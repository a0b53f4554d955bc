"""Structured logs: one JSON object a line on standard error, which the node agent keeps in the actor's log file.

A line that cannot be written, as on a full disk, is lost; logging never fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import structlog

STANDARD_ERROR = 2


def configure_logging(level: str) -> None:
    """Set up this process. ``level`` is debug, info, warning or error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=_Lines,
        cache_logger_on_first_use=True,
    )


def write_text(text: str) -> None:
    """Put text that people read, such as stacks, among the log lines as it is; lost like one of them.

    Not through ``sys.stderr``, whose buffer keeps what a full disk refused and fails again at the process's end.
    """
    rest = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(STANDARD_ERROR, rest) :]


class _Lines:
    """Each message as one write, so that lines of several threads and processes do not mix."""

    def __init__(self, *_: Any) -> None:
        self._torn = b""

    def msg(self, message: str) -> None:
        line = self._torn + message.encode(errors="replace") + b"\n"
        try:
            written = os.write(STANDARD_ERROR, line)
        except OSError:
            return
        # A disk that fills up takes the beginning of a line; the next one starts afresh.
        self._torn = b"\n" if written < len(line) else b""

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def get_logger(actor: str, **facts: Any) -> structlog.typing.FilteringBoundLogger:
    """The logger of one actor."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(actor=actor, **facts)
    return logger
