"""Finds actors that send heartbeats but cannot be reached by the actors that they work with, or cannot reach them.

Each heartbeat names the actors that its sender cannot reach, and for how long. A *path* is a pair of actors: its *ends*
are the one that reports and the one that it cannot reach. A path is broken if both ends are alive and ready and it was
reported without a break for ``unreachable_s``. The end that is cut off from the larger share of the other end's role
is restarted. If the shares are equal, it is the end that is cut off from more actors. If these numbers are equal too,
it is the end whose role ends first in a drain, so the learner last.

To be *condemned* is to be killed and restarted by the node agent. Condemnations are counted here for each actor, since
they may be too far apart for the agent's own count of restarts. ``action_after`` decides from the count when the actor
has to rest (state/reserve.py) and when the run fails.

Invariants: an actor is never restarted for a path whose other end is not ready, was restarted, or was silent meanwhile.
A replica that the run can spare is restarted once at most and then has to rest. Any other actor is restarted
``max_restarts`` times at most, and then fails the run.
Times of different hosts are not compared, and time before a gap in which this process did not listen does not count.
Pure: the caller passes the time (monotonic, s).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.core.formatting import name_some
from asyncrl.core.roles import drain_rank, is_replicated, role_of
from asyncrl.messages.actors import Condemned

WATCHED = frozenset({"rollouter", "reward", "dataloader", "parameter_server", "learner"})
"""Roles whose paths are watched. Paths between rollouters are not watched: a rollouter that cannot fetch weights from
another asks the parameter server."""
NAMES_SHOWN = 4
REPLICA_CONDEMNATIONS = 2
"""Number of condemnations after which a replica that the run can spare has to rest."""

Path = tuple[str, str]
"""The actor that reports and the actor that it cannot reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyActor:
    """An actor that is ready and whose last heartbeat was in time."""

    name: str
    incarnation: int
    unreached: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which it has not reached each actor that it names."""


def action_after(
    condemnations: int, *, can_spare: bool, max_restarts: int
) -> Literal["restart", "let it rest", "fail the run"]:
    """Choose the action after so many condemnations of one actor, this one included.

    ``can_spare``: the actor is a replica, and enough others of its role are left.
    """
    if can_spare and condemnations >= REPLICA_CONDEMNATIONS:
        return "let it rest"
    return "fail the run" if condemnations > max_restarts and not can_spare else "restart"


@dataclass(slots=True)
class _Condemnations:
    """The condemnations of one actor that are not forgotten."""

    number: int
    unreachable_at: float
    """Time at which the actor was last unreachable or not ready (s)."""


@dataclass(slots=True)
class UnreachableActors:
    """Watches the paths of one run."""

    unreachable_s: float
    window_s: float
    """Time for which an actor must be ready and reachable until its condemnations are forgotten (s)."""
    _since: dict[tuple[str, int, str, int], float] = field(default_factory=dict)
    """By name and incarnation of both ends: the time since which each path was reported without a break (s)."""
    _condemnations: dict[str, _Condemnations] = field(default_factory=dict)

    def condemnations(self, name: str) -> int:
        """Number of condemnations of an actor that are not forgotten."""
        record = self._condemnations.get(name)
        return record.number if record is not None else 0

    def look(self, ready: Iterable[ReadyActor], now: float, listening_since: float) -> list[Condemned]:
        """Read the reports of all ready actors; called every few seconds. Returns the actors to restart.

        Goes through the broken paths, those broken for longest first, and condemns one end of each. A path with an end
        that was condemned just now is skipped. ``listening_since`` is the time since which this process has listened
        without a gap (s).
        """
        actors = {actor.name: actor for actor in ready if role_of(actor.name) in WATCHED}
        paths = self._measure_paths(actors, now, listening_since)
        self._forget_condemnations(actors, paths, now, listening_since)
        replicas = Counter(role_of(name) for name in actors if is_replicated(name))
        cut_off: dict[tuple[str, str], set[str]] = defaultdict(set)
        for name, other in paths:
            cut_off[name, role_of(other)].add(other)
            cut_off[other, role_of(name)].add(name)

        def severity(ends: Path) -> tuple[float, int, int]:
            """Sort key of the first end: how much of the other's role it is cut off from, and when its role ends."""
            number = len(cut_off[ends[0], role_of(ends[1])])
            # Ranks of the learner count as one actor: others work with the first of them only.
            return number / max(1, replicas[role_of(ends[1])]), number, -drain_rank(ends[0])

        condemned: dict[str, Condemned] = {}
        for path, seconds in sorted(paths.items(), key=lambda item: (-item[1], item[0])):
            if seconds >= self.unreachable_s and not condemned.keys() & set(path):
                name, other = max(path, (path[1], path[0]), key=severity)
                others = name_some(sorted(cut_off[name, role_of(other)]), NAMES_SHOWN)
                how = "could not reach" if (name, other) == path else "was not reached by"
                reason = f"it {how} {others} for {seconds:.0f} s (supervision.unreachable_s)"
                condemned[name] = Condemned(name, actors[name].incarnation, reason)
                self._condemnations[name] = _Condemnations(self.condemnations(name) + 1, now)
        return list(condemned.values())

    def _measure_paths(self, actors: Mapping[str, ReadyActor], now: float, listening_since: float) -> dict[Path, float]:
        """Return the seconds for which each path was reported without a break between the same two processes."""
        since, seconds_broken = {}, {}
        for actor in actors.values():
            for name, seconds in actor.unreached.items():
                other = actors.get(name)
                if other is None or other is actor or {role_of(name), role_of(actor.name)} == {"rollouter"}:
                    continue
                key = (actor.name, actor.incarnation, name, other.incarnation)
                since[key] = max(self._since.get(key, now), listening_since)
                seconds_broken[actor.name, name] = min(seconds, now - since[key])
        self._since = since
        return seconds_broken

    def _forget_condemnations(
        self, actors: Mapping[str, ReadyActor], paths: Iterable[Path], now: float, listening_since: float
    ) -> None:
        """Forget the condemnations of actors that have been ready and on no reported path for ``window_s``."""
        broken = {name for path in paths for name in path}
        for name, record in list(self._condemnations.items()):
            if name not in actors or name in broken:
                record.unreachable_at = now
            elif now - max(record.unreachable_at, listening_since) >= self.window_s:
                del self._condemnations[name]
