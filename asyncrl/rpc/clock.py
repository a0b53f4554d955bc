"""Time, as actors see it.

``loop.time()`` is the monotonic clock of everything that waits, so replacing the event loop's clock replaces it
everywhere; ``wall`` is for what people and other hosts read.
"""

from __future__ import annotations

import time


class Clock:
    """The clock of one actor."""

    def now(self) -> float:
        """Monotonic seconds; the same on all processes of a host."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()
