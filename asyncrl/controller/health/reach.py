"""The actor at fault where one that lives cannot reach another that lives.

Every actor tells whom it cannot reach, and for how long on its own clock. A path counts as broken when both of its
ends are ready and in good standing and it was told so, again and again, for ``unreachable_s``. Then one of the ends is
named, so that it is killed and started again, or set aside, and what it held goes back:

* of many that do the same work, and of whom others do reach the same peer, the one that does not;
* the peer, where nobody of that role reaches it, or more than half do not. If that did not help within ``memory_s``,
  those that cannot are named as long as others can;
* of two of which there is no other, the one that costs less; if that did not help, the other.

Invariant: nobody is named for a path whose end is not ready, is another process than before, or was not heard of
meanwhile: that is silence, a death, or a lost host, and is judged elsewhere. One end of a path is named at a time.
Times of different hosts are not compared, and time in which this process did not look counts as nothing. Pure: the
caller brings the time (monotonic, s).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from asyncrl.messages.monitor import MOST_UNREACHED
from asyncrl.roles import gang_of, role_of

COST = {"rollouter": 0, "reward": 1, "dataloader": 2, "parameter_server": 3, "learner": 4}
"""Loss by starting an actor again, by role, in order; paths between others are no matter of the run's, nor are those
between rollouters, who ask each other for weights first and then the parameter server."""
LONGEST_GAP = 0.25
"""Share of ``unreachable_s`` after which a gap between two looks is time in which nobody could be heard."""
SUSPECT_SHARE = 0.5
"""Share of ``unreachable_s`` after which a path that is not reached is counted with those that are broken."""
NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyActor:
    """An actor that is ready and was heard of just now."""

    name: str
    incarnation: int
    unreached: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which it has not reached each that it names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff:
    """An actor that is to be killed because it and others do not reach each other."""

    name: str
    incarnation: int
    reason: str
    times: int = 1
    """Times in a row that it was named, never more than ``memory_s`` apart."""


class _Look:
    """All actors and paths of one look, counted once: judging a path costs the same however many there are."""

    def __init__(self, actors: Iterable[str], broken: Iterable[tuple[str, str]]) -> None:
        """``broken`` are pairs of who tells and whom it does not reach."""
        self._of_role: dict[str, list[str]] = {}
        for name in sorted(actors):
            self._of_role.setdefault(role_of(name), []).append(name)
        self._failing: dict[tuple[str, str], list[str]] = {}
        """Actors of a role that do not reach somebody."""
        self._failed: dict[tuple[str, str], list[str]] = {}
        """Actors of a role that somebody does not reach."""
        for teller, other in sorted(broken):
            self._failing.setdefault((role_of(teller), other), []).append(teller)
            self._failed.setdefault((role_of(other), teller), []).append(other)

    def alike(self, name: str) -> int:
        """Number of those that do the same work; a gang is one."""
        return 1 if gang_of(name) else len(self._of_role[role_of(name)])

    def failing(self, teller: str, other: str) -> list[str]:
        """Actors that do the same work as the teller and do not reach the other."""
        return self._failing.get((role_of(teller), other), [])

    def failed(self, teller: str, other: str) -> list[str]:
        """Actors that do the same work as the other and that the teller does not reach."""
        return self._failed.get((role_of(other), teller), [])


@dataclass(slots=True)
class Reach:
    """Watches the paths of one run."""

    unreachable_s: float
    look_s: float
    """Time between two looks, about."""
    memory_s: float
    """Time for which it is remembered who was named."""
    _since: dict[tuple[str, int, str, int], float] = field(default_factory=dict)
    """Time at which each path was first told of, as long as it goes on."""
    _named: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Time at which each name was last, and the times in a row."""
    _looked: float = 0.0

    def look(self, standings: Iterable[ReadyActor], now: float) -> list[CutOff]:
        """Look how things are, every few seconds. ``standings`` are all that are ready and heard of."""
        actors = {standing.name: standing for standing in standings if role_of(standing.name) in COST}
        if now - self._looked > max(LONGEST_GAP * self.unreachable_s, 3 * self.look_s):
            self._since.clear()
        self._looked = now
        self._named = {name: last for name, last in self._named.items() if now - last[0] < self.memory_s}
        paths = self._take_in(actors, now)
        suspect = [key for key, seconds in paths.items() if seconds >= SUSPECT_SHARE * self.unreachable_s]
        seen = _Look(actors, suspect)
        cuts: dict[str, CutOff] = {}
        broken = [(seconds, key) for key, seconds in paths.items() if seconds >= self.unreachable_s]
        for seconds, (teller, other) in sorted(broken, reverse=True):
            if teller in cuts or other in cuts:
                continue
            name, why = self._judge(teller, other, seen)
            reason = f"{why} for {seconds:.0f} s (supervision.unreachable_s)"
            times = self._named.get(name, (0.0, 0))[1] + 1
            cuts[name] = CutOff(name=name, incarnation=actors[name].incarnation, reason=reason, times=times)
        self._named.update({name: (now, cut.times) for name, cut in cuts.items()})
        return list(cuts.values())

    def _take_in(self, actors: Mapping[str, ReadyActor], now: float) -> dict[tuple[str, str], float]:
        """Time for which each path is known to be broken, by the actor that tells and the one it does not reach."""
        since, found = {}, {}
        for teller in actors.values():
            for name, seconds in teller.unreached.items():
                other = actors.get(name)
                if other is None or other is teller or {role_of(name), role_of(teller.name)} == {"rollouter"}:
                    continue
                key = (teller.name, teller.incarnation, name, other.incarnation)
                since[key] = self._since.get(key, now)
                found[teller.name, name] = min(seconds, now - since[key])
        self._since = since
        return found

    def _judge(self, teller: str, other: str, seen: _Look) -> tuple[str, str]:
        """The one of the two ends of a path that is at fault, and what it did."""
        cannot = f"it could not reach {other}"
        if seen.alike(teller) > 1:
            failing = seen.failing(teller, other)
            reaching = seen.alike(teller) - len(failing)
            if self._is_many(len(failing), reaching, other):
                return other, f"it was not reached by {_some(failing)}"
            return teller, f"{cannot}, as {_count(reaching, role_of(teller))} did,"
        if seen.alike(other) > 1:
            failing = seen.failed(teller, other)
            reaching = seen.alike(other) - len(failing)
            # More than a heartbeat names may be failing.
            if len(failing) >= MOST_UNREACHED or self._is_many(len(failing), reaching, teller):
                return teller, f"it could not reach {_some(failing)}"
            return other, f"it was not reached by {teller}, as {_count(reaching, role_of(other))} were,"
        cheap, dear = sorted((teller, other), key=lambda name: COST[role_of(name)])
        at_fault = dear if cheap in self._named and dear not in self._named else cheap
        return at_fault, cannot if at_fault == teller else f"it was not reached by {teller}"

    def _is_many(self, failing: int, reaching: int, whom: str) -> bool:
        """Whether so many do not reach ``whom`` that it is at fault itself."""
        return not reaching or (failing > reaching and whom not in self._named)


def _count(number: int, role: str) -> str:
    return f"{number} other {role}{'s' if number > 1 else ''}"


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
