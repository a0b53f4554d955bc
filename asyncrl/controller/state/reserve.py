"""Replicas that are resting: which ones could not be kept alive, why, and when each is started again.

A resting replica is stopped for a time, its *rest*, and then started again. The first rest is ``window_s``,
after which an agent has forgotten the deaths that it counts. Each further rest is twice as long, up to LONGEST_REST
times the first. After a replica was back for longer than its last rest, its next one is the first again. With an
episode host its rollouter rests too, and both come back together. Invariant: the end of an incarnation lets a
replica rest once, however often it is reported. Pure: the caller passes the time (monotonic, s).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from asyncrl.core.roles import role_of
from asyncrl.messages.actors import RestingReplica

LONGEST_REST = 8
"""Longest rest, as a multiple of the first."""
ROLLOUTER, EPISODES, REWARD, SINKS = "rollouter", "episodes", "reward", "sinks"
PLURALS = {ROLLOUTER: "rollouters", REWARD: "reward pools"}
"""Replicated roles with a least number of actors, and their names in texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentRest:
    """The present rest of a replica."""

    reason: str
    until: float
    """Time at which the rest ends (s)."""
    rest_s: float


@dataclass(slots=True)
class _LastRest:
    """The last rest of a replica."""

    incarnation: int
    """Newest incarnation whose end has been counted."""
    rest_s: float
    back: float
    """Time at which the replica came back, or will (s)."""


@dataclass(slots=True)
class Reserve:
    """The present rests (``resting``), and the last rest of each replica. ``window_s`` is the first rest."""

    window_s: float
    resting: dict[str, PresentRest] = field(default_factory=dict)
    _last_rests: dict[str, _LastRest] = field(default_factory=dict)

    def let_rest(self, name: str, incarnation: int, reason: str, now: float, expected: Collection[str]) -> bool:
        """Let a replica rest, and with an episode host also its rollouter if it is ``expected``; see ``put``."""
        if not self.put(name, incarnation, reason, now):
            return False
        rollouter = _pair(name)[0]
        if role_of(name) == EPISODES and rollouter in expected:
            self.put(rollouter, 0, f"{name}, which plays its episodes, is resting: {reason}", now)
        return True

    def bring_back(self, name: str, now: float) -> None:
        """End the rest of a replica, and that of the rollouter or episode host with the same number, which it needs."""
        for each in self.resting.keys() & set(_pair(name)):
            self.take(each, now)

    def lacking(self, expected: Collection[str], least: int, without: Collection[str]) -> str | None:
        """Return a role that would have too few actors without the replicas ``without``; None if each has enough.

        Too few are fewer than ``least`` rollouters, or no reward pool. Only the roles of ``without`` are checked:
        another role may have too few because hosts have left, which is not the fault of these replicas. A replica that
        is not ``expected`` takes nothing away.
        """
        without = frozenset(without).intersection(expected)
        counts = {role: 0 for role in map(role_of, without) if role in PLURALS}
        for name in expected:
            if role_of(name) in counts and name not in self.resting and name not in without:
                counts[role_of(name)] += 1
        return next((role for role, left in counts.items() if left < (least if role == ROLLOUTER else 1)), None)

    def describe_shortage(self, expected: Collection[str], least: int, before: Mapping[str, PresentRest]) -> str | None:
        """Describe the role that has too few actors left; None if enough are left.

        ``before`` is ``resting`` before the last replicas began to rest; only their roles are checked. The caller
        appends the text to their reason. The text is empty if the reason says it all.
        """
        role = self.lacking(expected, least, without=self.resting.keys() - before.keys())
        if role is None:
            return None
        of_role = [name for name in expected if role_of(name) == role]
        words = ""
        if len(of_role) > 1:
            left = sum(name not in self.resting for name in of_role)
            words = f"; {left} of {len(of_role)} {PLURALS[role]} are left"
            words += f", and rollout.min_replicas is {least}" if role == ROLLOUTER else ""
        return words + _described("resting before", before)

    def described(self, role: str) -> str:
        """Text on the replicas of a role that are resting; empty without any."""
        return _described("resting", {name: rest for name, rest in self.resting.items() if role_of(name) == role})

    def put(self, name: str, incarnation: int, reason: str, now: float) -> bool:
        """Let one replica rest. ``incarnation`` is the one whose end is the cause; 0 if there is another cause.

        The rest doubles if the replica was back for less than its last rest. Returns False if the replica is resting
        already, or has rested because this incarnation ended. In the first case only the incarnation is noted.
        """
        last = self._last_rests.get(name)
        if name in self.resting:
            self._last_rests[name].incarnation = max(incarnation, self._last_rests[name].incarnation)
            return False
        if last is not None and 0 < incarnation <= last.incarnation:
            return False
        rest_s = self.window_s
        if last is not None:
            incarnation = max(incarnation, last.incarnation)
            if now - last.back < last.rest_s:
                rest_s = min(2 * last.rest_s, LONGEST_REST * self.window_s)
        self.resting[name] = PresentRest(reason=reason, until=now + rest_s, rest_s=rest_s)
        # ``take`` corrects the time if the replica comes back sooner or later.
        self._last_rests[name] = _LastRest(incarnation, rest_s, now + rest_s)
        return True

    def take(self, name: str, now: float) -> None:
        """End the rest of one replica."""
        del self.resting[name]
        self._last_rests[name].back = now

    def forget(self, names: Iterable[str]) -> None:
        """Forget replicas that have left the run."""
        for name in names:
            self.resting.pop(name, None)
            self._last_rests.pop(name, None)

    def due(self, now: float) -> list[str]:
        """The replicas whose rest is over."""
        return sorted(name for name, rest in self.resting.items() if now >= rest.until)

    def next_deadline(self) -> float | None:
        """Time at which the next rest is over; None if no replica is resting."""
        return min((rest.until for rest in self.resting.values()), default=None)


