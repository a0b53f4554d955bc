"""Snapshots of a run in order of time, and the newest with its past: rates, shares of time, the bottleneck. Pure.

Panes draw from a SnapshotView of a History. Invariant: an unknown value is None, never 0. The activity of an actor that
is not heard (UNHEARD) is unknown, but its counters stay.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise

from asyncrl.messages.monitor import ENDING, OVER, ActorView, Interval, Resource, RunView, Shares, Snapshot
from asyncrl.observe.metrics_line import Line, number_in, without_first
from asyncrl.top.bottleneck import Flow, Verdict, find_bottleneck

AT = "rollout/episodes_at/"
"""Prefix of the metrics that count open episodes by stage."""
GONE = frozenset({"absent", "dead", "lost", "resting"})
"""Conditions of an actor without a process, or on a lost host; a resting one died too often and is set aside."""
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


def version_of(actor: ActorView) -> int | None:
    """Version that a rollouter's engine serves; None before the first, and if the actor is gone."""
    version = int(actor.metrics.get("rollout/served_version", actor.version))
    return version if version >= 0 and not is_gone(actor) else None


def versions_behind(run: RunView, actor: ActorView) -> int | None:
    """Versions by which a rollouter's engine is behind the newest; None if its own is unknown."""
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


class Moment:
    """A snapshot with its actors by role."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot: Snapshot = snapshot
        self.run: RunView = snapshot.run
        self._by_role: dict[str, list[ActorView]] = {}
        for actor in snapshot.actors:
            self._by_role.setdefault(actor.name.partition("/")[0], []).append(actor)

    def of(self, role: str) -> list[ActorView]:
        """All actors of a role."""
        return self._by_role.get(role, [])

    def living(self, role: str) -> list[ActorView]:
        """The actors of a role that are not gone."""
        return [actor for actor in self.of(role) if not is_gone(actor)]

    def level(self, role: str, name: str) -> float | None:
        """A gauge, added up over the actors of a role that are not gone."""
        return total(actor.metrics.get(name) for actor in self.living(role))

    @cached_property
    def levels(self) -> dict[str, float | None]:
        """Levels at this moment, from which ``SnapshotView.bottleneck`` makes fields of Flow (bottleneck.py).

        ``gate`` is outstanding groups divided by the groups that the gate admits, and gives ``gate_open``. The metrics
        tickets/NAME are the dataloader's, on leases and the gate. Open episodes are counted by stage, under the names
        of their metrics (AT), and give ``episodes``. Each other level gives the field of its name.
        """
        rollouters = self.living("rollouter")
        outstanding, gate = (self.level("dataloader", f"tickets/{name}") for name in ("outstanding", "gate"))
        stages = {name for actor in rollouters for name in actor.metrics if name.startswith(AT)}
        return {
            "dataloader_busy": total(actor.loop_busy for actor in self.living("dataloader")),
            "generating": self.level("rollouter", "rollout/in_flight"),
            "at_reward": self.level("rollouter", "rollout/scoring"),
            "lag": mean(versions_behind(self.run, actor) for actor in rollouters),
            "gate": None if outstanding is None or not gate else outstanding / gate,
            **{stage: self.level("rollouter", stage) for stage in stages},
        }


class History:
    """The newest snapshots of one run, oldest first: all of the last RATES_S, and about KEPT of ``window_s``."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot. Its age is ``run.age_s``: one of the same age as the newest replaces it. One of a smaller
        age, or of another run or attempt, starts a new history."""
        now, last = snapshot.run, self.newest.run if self.newest is not None else None
        if last is None or (last.run_id, last.attempt) != (now.run_id, now.attempt) or now.age_s < last.age_s:
            self._moments = []
        found, window = [*self._moments, Moment(snapshot)], self.window_s(snapshot)
        self._moments = []
        # ``passed`` is the time since ``later``, not since ``moment``. So the last moment before the window, and the
        # last before RATES_S, stay too: the moments cover the whole time.
        for moment, later in pairwise(found):
            apart = not self._moments or moment.run.age_s - self._moments[-1].run.age_s >= window / KEPT
            passed = now.age_s - later.run.age_s
            if moment.run.age_s < later.run.age_s and passed < window and (apart or passed < RATES_S):
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

    def steps(self) -> Interval:
        """The interval of ``window``, for shares of time. Its beginning is unknown with a single snapshot."""
        *earlier, last = self.window()
        return Interval(earlier[0].snapshot if earlier else None, last.snapshot)

    def window(self) -> list[Moment]:
        """The moments of the last ``window_s``, oldest first; the history must not be empty.

        If at least two of the moments belong to the present learner, the others are left out.
        """
        found = self._back(self.window_s(self._moments[-1].snapshot))
        stepping = of_present_learner(found)
        return stepping if len(stepping) > 1 else found

    def _back(self, seconds: float) -> list[Moment]:
        """The moments of the last ``seconds``, oldest first, and the one before them."""
        begin_s = self._moments[-1].run.age_s - seconds
        return self._moments[max(0, bisect_right(self._moments, begin_s, key=lambda each: each.run.age_s) - 1) :]


def of_present_learner(moments: list[Moment]) -> list[Moment]:
    """The moments whose newest step was trained by the present learner."""
    # The start of the learner that trained the newest step; None before the first step.
    starts = [each.snapshot.train[-1].get("start", 0) if each.snapshot.train else None for each in moments]
    return [each for each, start in zip(moments, starts, strict=True) if start == starts[-1]]


# --- the newest snapshot ---


class SnapshotView(Moment):
    """The newest snapshot of a history that is not empty, with its past."""

    def __init__(self, history: History) -> None:
        self._window = history.window()
        """Moments over which the verdict takes the means of levels."""
        super().__init__(self._window[-1].snapshot)
        self.recent = history.recent()
        """Interval for rates."""
        self.steps = history.steps()
        """Interval for shares."""
        self.last: Line = self.snapshot.train[-1] if self.snapshot.train else {}
        """Line of the newest step; empty before the first."""

    def condition(self, actor: ActorView) -> str:
        """Condition in the snapshot; "ended" instead of "dead" if the run ends."""
        return "ended" if actor.condition == "dead" and self.run.phase in ENDING else actor.condition

    def state(self, actor: ActorView) -> tuple[str, str, str]:
        """(condition, state, thing that the state waits for) of the actor's first resource, or else of the actor.

        Only the condition is known of an actor that is gone.
        """
        source = next(iter(actor.resources), actor)
        return (self.condition(actor), "", "") if is_gone(actor) else (actor.condition, source.state, source.awaiting)

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
        found = [each for actor in self.of(role) if (each := self.steps.histogram(actor, name)) is not None]
        counts = [sum(bucket) for bucket in zip(*(each.counts for each in found), strict=True)]
        return counts, sum(each.sum for each in found)

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

    def number(self, key: str) -> float | None:
        """A number of the newest step."""
        return number_in(self.last, key)

    def step_mean(self, key: str) -> float | None:
        """The mean over the newest STEPS_FOR_MEANS steps, without the first after each start of the learner."""
        return mean(number_in(line, key) for line in without_first(self.snapshot.train)[-STEPS_FOR_MEANS:])

    def of_learner(self, name: str) -> float | None:
        """A gauge of the learner; if that is unknown, the value in the line of the newest step."""
        gauge = total(actor.metrics.get(name) for actor in self.of("learner")[:1])
        return self.number(name) if gauge is None else gauge

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
        window = [(moment.run.age_s, moment.levels) for moment in self._window]
        names = {name for _, levels in window for name in levels}
        means = {name: time_mean([(at, levels.get(name)) for at, levels in window]) for name in names}
        gate = [levels["gate"] for _, levels in window]
        # The time in which the present learner has trained steps; the whole window before the first step. With a single
        # snapshot it is the age of the run.
        begin, *_ = stepping = of_present_learner(self._window)
        return find_bottleneck(
            Flow(
                running=run.phase == "running" and not run.stalled,
                window_s=stepping[-1].run.age_s - begin.run.age_s if self.steps.seconds else run.age_s,
                rollouters=self.shares(self.of("rollouter")),
                reward=self.shares(self.of("reward")),
                learner=self.learner_shares,
                dataloader_busy=means["dataloader_busy"],
                generating=means["generating"],
                at_reward=means["at_reward"],
                lag=means["lag"],
                # Open if the gate had much room at each moment; unknown if one moment is unknown.
                gate_open=None if None in gate else max(share for share in gate if share is not None) < OPEN,
                episodes={
                    name.removeprefix(AT): level for name, level in means.items() if name.startswith(AT) and level
                },
                # All prompts that are left to train are leased.
                exhausted=run.steps > 0 and outstanding >= (run.steps - run.step) * run.groups_per_step,
            )
        )
