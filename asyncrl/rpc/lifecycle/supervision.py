"""Decides how soon and how often a node agent restarts an actor that has ended.

Invariant: an actor is restarted at most ``max_restarts`` times within any ``window_s`` seconds. Then it is given up,
with a reason that can be printed. The pause before a restart doubles with each restart within the window, up to
LONGEST_S (calls/retry.py). Deaths that are not the actor's own fault do not count. Pure: the caller passes the time.
"""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass, field

from asyncrl.rpc.calls.retry import backoff

UNHEALABLE_EXITS = frozenset({2, 78})
"""Exit codes for wrong usage and for wrong configuration or data, which a restart would find unchanged."""


def describe_exit(exit_code: int) -> str:
    """Describes an exit code in words; a negative one stands for a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the actor again after ``after_s``."""

    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not restart the actor, for this reason. The controller decides whether the run continues without it."""

    reason: str


@dataclass(slots=True)
class RestartBudget:
    """Limits the restarts of one actor, and sets the pauses before them."""

    max_restarts: int
    window_s: float
    backoff_s: float
    _recent: deque[float] = field(default_factory=deque)
    """Times of the deaths within the window that led to a restart (s), the oldest first."""

    def next(self, now: float) -> float | None:
        """Counts a death at ``now`` (s). Returns the seconds until the restart; None after too many restarts."""
        while self._recent and now - self._recent[0] >= self.window_s:
            self._recent.popleft()
        if len(self._recent) >= self.max_restarts:
            return None
        pause_s = backoff(self.backoff_s, len(self._recent))
        self._recent.append(now)
        return pause_s


@dataclass(slots=True)
class Supervisor:
    """Decides about restarts of all actors of one host."""

    max_restarts: int
    window_s: float
    backoff_s: float
    _budgets: dict[str, RestartBudget] = field(default_factory=dict)

    def ended(self, name: str, exit_code: int, now: float, *, blameless: bool = False) -> Restart | GiveUp:
        """Decide about a process that ended at ``now`` (monotonic, s) without being asked to.

        An actor with an exit code of UNHEALABLE_EXITS is given up at once. If any other end is not the actor's fault
        (``blameless``), it does not count, and the actor is restarted after the shortest pause.
        """
        what = describe_exit(exit_code)
        if exit_code in UNHEALABLE_EXITS:
            return GiveUp(f"ended with {what}, which a restart would not mend")
        if blameless:
            return Restart(self.backoff_s)
        budget = self._budgets.setdefault(name, RestartBudget(self.max_restarts, self.window_s, self.backoff_s))
        pause_s = budget.next(now)
        if pause_s is None:
            return GiveUp(f"{what}, after {self.max_restarts} restarts within {self.window_s:g} s")
        return Restart(pause_s)

    def forgive(self, name: str) -> None:
        """Forget the counted deaths of an actor, as after the rest of a replica (controller/state/reserve.py)."""
        self._budgets.pop(name, None)