class RestNotices:
    """Makes the notices for the user when replicas begin to rest, and when they come back or leave."""

    def __init__(self) -> None:
        self._resting: dict[str, RestingReplica] = {}
        """Replicas that rested at the last call of ``news``."""
        self._times: Counter[str] = Counter()
        """Number of rests of each replica."""

    def news(
        self, resting: Iterable[RestingReplica], expected: Collection[str], *, drains: bool
    ) -> list[tuple[str, str, int, str]]:
        """Returns (key, text, count, meanwhile) of each new notice, for ``Actor.notify``.

        ``resting`` are the replicas that are resting now, and ``expected`` all actors of the run. If the run
        ``drains``, no replica counts as resting, so there are no notices of a return.
        """
        before, self._resting = self._resting, {actor.name: actor for actor in resting}
        notices = []
        for name in self._resting.keys() - before.keys():
            actor = self._resting[name]
            self._times[name] += 1
            again = f"after {actor.rest_s:g} s, or by asyncrl-launch --bring-back {name} RUN"
            meanwhile = f"The run continues without it; it is tried again {again}"
            notices.append((f"resting {name}", f"{name} is resting: {actor.reason}", self._times[name], meanwhile))
        for name in before.keys() - self._resting.keys() if not drains else ():
            outcome = "is tried again" if name in expected else "has left the run"
            text = f"{name} was resting ({before[name].reason}) and {outcome}"
            notices.append((f"resting {name}", text, self._times[name], ""))
        return sorted(notices)


def _described(how: str, resting: Mapping[str, PresentRest]) -> str:
    """Text that continues a reason: ``how``, then each of these replicas with its own reason; empty without any."""
    each = ", ".join(f"{name} ({resting[name].reason})" for name in sorted(resting))
    return f"; {how}: {each}" if each else ""


def _pair(name: str) -> tuple[str, str]:
    """For a rollouter or an episode host: the rollouter and the episode host with its number. Any other name twice."""
    if role_of(name) not in (ROLLOUTER, EPISODES):
        return name, name
    number = name.partition("/")[2]
    return f"{ROLLOUTER}/{number}", f"{EPISODES}/{number}"
