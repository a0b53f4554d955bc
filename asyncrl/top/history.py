"""The snapshots for rates, shares and the verdict, with the levels at each moment. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from asyncrl.messages.snapshot import ActorView, RunView, Snapshot
from asyncrl.observe.metrics_line import number_in
from asyncrl.observe.snapshots.rates import Interval, mean, median, total

AT = "rollout/episodes_at/"
"""Beginning of the names of metrics by stage."""
GONE = frozenset({"absent", "dead", "lost", "aside"})


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of a run at one moment."""

    age_s: float
    """Age of the run at that moment."""
    dataloader_busy: float | None
    """Share of the time of its event loop, 0 to 1."""
    generating: float | None
    """Trajectories that are leased and not generated so far."""
    at_reward: float | None
    """Trajectories that are generated and not scored so far."""
    lag: float | None
    """Versions by which rollouters are behind, in the mean."""
    gate_filled: float | None
    """Share of what the gate admits that is outstanding."""
    episodes: Mapping[str, float]
    """Episodes that are open by stage; empty where nothing is known of any."""


def levels_of(snapshot: Snapshot) -> Levels:
    """Levels at the moment of a snapshot."""
    rollouters, dataloaders = living_in(snapshot, "rollouter"), living_in(snapshot, "dataloader")
    outstanding, gate = (level_of(dataloaders, f"tickets/{name}") for name in ("outstanding", "gate"))
    return Levels(
        age_s=snapshot.run.age_s,
        dataloader_busy=total(actor.loop_busy for actor in dataloaders),
        generating=level_of(rollouters, "rollout/in_flight"),
        at_reward=level_of(rollouters, "rollout/scoring"),
        lag=mean(versions_behind(snapshot.run, actor) for actor in rollouters),
        gate_filled=None if outstanding is None or not gate else outstanding / gate,
        episodes=stages_of(rollouters),
    )


def stages_of(rollouters: Iterable[ActorView]) -> dict[str, float]:
    """Open episodes by stage."""
    found: dict[str, float] = {}
    for actor in rollouters:
        for name, value in actor.metrics.items():
            if name.startswith(AT):
                stage = name.removeprefix(AT)
                found[stage] = found.get(stage, 0.0) + value
    return found


def living_in(snapshot: Snapshot, role: str) -> list[ActorView]:
    """The actors of a role that are not gone."""
    return [each for each in snapshot.actors if each.name.partition("/")[0] == role and each.condition not in GONE]


def level_of(actors: list[ActorView], figure: str) -> float | None:
    """A gauge, added up over the actors."""
    return total(actor.metrics.get(figure) for actor in actors)


def served_version(actor: ActorView) -> int | None:
    """Version of the weights that a rollouter's engine serves; None before the first."""
    version = int(actor.metrics.get("rollout/served_version", actor.version))
    return version if version >= 0 else None


def versions_behind(run: RunView, actor: ActorView) -> int | None:
    """Versions by which a rollouter's engine is behind the newest; None before its first."""
    version = served_version(actor)
    return None if version is None else max(0, run.version - version)


RATES_S = 10.0
STEPS = 4
SHORTEST_S = 20.0
LONGEST_S = 600.0
KEPT = 120


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot with its levels."""

    snapshot: Snapshot
    levels: Levels

    @property
    def age_s(self) -> float:
        """Age of the run, by a monotonic clock."""
        return self.snapshot.run.age_s

    @property
    def learner(self) -> object:
        """Start of the learner that trained the newest step; None before the first step."""
        return self.snapshot.train[-1].get("start", 0) if self.snapshot.train else None


class History:
    """The newest snapshots of one run, oldest first: all of the last RATES_S, and fewer of the time before."""

    def __init__(self) -> None:
        self._earlier: deque[Moment] = deque()
        self._latest: deque[Moment] = deque()
        """Moments of the last RATES_S, and the one before them."""

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot. One of the same age replaces the newest; a younger one, or one of another run or attempt,
        starts a new history."""
        if self._latest:
            last = self._latest[-1].snapshot
            same = (last.run.run_id, last.run.attempt) == (snapshot.run.run_id, snapshot.run.attempt)
            if not same or snapshot.run.age_s < last.run.age_s:
                self._earlier.clear()
                self._latest.clear()
            elif snapshot.run.age_s == last.run.age_s:
                self._latest.pop()
        window = self.window_s(snapshot)
        self._latest.append(Moment(snapshot, levels_of(snapshot)))
        while len(self._latest) > 1 and self._latest[1].age_s <= snapshot.run.age_s - RATES_S:
            moment = self._latest.popleft()
            if len(self._earlier) > 1 and moment.age_s - self._earlier[-2].age_s < 2 * window / KEPT:
                self._earlier.pop()
            self._earlier.append(moment)
        # One before the window stays, so that the window is complete.
        while len(self._earlier) > 1 and self._earlier[1].age_s <= snapshot.run.age_s - window:
            self._earlier.popleft()

    @staticmethod
    def window_s(snapshot: Snapshot) -> float:
        """Seconds that shares cover: a few whole steps."""
        step_s = median(number_in(line, "time/step_s") for line in snapshot.train[-STEPS:])
        if step_s is None or step_s <= 0.0:
            return SHORTEST_S
        return min(LONGEST_S, step_s * max(STEPS, math.ceil(SHORTEST_S / step_s)))

    @property
    def newest(self) -> Snapshot | None:
        """The newest snapshot; None before the first."""
        return self._latest[-1].snapshot if self._latest else None

    def recent(self) -> Interval:
        """Interval for rates."""
        return Interval(self._back(RATES_S)[0].snapshot, self._latest[-1].snapshot)

    def steps(self) -> Interval | None:
        """Interval for shares; None when there is one snapshot alone."""
        window = self.window()
        return Interval(window[0].snapshot, window[-1].snapshot) if len(window) > 1 else None

    def window(self) -> list[Moment]:
        """The moments from one end of ``steps`` to the other, oldest first; there must be one."""
        found = self._back(self.window_s(self._latest[-1].snapshot))
        stepping = self._stepping(found)
        return stepping if len(stepping) > 1 else found

    def stepping_s(self) -> float:
        """Seconds of ``window`` in which the present learner has trained steps; all of it before the first."""
        stepping = self._stepping(self.window())
        return stepping[-1].age_s - stepping[0].age_s

    @staticmethod
    def _stepping(moments: list[Moment]) -> list[Moment]:
        return [each for each in moments if each.learner == moments[-1].learner]

    def _back(self, seconds: float) -> list[Moment]:
        """The newest moment, and those before it up to the first that is older by so much."""
        found: list[Moment] = []
        for each in chain(reversed(self._latest), reversed(self._earlier)):
            found.append(each)
            if each.age_s <= self._latest[-1].age_s - seconds:
                break
        return found[::-1]
