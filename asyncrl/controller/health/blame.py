"""The actor that holds up a run in which nothing moves, found by following who waits on whom.

From the learner on, every wait is followed to the actor that is waited for: a role stands for all of its actors. Waits
of normal idleness are followed only where an actor has no other that leads to anybody. The way ends at an actor that is
silent, has ended, is busy or waits for something within itself; at one that waits on nobody; or where it comes round to
itself. Among several such ends the silent one counts first, then the one whose way leads over real waits, then the one
that has lasted longest. To ask the parameter server for newer weights is real for an actor that has not the newest, and
leads nowhere for one that has.

Invariant: exactly one actor is named for any input, and the chain begins with the learner unless no way leads from
there. Pure: times are given in seconds up to now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.messages.monitor import AwaitRecord
from asyncrl.roles import role_of

FIRST = "learner/0"
CONTROLLER, PARAMETER_SERVER = "controller", "parameter_server"
LEISURE = frozenset({"ready", "waiting", "following", "idle", "done"})
"""States in which an actor does nothing by itself."""
NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenActor:
    """An actor as the controller knows it now."""

    name: str
    incarnation: int
    state: str
    state_s: float = 0.0
    waits: Sequence[AwaitRecord] = ()
    progress_s: float = 0.0
    """Seconds since its own progress last moved."""
    silent_s: float = 0.0
    """Seconds since it was last heard of."""
    ended: bool = False
    """Its process has ended, and no other has been heard of."""
    version: int = -1
    """The newest weights it knows of."""
    figures: tuple[float, ...] = ()
    """Figures of its achievements in this incarnation; each only grows. As many in all incarnations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The actor that holds up the run, and the way there in words."""

    name: str
    incarnation: int
    chain: str


@dataclass(frozen=True, slots=True)
class _Step:
    """An actor on the way, and the wait through which the way goes on; None at its end."""

    actor: SeenActor
    wait: AwaitRecord | None = None


@dataclass(frozen=True, slots=True)
class _End:
    way: tuple[_Step, ...]
    culprit: SeenActor
    words: str
    silent: bool
    idle: bool
    """Whether the way leads over a wait of normal idleness."""
    seconds: float


@dataclass(slots=True)
class _Search:
    actors: Mapping[str, SeenActor]
    silent_after_s: float
    newest: int
    ends: list[_End] = field(default_factory=list)
    _of_role: dict[str, list[SeenActor]] = field(default_factory=dict)
    _followed: set[tuple[str, bool]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for actor in self.actors.values():
            self._of_role.setdefault(role_of(actor.name), []).append(actor)

    def follow(self, actor: SeenActor, way: tuple[_Step, ...], idle: bool) -> None:
        """Follow the waits of an actor that ``way`` has led to."""
        for at, step in enumerate(way):
            if step.actor is actor:
                self._cycle(way[at:], way, idle)
                return
        if (actor.name, idle) in self._followed:
            return
        self._followed.add((actor.name, idle))
        if actor.ended:
            self._end(actor, way, idle, "has ended or is to be killed, and is not back", actor.silent_s)
            return
        if self._is_silent(actor):
            words = f"has not been heard of for {actor.silent_s:.0f} s (it was {actor.state})"
            self._end(actor, way, idle, words, actor.silent_s, silent=True)
            return
        real = [wait for wait in actor.waits if self._is_real(actor, wait)]
        others = [wait for wait in real if any(self._targets(actor, wait))]
        # The controller is not one of the actors that are judged, and a wait on it ends no way.
        elsewhere = [wait for wait in real if wait not in others and role_of(wait.whom) != CONTROLLER]
        for wait in others:
            self._onwards(actor, wait, way, idle)
        if elsewhere:
            worst = max(elsewhere, key=lambda wait: wait.seconds)
            whom = f"{worst.whom}, which is not there," if "/" in worst.whom else f"its {worst.whom}"
            words = f"waits {worst.seconds:.0f} s on {whom} for {worst.what} ({actor.state})"
            self._end(actor, way, idle, words, worst.seconds)
        elif actor.state not in LEISURE:
            self._end(actor, way, idle, f"is {actor.state} for {actor.state_s:.0f} s", actor.state_s)
        elif not others:
            leads_on = [
                wait
                for wait in actor.waits
                if role_of(wait.whom) != PARAMETER_SERVER and any(self._targets(actor, wait))
            ]
            for wait in leads_on:
                self._onwards(actor, wait, way, True)
            if not leads_on:
                reached = way[-1].wait if way else None
                seconds = reached.seconds if reached is not None else actor.progress_s
                words = f"is {actor.state}, waits on nobody and has made no progress for {actor.progress_s:.0f} s"
                self._end(actor, way, idle, words, seconds)

    def _onwards(self, actor: SeenActor, wait: AwaitRecord, way: tuple[_Step, ...], idle: bool) -> None:
        for target in self._targets(actor, wait):
            self.follow(target, (*way, _Step(actor, wait)), idle)

    def _targets(self, actor: SeenActor, wait: AwaitRecord) -> Iterator[SeenActor]:
        if wait.whom in self.actors:
            yield self.actors[wait.whom]
        else:
            yield from (other for other in self._of_role.get(wait.whom, ()) if other is not actor)

    def _is_real(self, actor: SeenActor, wait: AwaitRecord) -> bool:
        return not wait.idle or (role_of(wait.whom) == PARAMETER_SERVER and actor.version < self.newest)

    def _is_silent(self, actor: SeenActor) -> bool:
        return actor.silent_s >= self.silent_after_s

    def _cycle(self, round: tuple[_Step, ...], way: tuple[_Step, ...], idle: bool) -> None:
        slowest = max(round, key=lambda step: step.actor.progress_s)
        # The cycle is as old as the youngest wait of it.
        seconds = min(step.wait.seconds for step in round if step.wait is not None)
        words = f"which closes a cycle; {slowest.actor.name} has been without progress longest"
        self.ends.append(_End(way, slowest.actor, words, False, idle, seconds))

    def _end(
        self, actor: SeenActor, way: tuple[_Step, ...], idle: bool, words: str, seconds: float, *, silent: bool = False
    ) -> None:
        self.ends.append(_End((*way, _Step(actor)), actor, words, silent, idle, seconds))


def find_culprit(actors: Mapping[str, SeenActor], silent_after_s: float) -> Blame:
    """Name the actor that holds up the others. ``actors`` are all but the controller, at least one."""
    search = _Search(actors, silent_after_s, max(actor.version for actor in actors.values()))
    if FIRST in actors:
        search.follow(actors[FIRST], (), False)
    reached = {step.actor.name for end in search.ends for step in end.way}
    for actor in actors.values():
        # An actor that does not move at all is suspect even if nobody is known to wait for it.
        if actor.name not in reached and not actor.ended and (search._is_silent(actor) or not search.ends):
            # As idle: a way that leads from the learner over real waits counts before it.
            search.follow(actor, (), True)
    if not search.ends:
        slowest = max(actors.values(), key=lambda actor: actor.progress_s)
        return Blame(name=slowest.name, incarnation=slowest.incarnation, chain=f"{slowest.name} is {slowest.state}")
    worst = min(search.ends, key=lambda end: (not end.silent, end.idle, -end.seconds))
    chain = _in_words(worst)
    silent = [a.name for a in actors.values() if search._is_silent(a) and a is not worst.culprit and not a.ended]
    if silent:
        shown = ", ".join(sorted(silent)[:NAMES_SHOWN])
        more = f" and {len(silent) - NAMES_SHOWN} more" if len(silent) > NAMES_SHOWN else ""
        chain += f"; not heard of either: {shown}{more}"
    return Blame(name=worst.culprit.name, incarnation=worst.culprit.incarnation, chain=chain)


def silence_in_words(actor: SeenActor) -> str:
    """Words for an actor that is killed for its silence."""
    waited = [wait for wait in actor.waits if not wait.idle]
    doing = f"it was {actor.state}"
    if waited:
        oldest = max(waited, key=lambda wait: wait.seconds)
        doing += f" and waited on {oldest.whom} for {oldest.what}"
    return f"{actor.name} has not been heard of for {actor.silent_s:.0f} s ({doing})"


def _in_words(end: _End) -> str:
    parts = []
    for step in end.way:
        wait = step.wait
        if wait is not None:
            whom = f" on {wait.whom}" if "/" in wait.whom else ""
            parts.append(f"{step.actor.name} waits {wait.seconds:.0f} s{whom} for {wait.what}")
    if end.way[-1].wait is None:
        parts.append(f"{end.culprit.name} {end.words}")
    else:
        parts[-1] += f", {end.words}"
    return "; ".join(parts)
