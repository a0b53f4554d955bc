"""The actors of lost hosts: which of them the run needs, and when it has waited long enough for one.

The run continues without replicas while enough of their role are left: ``min_replicas`` rollouters, or one actor of
another role. It needs no sinks. It waits ``grace_s`` for any other actor. Pure: the caller passes the time (s).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from asyncrl.controller.state.reserve import ROLLOUTER
from asyncrl.core.roles import is_optional, is_replicated, rank_group_of, role_of


@dataclass(slots=True)
class LostActors:
    """The actors of lost hosts that are in the run."""

    grace_s: float
    min_replicas: int
    hosts: dict[str, list[str]] = field(default_factory=dict)
    """By lost host, as NAME (agent/N): its actors."""
    since: dict[str, tuple[float, str]] = field(default_factory=dict)
    """By actor: the time of the loss (s), and the host."""

    def add(self, host: str, names: Collection[str], now: float) -> None:
        """Note that ``host`` is lost, and these actors with it."""
        self.hosts[host] = sorted(names)
        self.since.update(dict.fromkeys(names, (now, host)))

    def remove(self, host: str) -> None:
        """Note that ``host`` is back."""
        self.hosts.pop(host, None)
        self.since = {name: (lost_at, on) for name, (lost_at, on) in self.since.items() if on != host}

    def excuses(self, name: str) -> bool:
        """Whether an actor cannot be ready because its host, or that of another actor of its rank group, is lost."""
        if name in self.since:
            return True
        return bool(rank_group_of(name)) and any(rank_group_of(lost) == rank_group_of(name) for lost in self.since)

    def spared(self, counted: Iterable[str], on_trial: Collection[str]) -> set[str]:
        """The actors that the run does not need, as those ``on_trial``. ``counted`` are all actors that may do work."""
        if not self.since:
            return set()
        left = Counter(role_of(name) for name in counted if name not in self.since)
        return {
            name
            for name in self.since
            if is_optional(name)
            or name in on_trial
            or (is_replicated(name) and left[role_of(name)] >= (self.min_replicas if role_of(name) == ROLLOUTER else 1))
        }

    def deadline(self, spared: Collection[str]) -> tuple[float, str, str] | None:
        """Find the earliest time at which a lost host fails the run, unless the host is back or no longer needed.

        Returns that time (s), a needed actor of the host, and the host. None if all lost actors are ``spared``.
        """
        needed = self.since.keys() - spared
        last_loss: dict[str, float] = {}
        for name in needed:
            lost_at, _ = self.since[name]
            last_loss[role_of(name)] = max(lost_at, last_loss.get(role_of(name), -math.inf))
        deadlines = []
        for name in needed:
            since, host = self.since[name]
            if is_replicated(name):
                # Fewer losses may have left enough replicas of the role, so count from its newest loss.
                since = last_loss[role_of(name)]
            deadlines.append((since + self.grace_s, name, host))
        return min(deadlines, default=None)
