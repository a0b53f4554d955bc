"""The conductor: which replica serves, stages and loads which version. Pure.

    serving ──announced──► staging ──pause granted──► loading ──► committed (serving the new version)
                              ▲                          │
                              └──────── failed ──────────┘

Invariants: at most ``max_paused_fraction`` of the replicas (at least one) are loading at once; a replica is given a
newer version only while it is not yet staging an older one; versions only grow; a version stays held for as long as
somebody stages or loads it. A replica that holds a pause past its deadline loses it: its rollouter has the same
deadline and restarts the engine, and the others must not wait for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Phase = Literal["serving", "staging", "waiting", "loading"]


@dataclass(slots=True)
class Replica:
    """One rollouter's engines, as the conductor sees them."""

    name: str
    incarnation: int
    serving: int = -1
    phase: Phase = "serving"
    target: int = -1
    """The version being staged or loaded."""
    asked: float = 0.0
    """When it asked for its pause."""
    paused_since: float = 0.0


class Conductor:
    """State of all replicas. Times are given, in seconds on any monotonic clock."""

    def __init__(self, *, max_paused_fraction: float, deadline_s: float) -> None:
        self._fraction = max_paused_fraction
        self._deadline_s = deadline_s
        self.newest = -1
        self.replicas: dict[str, Replica] = {}

    def published(self, version: int) -> None:
        """A version is there. Raises ValueError if it is not above the newest."""
        if version <= self.newest:
            raise ValueError(f"version {version} is not above {self.newest}; a number is never reused")
        self.newest = version

    def offer(self, name: str, incarnation: int, serving: int) -> int | None:
        """What the replica is to stage next, given what it serves; None while there is nothing newer."""
        replica = self._replica(name, incarnation)
        replica.serving = serving
        if self.newest <= serving:
            replica.phase, replica.target = "serving", -1
            return None
        replica.phase, replica.target = "staging", self.newest
        return self.newest

    def ask_pause(self, name: str, incarnation: int, version: int, now: float) -> bool:
        """Whether the replica may pause now; it is first in line among those that asked later."""
        replica = self._replica(name, incarnation)
        if replica.phase == "loading" and replica.target == version:
            # Asking again keeps the pause: under ``drain`` it may take long before there is anything to load.
            replica.paused_since = now
            return True
        if replica.phase != "waiting":
            replica.phase, replica.target, replica.asked = "waiting", version, now
        self._reclaim(now)
        ahead = sum(r.phase == "waiting" and r.asked < replica.asked for r in self.replicas.values())
        if self._paused() + ahead >= self.max_paused:
            return False
        replica.phase, replica.paused_since = "loading", now
        return True

    def ended(self, name: str, incarnation: int, version: int, *, committed: bool) -> None:
        """The replica's update is over; its pause is free again. A repeated word on an older one changes nothing."""
        replica = self._replica(name, incarnation)
        if replica.target != version:
            return
        replica.phase, replica.target = "serving", -1
        if committed:
            replica.serving = version

    def left(self, name: str, incarnation: int) -> None:
        """The replica is gone."""
        replica = self.replicas.get(name)
        if replica is not None and replica.incarnation <= incarnation:
            del self.replicas[name]

    def needed(self) -> set[int]:
        """Versions that must stay held: the newest, and those being staged or loaded."""
        targets = {r.target for r in self.replicas.values() if r.phase != "serving"}
        return {v for v in targets | {self.newest} if v >= 0}

    @property
    def max_paused(self) -> int:
        """How many replicas may load at once."""
        return max(1, math.floor(self._fraction * len(self.replicas)))

    def _paused(self) -> int:
        return sum(r.phase == "loading" for r in self.replicas.values())

    def _reclaim(self, now: float) -> None:
        for replica in self.replicas.values():
            if replica.phase == "loading" and now - replica.paused_since >= self._deadline_s:
                replica.phase, replica.target = "serving", -1

    def _replica(self, name: str, incarnation: int) -> Replica:
        replica = self.replicas.get(name)
        if replica is None or replica.incarnation < incarnation:
            replica = self.replicas[name] = Replica(name, incarnation)
        return replica
