"""The levels of a run at one moment. Pure.

Levels swing with every step, so that they are told as means over time: they are taken once of each snapshot, and
kept beside it. An actor that is gone has none; a level that is not known is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncrl.monitor.rates import mean, total
from asyncrl.snapshot import ActorView, RunView, Snapshot

AT = "rollout/episodes_at/"
"""Beginning of the names of figures of stages."""
GONE = frozenset({"absent", "dead", "lost", "aside"})


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of a run at one moment."""

    wall: float
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
        wall=snapshot.wall,
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
        for name, value in actor.figures.items():
            if name.startswith(AT):
                stage = name.removeprefix(AT)
                found[stage] = found.get(stage, 0.0) + value
    return found


def living_in(snapshot: Snapshot, role: str) -> list[ActorView]:
    """The actors of a role that are not gone."""
    return [each for each in snapshot.actors if each.name.partition("/")[0] == role and each.condition not in GONE]


def level_of(actors: list[ActorView], figure: str) -> float | None:
    """A gauge, added up over the actors."""
    return total(actor.figures.get(figure) for actor in actors)


def served_version(actor: ActorView) -> int | None:
    """Version of the weights that a rollouter's engine serves; None before the first."""
    version = int(actor.figures.get("rollout/served_version", actor.version))
    return version if version >= 0 else None


def versions_behind(run: RunView, actor: ActorView) -> int | None:
    """Versions by which a rollouter's engine is behind the newest; None before its first."""
    version = served_version(actor)
    return None if version is None else max(0, run.version - version)
