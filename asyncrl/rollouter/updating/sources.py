"""Sources of a stripe's chunks: the relays that the fetch was named, nearest first, then the parameter server.

Pure.

A relay is left for good, for the next one, when it fails in any way: it is dead or started anew, has let the version
go, or sent bytes that are not what it says; and when it lives, but has nothing new for so long that something above it
must be wrong. Chunks that have arrived stay. The parameter server is the last, and never left.
"""

from __future__ import annotations

from collections.abc import Sequence

PARAMETER_SERVER = "parameter_server/0"
SILENT_SHARE = 1 / 8
"""Share of weights.deadline_s: a relay silent for this time is dead. A living one answers before half of it."""
IDLE_SHARE = 1 / 2
"""Share of weights.deadline_s: a relay with nothing new for so long is left. Those above it must find out of a dead one
first, so that not all below it leave at once."""


class Sources:
    """The sources of one stripe, the present one first. Times are seconds on any clock."""

    def __init__(self, relays: Sequence[str], *, deadline_s: float, now: float) -> None:
        self._names = [*relays, PARAMETER_SERVER]
        self._deadline_s = deadline_s
        self._since = now
        """Time when something last came, or this source was turned to."""
        self.left: list[str] = []
        """Relays that failed."""

    @property
    def present(self) -> str:
        """Name of the source that is asked."""
        return self._names[0]

    @property
    def timeout_s(self) -> float:
        """Seconds that a call of the present source may take."""
        if self.present == PARAMETER_SERVER:
            # As long as the fetch may be without a chunk: while this one is queued another call would queue it again.
            return self._deadline_s
        return SILENT_SHARE * self._deadline_s

    def came(self, now: float) -> None:
        """A chunk has arrived."""
        self._since = now

    def failed(self, name: str, now: float) -> bool:
        """Note that a call to a source failed for good; returns whether that makes another the present one."""
        if name != self.present or name == PARAMETER_SERVER:
            return False
        self.left.append(self._names.pop(0))
        self._since = now
        return True

    def has_nothing(self, name: str, now: float) -> bool:
        """Note that the source lives, and has not got the chunk asked for; returns whether it is left for that."""
        return now - self._since >= IDLE_SHARE * self._deadline_s and self.failed(name, now)
