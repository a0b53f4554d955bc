"""Structured logs: one JSON object a line on standard error, which the node agent keeps in the actor's log file."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def get_logger(actor: str, **facts: Any) -> structlog.typing.FilteringBoundLogger:
    """The logger of one actor."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(actor=actor, **facts)
    return logger
