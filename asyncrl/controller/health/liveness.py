"""The controller's eye on the heartbeats: who is silent or out of reach, which host is lost or back, whether the run
stands still.

Decisions are those of ``Registry``, ``Reach``, ``Hosts`` and ``Watchdog``; this shell asks them at every heartbeat
interval and does what follows: it names the culprit, condemns those that are to be killed, and ends the run where its
policy says so. Invariant: nobody is condemned for silence before it was named, and nobody on a host that may be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from asyncrl.controller.health.blame import SeenActor, silence_in_words
from asyncrl.controller.health.reach import Reach, ReadyActor
from asyncrl.controller.health.watchdog import StallReport, Watchdog, patience_of
from asyncrl.controller.joining.host_changes import ComingAndGoing
from asyncrl.controller.joining.hosts import BEATS, Hosts
from asyncrl.controller.observation.observers import Watching
from asyncrl.controller.state.reserve import REWARD
from asyncrl.controller.state.run_state import RunStateMachine
from asyncrl.messages.actors import Condemned, Stuck
from asyncrl.messages.monitor import AwaitRecord
from asyncrl.roles import is_replicated, role_of
from asyncrl.runtime.actor import Actor
from asyncrl.runtime.lifecycle.incarnations import numbers_begin_above
from asyncrl.runtime.lifecycle.registry import Entry, Registry

CUTS_OF_A_REPLICA = 2
"""Cuts in a row after which a replica is not at fault by chance, and is set aside."""
REPORT_SHARE = 0.5
"""Silence of a node agent that is reported, as a share of supervision.agent_silence_s."""
STACKS_BEATS = 3
"""Heartbeats that a culprit has to tell its stacks before the run ends because of it."""
COUNTERS = ("ledger/trained", "rollout/sampled_tokens", "sft/warm_steps")
"""Counters of a heartbeat that show that the run moves, beside the version."""
FRESH_S = 3.0
"""Age below which the waits of a heartbeat are taken as they stand."""


def look_at(registry: Registry, names: Collection[str], now: float) -> Mapping[str, SeenActor]:
    """Each of ``names`` that has beaten in this incarnation. Its times go on where its last heartbeat left them."""
    found = {}
    for name in names:
        entry = registry.entries.get(name)
        if entry is not None and entry.heartbeat is not None:
            found[name] = _seen(registry, entry, now)
    return found


def standings(registry: Registry, names: Collection[str], now: float, beat_s: float) -> Iterator[ReadyActor]:
    """Standings of those of ``names`` that are ready and have missed less than BEATS of the heartbeats to come."""
    for name in names:
        entry = registry.entries.get(name)
        if entry is None or not entry.ready or (beat := entry.heartbeat) is None:
            continue
        if now - entry.beaten < (BEATS + beat.left_out) * beat_s:
            unreached = {record.whom: record.seconds for record in beat.unreached}
            yield ReadyActor(name=name, incarnation=entry.record.incarnation, unreached=unreached)


def _seen(registry: Registry, entry: Entry, now: float) -> SeenActor:
    beat = entry.heartbeat
    assert beat is not None
    age = now - entry.heard
    return SeenActor(
        name=entry.record.name,
        incarnation=entry.record.incarnation,
        state=beat.state,
        state_s=beat.state_s + age,
        waits=_aged(beat.awaits, age),
        progress_s=now - entry.progressed,
        silent_s=registry.silence_of(entry, now),
        ended=not entry.heard_of,
        version=entry.version,
        figures=(float(entry.version), *(entry.figures.get(name, 0.0) for name in COUNTERS)),
    )


def _aged(awaits: list[AwaitRecord], age: float) -> list[AwaitRecord]:
    if age < FRESH_S:
        return awaits
    return [msgspec.structs.replace(wait, seconds=wait.seconds + age) for wait in awaits]


class Oversight:
    """The shell. ``tell`` is called when the run's state has changed, ``changed`` when the registry has."""

    def __init__(
        self,
        actor: Actor,
        registry: Registry,
        run: RunStateMachine,
        hosts: Hosts,
        members: ComingAndGoing,
        watching: Watching,
        *,
        tell: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._actor, self._registry, self._run = actor, registry, run
        self._hosts, self._members, self._watching = hosts, members, watching
        self._tell, self._changed = tell, changed
        self._supervision = actor.config.supervision
        self._watchdog = Watchdog(
            actor.config.watchdog,
            self._supervision.heartbeat_s,
            patience_s=patience_of(actor.config),
            max_restarts=self._supervision.max_restarts,
        )
        self._reach = Reach(
            self._supervision.unreachable_s,
            look_s=self._supervision.heartbeat_s,
            memory_s=self._supervision.restart_window_s,
        )
        self._first_number = numbers_begin_above(actor.context.incarnation)
        self._silent: list[Stuck] = []
        """Actors that are to be killed for their silence."""
        self._silent_agents: set[str] = set()
        """Agents whose silence was reported."""

    @property
    def stalled(self) -> str:
        """Reason that the run stands still; empty while it moves."""
        return self._watchdog.report.text if self._watchdog.report is not None else ""

    async def run(self) -> None:
        """Look at every heartbeat interval, until cancelled."""
        while True:
            await asyncio.sleep(self._supervision.heartbeat_s)
            now = self._actor.clock.now()
            aside = {actor.name for actor in self._run.aside}
            seen = look_at(self._registry, self._run.expected - aside, now)
            self._look_after_hosts(now)
            # An agent is judged by what else is on its host, and on a host that may be lost nobody is.
            judged = self._run.expected - self._hosts.in_doubt(self._registry, now)
            silent = [
                actor for actor in self._registry.silent(now, self._supervision.silence_s) if actor.name in judged
            ]
            self._name_silent(silent, seen)
            self._condemn(silent)
            if self._run.phase == "running":
                self._look_at_paths(judged, now)
            if self._watchdog.look(seen, self._run.phase, now):
                self._on_report(self._watchdog.report)

    def _look_after_hosts(self, now: float) -> None:
        """Take the actors of a lost host for dead, and wait for those of one that is back."""
        log = self._actor.log
        silent = self._hosts.silent_agents(self._registry, now)
        self._report_silent_agents(silent)
        lost, back = self._hosts.look(self._registry, now)
        for host in back:
            log.warning("host is back", host=str(host), actors=sorted(host.actors))
            self._run.host_back(str(host), now)
        for host in lost:
            log.error("host is lost", host=str(host), actors=sorted(host.actors))
            reason = f"its host {host} was silent for {self._supervision.host_lost_s:g} s"
            if (silent_s := silent.get(host.agent, 0.0)) >= self._supervision.host_lost_s:
                reason = f"{host.agent} on its host {host.name} was silent for {silent_s:.0f} s"
            self._registry.lose(sorted(host.actors), reason, now)
            if not self._members.host_lost(host):
                self._run.host_lost(str(host), host.actors, now)
        if lost or back:
            self._changed()

    def _report_silent_agents(self, silent: Mapping[str, float]) -> None:
        """Report each agent that is silent while an actor of its host beats, once, and the end of its silence.

        An agent that is not in ``silent`` is on a host in doubt or lost: whether it was reported stays as it is.
        """
        found = {agent: s for agent, s in silent.items() if s >= REPORT_SHARE * self._supervision.agent_silence_s}
        for agent in found.keys() - self._silent_agents:
            host = self._hosts.known[agent]
            what = f"{agent} on {host.name} was silent for {found[agent]:.0f} s while its actors beat"
            self._watching.happened("error", agent, f"{what}: none of them is restarted or ended there")
            self._actor.log.error("agent is silent", agent=agent, host=str(host), seconds=found[agent])
        for agent in self._silent_agents & silent.keys() - found.keys():
            self._watching.happened("info", agent, "is heard again")
        unknown = self._silent_agents & self._hosts.known.keys() - silent.keys()
        self._silent_agents = found.keys() | unknown

    def _name_silent(self, silent: Sequence[Condemned], seen: Mapping[str, SeenActor]) -> None:
        """Name the silent before they are killed."""
        condemned = {(actor.name, actor.incarnation) for actor in (*self._registry.condemned, *silent)}
        self._silent = [actor for actor in self._silent if (actor.name, actor.incarnation) in condemned]
        for actor in silent:
            words = silence_in_words(seen[actor.name]) if actor.name in seen else f"{actor.name}: {actor.reason}"
            self._silent.append(Stuck(actor.name, actor.incarnation, words, self._first_number))
        self._tell_stuck()

    def _look_at_paths(self, names: Collection[str], now: float) -> None:
        """Fence those of ``names`` that are cut off from the actors that they work with, though they beat."""
        cuts = self._reach.look(standings(self._registry, names, now, self._supervision.heartbeat_s), now)
        self._condemn([Condemned(cut.name, cut.incarnation, cut.reason) for cut in cuts])
        for cut in cuts:
            # The last reward pool holds no tickets that another restart would take along.
            holds_tickets = is_replicated(cut.name) and role_of(cut.name) != REWARD
            if cut.times >= CUTS_OF_A_REPLICA and (holds_tickets or self._run.can_spare(cut.name)):
                # Another restart would only take more tickets along.
                self._run.set_aside(cut.name, cut.incarnation, cut.reason, "", now)
            elif cut.times > self._supervision.max_restarts:
                self._run.fail(cut.name, f"{cut.reason}, after {cut.times - 1} restarts for that", "", 1, now)
        if cuts:
            self._tell()

    def _condemn(self, actors: Sequence[Condemned]) -> None:
        """Have exactly these killed and started again, each with its gang."""
        if actors:
            self._registry.condemn(actors)
            self._actor.log.error("actors are condemned", actors={actor.name: actor.reason for actor in actors})
            self._changed()

    def _on_report(self, report: StallReport | None) -> None:
        """Tell everybody of a report, and do what the configuration wants done then."""
        self._tell_stuck()
        if report is None:
            self._actor.log.info("run moves again")
            self._watching.happened("info", "", "the run moves again")
            return
        self._actor.log.error("run has stalled", culprit=report.name, report=report.text, number=report.number)
        match report.action:
            case "restart":
                held_up = self._actor.clock.now() - report.since
                reason = f"it held up the run for {held_up:.0f} s (watchdog.policy)"
                self._condemn([Condemned(report.name, report.incarnation, reason)])
            case "stop":
                self._actor.tasks.create_task(self._stop_for(report))

    async def _stop_for(self, report: StallReport) -> None:
        """Fail, unless the run moves again before the culprit has told its stacks."""
        await asyncio.sleep(STACKS_BEATS * self._supervision.heartbeat_s)
        held = self._watchdog.report
        # With another ``since`` it is another stall: the run has moved in between.
        if held is not None and held.since == report.since:
            self._run.fail(report.name, report.text, "", 1, self._actor.clock.now())
            self._tell()

    def _tell_stuck(self) -> None:
        report = self._watchdog.report
        held_up = list(self._silent)
        if report is not None:
            # Numbered above those of an earlier controller.
            number = self._first_number + report.number
            held_up.append(Stuck(report.name, report.incarnation, report.text, number))
        if self._run.name_stuck(held_up):
            self._tell()
