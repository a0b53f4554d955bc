"""Snapshots of a run in order of time, and the newest with its past: rates, shares of time, the bottleneck. Pure.

Panes draw from a SnapshotView of a History. Invariant: an unknown value is None, never 0. The activity of an actor that
is gone or silent is unknown, but its counters stay.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from asyncrl.messages.monitor import ENDING, OVER, ActorView, Interval, Resource, RunView, Shares, Snapshot
from asyncrl.observe.catalogue import edges_of
from asyncrl.observe.metrics_line import Line, number_in, without_first
from asyncrl.top.bottleneck import Flow, Verdict, find_bottleneck

CONTROLLER = "controller/0"
AT = "rollout/episodes_at/"
"""Prefix of the metrics that count open episodes by stage."""
GONE = frozenset({"absent", "dead", "lost", "resting"})
UNHEARD = GONE | {"silent", "condemned"}
"""Conditions in which nothing is known of what an actor does now."""
STEPS_FOR_MEANS = 8
OPEN = 0.5
"""Nothing waits for the gate while less than this share of what it admits is outstanding."""
RATES_S = 10.0
"""Seconds over which rates are computed."""
STEPS = 4
SHORTEST_S = 20.0
LONGEST_S = 600.0
KEPT = 120
"""Shares cover STEPS steps or more, from SHORTEST_S to LONGEST_S. About KEPT snapshots of that time are kept."""

# --- means of values that may be unknown ---


def total(values: Iterable[float | None]) -> float | None:
    """Sum of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def time_mean(moments: Sequence[tuple[float, float | None]]) -> float | None:
    """Compute the mean over time of a level, from ``moments``: (time, level) in order of time.

    Between two moments the level changes linearly. Unknown levels are skipped; None if no level is known.
    """
    known = [(at, level) for at, level in moments if level is not None]
    whole = known[-1][0] - known[0][0] if known else 0.0
    if whole <= 0.0:
        return mean(level for _, level in known)
    return sum((later - at) * (level + then) / 2 for (at, level), (later, then) in pairwise(known)) / whole


# --- actors ---


def is_gone(actor: ActorView) -> bool:
    """Whether an actor is in one of the conditions GONE."""
    return actor.condition in GONE


def now(actor: ActorView, name: str) -> float | None:
    """A gauge of an actor; None if the actor is gone."""
    return None if is_gone(actor) else actor.metrics.get(name)


def version_of(actor: ActorView) -> int | None:
    """Version that a rollouter's engine serves; None before the first, and if the actor is gone."""
    version = int(actor.metrics.get("rollout/served_version", actor.version))
    return version if version >= 0 and not is_gone(actor) else None


def living_in(snapshot: Snapshot, role: str) -> list[ActorView]:
    """The actors of a role that are not gone."""
    return [each for each in snapshot.actors if each.name.partition("/")[0] == role and not is_gone(each)]


def level_of(actors: Iterable[ActorView], name: str) -> float | None:
    """A gauge, added up over the actors."""
    return total(actor.metrics.get(name) for actor in actors)


def versions_behind(run: RunView, actor: ActorView) -> int | None:
    """Versions by which a rollouter's engine is behind the newest."""
    version = version_of(actor)
    return None if version is None else max(0, run.version - version)


