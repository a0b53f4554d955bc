"""The meaning of an actor's end: how soon and how often it is started again, and in which order roles end.

One table says what is particular to each role; ``Supervisor`` applies it to the deaths that a node agent sees.
Invariant: an actor is restarted at most ``max_restarts`` times within any window of ``window_s``, each time
after a pause twice as long as the one before, but for deaths that are not its own fault; after any other it is given
up, with a reason that can be printed. Pure: the caller brings the time.
"""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass, field

LONGEST_BACKOFF_S = 60.0
UNHEALABLE_EXITS = frozenset({2, 78})
"""Exit codes of wrong usage and wrong configuration or data: a restart meets the same."""


@dataclass(frozen=True, slots=True)
class RolePolicy:
    """The policy that is particular to one role."""

    drain_rank: int
    """Rank in the end of the run: the actors of a rank are told to end once all of the lower ranks have."""
    gang: bool = False
    """Whether its actors compute together: when one dies all are started again, so that new ones meet new ones."""
    replicated: bool = False
    """Whether each does the same work: a run goes on with those that are left."""
    optional: bool = False
    """Whether a run goes on without any, whatever they ended of; these are replicated too."""
    fixed: bool = False
    """Whether it is found at one address with one key for the whole run, so its successor takes over both."""


ROLES: dict[str, RolePolicy] = {
    "rollouter": RolePolicy(drain_rank=1, replicated=True),
    "reward": RolePolicy(drain_rank=1, replicated=True),
    # After the rollouters, whose last episodes these play.
    "episodes": RolePolicy(drain_rank=2, replicated=True),
    "parameter_server": RolePolicy(drain_rank=2),
    "dataloader": RolePolicy(drain_rank=2),
    "learner": RolePolicy(drain_rank=3, gang=True),
    # After the learner, whose last metrics these bring out.
    "sinks": RolePolicy(drain_rank=4, replicated=True, optional=True),
    "controller": RolePolicy(drain_rank=5, fixed=True),
}


def role_of(name: str) -> str:
    """The role in an actor's name, ROLE/INDEX."""
    return name.partition("/")[0]


def drain_rank(name: str) -> int:
    """The drain rank of an actor."""
    return ROLES[role_of(name)].drain_rank


def is_gang(name: str) -> bool:
    """Whether an actor dies and starts with all of its role; False for what is none of the run's actors."""
    policy = ROLES.get(role_of(name))
    return policy is not None and policy.gang


def is_replicated(name: str) -> bool:
    """Whether a run goes on without an actor as long as there are others of its role."""
    policy = ROLES.get(role_of(name))
    return policy is not None and policy.replicated


def is_optional(name: str) -> bool:
    """Whether a run goes on without an actor and all others of its role."""
    policy = ROLES.get(role_of(name))
    return policy is not None and policy.optional


def is_set_aside(name: str, exit_code: int) -> bool:
    """Whether a run may go on without an actor that is given up after this exit; it ends otherwise."""
    return is_optional(name) or (is_replicated(name) and exit_code not in UNHEALABLE_EXITS)


def describe_exit(exit_code: int) -> str:
    """An exit code in words; negative for a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the actor again after ``after_s``. ``number`` counts its restarts from 1."""

    after_s: float
    number: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start the actor again by itself, for this reason: a replica rests, and without any other the run ends."""

    reason: str


@dataclass(slots=True)
class RestartBudget:
    """The restarts that one thing may have, and the pauses before them."""

    max_restarts: int
    window_s: float
    backoff_s: float
    _recent: deque[float] = field(default_factory=deque)

    def next(self, now: float) -> float | None:
        """Seconds until the restart after a death at ``now``; None when there have been too many."""
        while self._recent and now - self._recent[0] >= self.window_s:
            self._recent.popleft()
        if len(self._recent) >= self.max_restarts:
            return None
        after = min(self.backoff_s * 2.0 ** len(self._recent), LONGEST_BACKOFF_S)
        self._recent.append(now)
        return after


@dataclass(slots=True)
class Supervisor:
    """Decides over the deaths of the actors of one host."""

    max_restarts: int
    window_s: float
    backoff_s: float
    _budgets: dict[str, RestartBudget] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def ended(self, name: str, exit_code: int, now: float, *, blameless: bool = False) -> Restart | GiveUp:
        """Decide over a process that ended at ``now`` (monotonic, s) though nobody asked it to.

        An end for which it is ``blameless`` is followed by a restart however many there were, and counts as none.
        """
        what = describe_exit(exit_code)
        if exit_code in UNHEALABLE_EXITS:
            return GiveUp(f"ended with {what}, which a restart would not mend")
        if blameless:
            self._counts[name] = self._counts.get(name, 0) + 1
            return Restart(self.backoff_s, self._counts[name])
        budget = self._budgets.setdefault(name, RestartBudget(self.max_restarts, self.window_s, self.backoff_s))
        after = budget.next(now)
        if after is None:
            return GiveUp(f"{what}, after {self.max_restarts} restarts within {self.window_s:g} s")
        self._counts[name] = self._counts.get(name, 0) + 1
        return Restart(after, self._counts[name])

    def forgive(self, name: str) -> None:
        """Forget what was counted of an actor that has rested."""
        self._budgets.pop(name, None)
