"""A snapshot with those before it: rates, shares of time, and the verdict on the bottleneck. Pure.

Panes draw from a View. Invariant: an unknown value is None, never 0. The activity of an actor that is
gone or silent is unknown, but its counters stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from asyncrl.messages.snapshot import ENDING, OVER, ActorView, Event, Resource, RunView
from asyncrl.observe.catalogue import edges_of
from asyncrl.observe.metrics_line import Line, number_in, without_first
from asyncrl.observe.snapshots.rates import Interval, Shares, mean, time_mean, total
from asyncrl.top.bottleneck import Flow, Verdict, find_bottleneck
from asyncrl.top.history import GONE, History, Levels, level_of, living_in, served_version, versions_behind

CONTROLLER = "controller/0"
UNHEARD = GONE | {"silent", "condemned"}
"""Conditions in which nothing is known of what an actor does now."""
STEPS_FOR_MEANS = 8
OPEN = 0.5
"""Share of what the gate admits below which nothing waits for the gate."""


class View:
    """The newest snapshot of a history that is not empty, with its past."""

    def __init__(self, history: History) -> None:
        assert history.newest is not None
        steps = history.steps()
        self.snapshot = history.newest
        self.run: RunView = self.snapshot.run
        self.wall: float = self.snapshot.wall
        self.events: list[Event] = self.snapshot.events
        self.actors = self.snapshot.actors
        self.recent = history.recent()
        """Interval for rates."""
        self.steps = steps or Interval(None, self.snapshot)
        """Interval for shares."""
        self.window_s = 0.0 if steps is None else steps.seconds
        """Seconds of ``steps``; 0 if shares are of whole lives."""
        self._stepping_s = history.stepping_s()
        self._levels = [moment.levels for moment in history.window()]
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
        return living_in(self.snapshot, role)

    def condition(self, actor: ActorView) -> str:
        """Condition in the snapshot; "ended" instead of "dead" if the run ends."""
        return "ended" if actor.condition == "dead" and self.run.phase in ENDING else actor.condition

    def state(self, actor: ActorView) -> tuple[str, str, str]:
        """Condition, state and what that waits for: of the actor's first resource, or of the actor itself."""
        told = next(iter(actor.resources), actor)
        return (self.condition(actor), "", "") if is_gone(actor) else (actor.condition, told.state, told.awaiting)

    @cached_property
    def down(self) -> list[str]:
        """Actors of a running run that do not serve, with the reason. A stall report names them itself."""
        if self.run.phase != "running" or self.run.stalled:
            return []
        found = []
        for actor in self.actors:
            if actor.condition in ("dead", "condemned", "silent"):
                found.append(f"{actor.name} ({actor.condition})")
            elif actor.condition == "starting" and actor.restarts:
                found.append(f"{actor.name} (starting again)")
            elif actor.condition == "ready" and any(resource.state == "restarting" for resource in actor.resources):
                found.append(f"{actor.name} (engine restarting)")
        return found

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
            # A pool of another release may have other buckets.
            if seen is not None and len(seen.counts) == len(counts):
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
        """A gauge of the learner, or its value with the newest step."""
        told = total(actor.metrics.get(name) for actor in self.of("learner")[:1])
        return self.number(name) if told is None else told

    @cached_property
    def eta_s(self) -> float | None:
        """Seconds until the last step; None if the run does not train."""
        step_s, left = self.step_mean("time/step_s"), self.run.steps - self.run.step
        trains = self.run.phase == "running" and not self.run.stalled and left > 0
        return left * step_s if step_s is not None and trains else None

    # --- the pipeline ---

    @cached_property
    def buffered(self) -> float | None:
        """Groups in the learner's buffer; unknown after the end of the run."""
        told = total(actor.metrics.get("buffer/groups") for actor in self.living("learner")[:1])
        return told if told is not None or self.run.phase in OVER else self.number("buffer/groups")

    @cached_property
    def behind(self) -> tuple[int, int] | None:
        """(replicas behind the newest version, all replicas that serve one); None without any."""
        lags = [lag for actor in self.of("rollouter") if (lag := self.lag(actor)) is not None]
        return (sum(lag > 0 for lag in lags), len(lags)) if lags else None

    def lag(self, actor: ActorView) -> int | None:
        """Versions that a rollouter is behind."""
        return None if is_gone(actor) else versions_behind(self.run, actor)

    @cached_property
    def bottleneck(self) -> Verdict:
        """The verdict on the bottleneck. It uses means over the window, because levels swing with each step."""
        run, outstanding = self.run, self.level("dataloader", "tickets/outstanding") or 0.0
        return find_bottleneck(
            Flow(
                running=run.phase == "running" and not run.stalled,
                window_s=self._stepping_s if self.steps.seconds else run.age_s,
                rollouters=self.shares(self.of("rollouter")),
                reward=self.shares(self.of("reward")),
                learner=self.learner_shares,
                dataloader_busy=self._mean_level(lambda each: each.dataloader_busy),
                generating=self._mean_level(lambda each: each.generating),
                at_reward=self._mean_level(lambda each: each.at_reward),
                lag=self._mean_level(lambda each: each.lag),
                gate_open=self._gate_open(),
                episodes=self._episodes(),
                # All prompts that are left to train are leased.
                exhausted=run.steps > 0 and outstanding >= (run.steps - run.step) * run.groups_per_step,
            )
        )

    def _mean_level(self, level: Callable[[Levels], float | None]) -> float | None:
        return time_mean([(each.age_s, level(each)) for each in self._levels])

    def _episodes(self) -> dict[str, float]:
        """Open episodes by stage, as means."""
        means: dict[str, float | None] = {}
        for stage in {stage for each in self._levels for stage in each.episodes}:
            means[stage] = time_mean([(each.age_s, each.episodes.get(stage)) for each in self._levels])
        return {stage: level for stage, level in means.items() if level}

    def _gate_open(self) -> bool | None:
        """Whether the gate had much room all the time; None if that is unknown."""
        filled = [each.gate_filled for each in self._levels]
        known = [share for share in filled if share is not None]
        return max(known) < OPEN if len(known) == len(filled) else None


def is_gone(actor: ActorView) -> bool:
    """Whether an actor is not there."""
    return actor.condition in GONE


def now(actor: ActorView, name: str) -> float | None:
    """A gauge of an actor; None if the actor is gone."""
    return None if is_gone(actor) else actor.metrics.get(name)


def version_of(actor: ActorView) -> int | None:
    """Version that a rollouter's engine serves."""
    return None if is_gone(actor) else served_version(actor)


def family(actors: Iterable[ActorView], prefix: str) -> dict[str, float]:
    """Counters whose names begin with ``prefix``, added up, the largest first."""
    found: dict[str, float] = {}
    for actor in actors:
        for name, value in actor.metrics.items():
            if name.startswith(prefix) and value:
                name = name.removeprefix(prefix)
                found[name] = found.get(name, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def numbers(line: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Numbers of a line of metrics whose keys begin with ``prefix``, by the rest of the key."""
    found = {key.removeprefix(prefix): number_in(line, key) for key in line if key.startswith(prefix)}
    return {name: value for name, value in found.items() if value is not None}
