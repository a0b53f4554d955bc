"""A snapshot with its past: figures of roles, their rates and shares. Pure; model.py gives them their meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asyncrl.snapshot import ENDING, OVER, ActorView, Resource, Snapshot
from asyncrl.telemetry.metrics_line import number_in, without_first
from asyncrl.telemetry.snapshots.rates import Interval, Shares, mean, time_mean, total
from asyncrl.top.source.history import GONE, History, Levels, level_of, living_in

STEPS_FOR_MEANS = 8
UNHEARD = GONE | {"silent", "condemned"}
"""Conditions in which nothing is known of what an actor does now."""


class Facts:
    """A snapshot with its past. The last words of an actor that is gone are no fact, but its counts are."""

    def __init__(self, snapshot: Snapshot, history: History) -> None:
        steps = history.steps()
        self.snapshot, self.run = snapshot, snapshot.run
        self.recent = history.recent()
        """Interval for rates."""
        self.steps = steps or Interval(None, snapshot)
        """Interval for shares."""
        self.window_s = 0.0 if steps is None else steps.seconds
        self.stepping_s = history.stepping_s()
        """Seconds of ``window`` in which the present learner has trained steps."""
        self.window = [moment.levels for moment in history.window()]
        """Levels over the time that shares are taken over, oldest first."""
        self.by_role: dict[str, list[ActorView]] = {}
        for actor in snapshot.actors:
            self.by_role.setdefault(actor.name.partition("/")[0], []).append(actor)
        self.last: Mapping[str, Any] = snapshot.train[-1] if snapshot.train else {}
        """Line of the newest step; empty before the first."""

    def condition(self, actor: ActorView) -> str:
        """Condition in the snapshot; ended, and not dead, where that is as it should be."""
        return "ended" if actor.condition == "dead" and self.run.phase in ENDING else actor.condition

    def placed(self, actor: ActorView) -> dict[str, Any]:
        """Fields of PlacedRow."""
        return {"name": actor.name, "host": actor.host, "condition": self.condition(actor)}

    def of(self, role: str) -> list[ActorView]:
        return self.by_role.get(role, [])

    def living(self, role: str) -> list[ActorView]:
        """Actors of a role that are not gone."""
        return living_in(self.snapshot, role)

    def level(self, role: str, figure: str) -> float | None:
        """A gauge, added up over the actors of a role that are not gone."""
        return level_of(self.living(role), figure)

    def over_window(self, level: Callable[[Levels], float | None]) -> float | None:
        """The mean of a level over the time that shares are taken over."""
        return time_mean([(each.age_s, level(each)) for each in self.window])

    def counted(self, role: str, figure: str) -> float | None:
        """A counter, added up over the actors of a role."""
        return total(actor.figures.get(figure) for actor in self.of(role))

    def rate(self, role: str, figure: str) -> float | None:
        """Increase of a counter a second, added up over the actors of a role."""
        return total(self.rate_of(actor, figure) for actor in self.of(role))

    def rate_of(self, actor: ActorView, figure: str) -> float | None:
        """Increase of one actor's counter a second; None where the actor is not heard of."""
        return None if actor.condition in UNHEARD else self.recent.rate(actor, figure)

    def states(self, role: str) -> Shares:
        """Shares of the time of all resources of a role, by state."""
        return self.shares(self.of(role))

    def shares(self, actors: Iterable[ActorView]) -> Shares:
        """Shares of the time of all resources of actors that are heard of, by state."""
        pairs: list[tuple[ActorView, Resource]] = [
            (actor, resource) for actor in actors if actor.condition not in UNHEARD for resource in actor.resources
        ]
        return self.steps.shares(pairs)

    def step_mean(self, key: str) -> float | None:
        """The mean over the newest steps. None before the second of a learner."""
        return mean(number_in(line, key) for line in without_first(self.snapshot.train)[-STEPS_FOR_MEANS:])

    def ledger_figure(self, name: str) -> float | None:
        """A figure that the learner tells now, or told with its last step."""
        told = total(actor.figures.get(name) for actor in self.of("learner")[:1])
        return number_in(self.last, name) if told is None else told

    def buffered(self) -> float | None:
        """Groups in the learner's buffer."""
        told = total(actor.figures.get("buffer/groups") for actor in self.living("learner")[:1])
        # After the end of the run there is no buffer; the line of its last step would tell of one.
        return told if told is not None or self.run.phase in OVER else number_in(self.last, "buffer/groups")
