"""Saying that a peer does not answer."""

from __future__ import annotations

from typing import Any

from structlog.typing import FilteringBoundLogger

from asyncrl.errors import RemoteError, WireError

CANCELLED = "cancelled"
"""Code of the answer to a call that an actor can no longer carry out, because it is ending."""


def log_away(log: FilteringBoundLogger, whom: str, error: WireError, **facts: Any) -> None:
    """Log a warning; but a peer that is ending says so to everybody who waits for it, and that is no trouble."""
    ending = isinstance(error, RemoteError) and error.code == CANCELLED
    (log.info if ending else log.warning)(f"{whom} is away", error=str(error), **facts)