def family(actors: Iterable[ActorView], prefix: str) -> dict[str, float]:
    """Metrics whose names begin with ``prefix``, added up, the largest first."""
    found: dict[str, float] = {}
    for actor in actors:
        for name, value in actor.metrics.items():
            if name.startswith(prefix) and value:
                name = name.removeprefix(prefix)
                found[name] = found.get(name, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


# --- history ---


def levels_of(snapshot: Snapshot) -> dict[str, float | None]:
    """The levels of one snapshot, by the fields of Flow (bottleneck.py); the verdict uses their means over time.

    ``gate`` is outstanding groups divided by the groups that the gate admits. Open episodes are counted by stage,
    under the names of their metrics.
    """
    rollouters, dataloaders = living_in(snapshot, "rollouter"), living_in(snapshot, "dataloader")
    outstanding, gate = (level_of(dataloaders, f"tickets/{name}") for name in ("outstanding", "gate"))
    stages = {name for actor in rollouters for name in actor.metrics if name.startswith(AT)}
    return {
        "dataloader_busy": total(actor.loop_busy for actor in dataloaders),
        "generating": level_of(rollouters, "rollout/in_flight"),
        "at_reward": level_of(rollouters, "rollout/scoring"),
        "lag": mean(versions_behind(snapshot.run, actor) for actor in rollouters),
        "gate": None if outstanding is None or not gate else outstanding / gate,
        **{stage: level_of(rollouters, stage) for stage in stages},
    }


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot with its levels."""

    snapshot: Snapshot
    levels: Mapping[str, float | None]

    @property
    def age_s(self) -> float:
        """Age of the run, by a monotonic clock."""
        return self.snapshot.run.age_s

    @property
    def learner(self) -> object:
        """Start of the learner that trained the newest step; None before the first step."""
        return self.snapshot.train[-1].get("start", 0) if self.snapshot.train else None


class History:
    """The newest snapshots of one run, oldest first: all of the last RATES_S, and about KEPT of ``window_s``."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot. A snapshot of the same age replaces the newest one. A younger snapshot, or one of another run
        or attempt, starts a new history."""
        now, last = snapshot.run, self.newest.run if self.newest is not None else None
        if last is None or (last.run_id, last.attempt) != (now.run_id, now.attempt) or now.age_s < last.age_s:
            self._moments = []
        found, window = [*self._moments, Moment(snapshot, levels_of(snapshot))], self.window_s(snapshot)
        self._moments = []
        # The last moment before the window, and the last before RATES_S, stay: the moments cover the whole time.
        for moment, later in pairwise(found):
            apart = not self._moments or moment.age_s - self._moments[-1].age_s >= window / KEPT
            passed = now.age_s - later.age_s
            if moment.age_s < later.age_s and passed < window and (apart or passed < RATES_S):
                self._moments.append(moment)
        self._moments.append(found[-1])

    @staticmethod
    def window_s(snapshot: Snapshot) -> float:
        """Seconds that shares cover: at least STEPS steps, from SHORTEST_S to LONGEST_S; SHORTEST_S before any step."""
        durations = [each for line in snapshot.train[-STEPS:] if (each := number_in(line, "time/step_s")) is not None]
        step_s = statistics.median(durations) if durations else 0.0
        return min(LONGEST_S, step_s * max(STEPS, math.ceil(SHORTEST_S / step_s))) if step_s > 0.0 else SHORTEST_S

    @property
    def newest(self) -> Snapshot | None:
        """The newest snapshot; None before the first."""
        return self._moments[-1].snapshot if self._moments else None

    def recent(self) -> Interval:
        """The interval of the last RATES_S, for rates."""
        return Interval(self._back(RATES_S)[0].snapshot, self._moments[-1].snapshot)

    def steps(self) -> Interval | None:
        """The interval of ``window``, for shares of time; None with a single snapshot."""
        window = self.window()
        return Interval(window[0].snapshot, window[-1].snapshot) if len(window) > 1 else None

    def window(self) -> list[Moment]:
        """The moments of the last ``window_s``, oldest first; the history must not be empty.

        If at least two of the moments belong to the present learner, the others are left out.
        """
        found = self._back(self.window_s(self._moments[-1].snapshot))
        stepping = of_present_learner(found)
        return stepping if len(stepping) > 1 else found

    def _back(self, seconds: float) -> list[Moment]:
        """The moments of the last ``seconds``, oldest first, and the one before them."""
        begin_s = self._moments[-1].age_s - seconds
        return self._moments[max(0, bisect_right(self._moments, begin_s, key=lambda each: each.age_s) - 1) :]


def of_present_learner(moments: list[Moment]) -> list[Moment]:
    """The moments whose newest step was trained by the present learner."""
    return [each for each in moments if each.learner == moments[-1].learner]


# --- the newest snapshot ---


class SnapshotView:
    """The newest snapshot of a history that is not empty, with its past."""

    def __init__(self, history: History) -> None:
        assert history.newest is not None
        steps = history.steps()
        self.snapshot = history.newest
        self.run: RunView = self.snapshot.run
        self.wall: float = self.snapshot.wall
        self.events, self.actors = self.snapshot.events, self.snapshot.actors
        self.recent = history.recent()
        """Interval for rates."""
        self.steps = steps or Interval(None, self.snapshot)
        """Interval for shares."""
        self.window_s = 0.0 if steps is None else steps.seconds
        """Seconds of ``steps``; 0 if shares cover the time since each start."""
        self._window = history.window()
        """Moments over which the verdict takes the means of levels."""
        self._by_role: dict[str, list[ActorView]] = {}
        for actor in self.actors:
            self._by_role.setdefault(actor.name.partition("/")[0], []).append(actor)
        self.last: Line = self.snapshot.train[-1] if self.snapshot.train else {}
        """Line of the newest step; empty before the first."""

    # --- actors ---

    def of(self, role: str) -> list[ActorView]:
        """All actors of a role."""
        return self._by_role.get(role, [])

    def living(self, role: str) -> list[ActorView]:
        """The actors of a role that are not gone."""
        return [actor for actor in self.of(role) if not is_gone(actor)]

    def condition(self, actor: ActorView) -> str:
        """Condition in the snapshot; "ended" instead of "dead" if the run ends."""
        return "ended" if actor.condition == "dead" and self.run.phase in ENDING else actor.condition

    def state(self, actor: ActorView) -> tuple[str, str, str]:
        """(condition, state, what it waits for) of the actor's first resource, or of the actor if it has none."""
        source = next(iter(actor.resources), actor)
        return (self.condition(actor), "", "") if is_gone(actor) else (actor.condition, source.state, source.awaiting)

    # --- metrics ---

    def level(self, role: str, name: str) -> float | None:
        """A gauge, added up over the actors of a role that are not gone."""
        return level_of(self.living(role), name)

    def counted(self, role: str, *names: str) -> float | None:
        """Counters, added up over the actors of a role."""
        return total(actor.metrics.get(name) for actor in self.of(role) for name in names)

    def rate(self, role: str, name: str) -> float | None:
        """Increase of a counter per second, added up over the actors of a role."""
        return total(self.rate_of(actor, name) for actor in self.of(role))

    def rate_of(self, actor: ActorView, name: str) -> float | None:
        """Increase of one actor's counter per second; None if the actor is not heard."""
        return None if actor.condition in UNHEARD else self.recent.rate(actor, name)

    def histogram(self, role: str, name: str) -> tuple[list[int], float]:
        """Counts by bucket and the sum of all values that the histograms of a role took in the window."""
        counts, whole = [0] * (len(edges_of(name)) + 1), 0.0
        for actor in self.of(role):
            seen = self.steps.histogram(actor, name)
            if seen is not None:
                counts = [one + other for one, other in zip(counts, seen.counts, strict=True)]
                whole += seen.sum
        return counts, whole

    def shares(self, actors: Iterable[ActorView]) -> Shares:
        """Shares of the time of all resources of these actors, by state; only of actors that are heard."""
        pairs: list[tuple[ActorView, Resource]] = [
            (actor, resource) for actor in actors if actor.condition not in UNHEARD for resource in actor.resources
        ]
        return self.steps.shares(pairs)

    @cached_property
    def learner_shares(self) -> Shares:
        """Shares of rank 0: the other ranks follow it."""
        return self.shares(self.of("learner")[:1])

    @cached_property
    def tokens_per_s(self) -> float | None:
        """Tokens sampled per second."""
        return self.rate("rollouter", "rollout/sampled_tokens")

    # --- steps ---

    def number(self, key: str) -> float | None:
        """A number of the newest step."""
        return number_in(self.last, key)

    def step_mean(self, key: str) -> float | None:
        """The mean over the newest steps. None before the second step of a learner."""
        return mean(number_in(line, key) for line in without_first(self.snapshot.train)[-STEPS_FOR_MEANS:])

    def of_learner(self, name: str) -> float | None:
        """A gauge of the learner; if that is unknown, the value in the line of the newest step."""
        gauge = total(actor.metrics.get(name) for actor in self.of("learner")[:1])
        return self.number(name) if gauge is None else gauge

    # --- the pipeline ---

    @cached_property
    def buffered(self) -> float | None:
        """Groups in the learner's buffer; unknown after the end of the run."""
        gauge = total(actor.metrics.get("buffer/groups") for actor in self.living("learner")[:1])
        return gauge if gauge is not None or self.run.phase in OVER else self.number("buffer/groups")

    @cached_property
    def behind(self) -> tuple[int, int] | None:
        """(replicas behind the newest version, all replicas that serve one); None without any."""
        lags = [lag for actor in self.of("rollouter") if (lag := versions_behind(self.run, actor)) is not None]
        return (sum(lag > 0 for lag in lags), len(lags)) if lags else None

    @cached_property
    def bottleneck(self) -> Verdict:
        """The verdict on the bottleneck. It uses means over the window, because levels swing with each step."""
        run, outstanding = self.run, self.level("dataloader", "tickets/outstanding") or 0.0
        # The time in which the present learner has trained steps; the whole window before the first step.
        begin, *_ = stepping = of_present_learner(self._window)
        gate = [moment.levels["gate"] for moment in self._window]
        stages = {name for moment in self._window for name in moment.levels if name.startswith(AT)}
        return find_bottleneck(
            Flow(
                running=run.phase == "running" and not run.stalled,
                window_s=stepping[-1].age_s - begin.age_s if self.steps.seconds else run.age_s,
                rollouters=self.shares(self.of("rollouter")),
                reward=self.shares(self.of("reward")),
                learner=self.learner_shares,
                dataloader_busy=self._mean_level("dataloader_busy"),
                generating=self._mean_level("generating"),
                at_reward=self._mean_level("at_reward"),
                lag=self._mean_level("lag"),
                # Open if the gate had much room at each moment; unknown if one moment is unknown.
                gate_open=None if None in gate else max(share for share in gate if share is not None) < OPEN,
                episodes={stage.removeprefix(AT): level for stage in stages if (level := self._mean_level(stage))},
                # All prompts that are left to train are leased.
                exhausted=run.steps > 0 and outstanding >= (run.steps - run.step) * run.groups_per_step,
            )
        )

    def _mean_level(self, name: str) -> float | None:
        return time_mean([(moment.age_s, moment.levels.get(name)) for moment in self._window])
