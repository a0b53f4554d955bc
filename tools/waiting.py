"""Waits for a condition, for tools and tests that start processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WAIT_S = 60.0
LOOK_S = 0.02


def wait_until(
    condition: Callable[[], T | None],
    what: str | Callable[[], str] = "a condition of the test",
    within_s: float = WAIT_S,
) -> T:
    """Return the first true value of ``condition``. TimeoutError names ``what``."""
    until = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"waited {within_s:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(LOOK_S)
    return found
