"""Detects failures from heartbeats: silent and unreachable actors, hosts that are lost or back, stalls of the run.

``Registry``, ``UnreachableActors``, ``KnownHosts`` and ``StallDetector`` decide. ``FailureDetector`` asks them once in
each heartbeat interval and acts. It reports, *condemns* actors (so that their agents kill and restart them), and ends a
run that has stalled for too long. Invariant: an actor is reported before it is condemned for silence, and no actor is
condemned for silence if its whole host may be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from asyncrl.controller.health.known_hosts import BEATS, KnownHosts
from asyncrl.controller.health.stalls import (
    ActorStatus,
    StallDetector,
    StallReport,
    deadlines_of,
    describe_silence,
)
from asyncrl.controller.health.unreachable import ReadyActor, UnreachableActors, action_after
from asyncrl.controller.observation.observation import Observation
from asyncrl.controller.state.run_actor import RunActor
from asyncrl.messages.actors import Condemned, Stuck
from asyncrl.messages.monitor import Wait
from asyncrl.rpc.lifecycle.incarnations import numbers_begin_above
from asyncrl.rpc.lifecycle.registry import Entry, Registry

REPORT_SHARE = 0.5
"""Share of supervision.agent_silence_s after which the silence of a node agent is reported."""
STACKS_BEATS = 3
"""Heartbeat intervals that agents have for taking stacks before a stall ends the run."""
PROGRESS = ("ledger/trained", "rollout/sampled_tokens", "sft/warm_steps")
"""Counters of a heartbeat that, with the policy version, show that the run moves."""
FRESH_S = 3.0
"""Time (s) since an actor was heard up to which its waits are used as they are; later it is added to each."""


def view_of(registry: Registry, names: Collection[str], now: float) -> Mapping[str, ActorStatus]:
    """Return the status of each of ``names`` whose newest incarnation has sent a heartbeat, at the time ``now``."""
    views = {}
    for name in names:
        entry = registry.entries.get(name)
        if entry is not None and entry.heartbeat is not None:
            views[name] = _status(registry, entry, now)
    return views


def ready_actors(registry: Registry, names: Collection[str], now: float, beat_s: float) -> Iterator[ReadyActor]:
    """Yield those of ``names`` that are ready and have missed fewer than BEATS heartbeats.

    Heartbeats that were left out as announced are not missed. ``beat_s`` is the heartbeat interval.
    """
    for name in names:
        entry = registry.entries.get(name)
        if entry is None or not entry.ready or (beat := entry.heartbeat) is None:
            continue
        if now - entry.beaten < (BEATS + beat.left_out) * beat_s:
            unreached = {record.whom: record.seconds for record in beat.unreached}
            yield ReadyActor(name=name, incarnation=entry.record.incarnation, unreached=unreached)


def _status(registry: Registry, entry: Entry, now: float) -> ActorStatus:
    """Make the status of an actor from its last heartbeat, with the times extended to ``now``."""
    beat = entry.heartbeat
    assert beat is not None
    age = now - entry.heard
    return ActorStatus(
        name=entry.record.name,
        incarnation=entry.record.incarnation,
        state=beat.state,
        state_s=beat.state_s + age,
        waits=_aged(beat.awaits, age),
        silent_s=registry.silence_of(entry, now),
        ended=not entry.heard_of,
        version=entry.version,
        progress=tuple(entry.metrics.get(name, 0.0) for name in PROGRESS),
    )


def _aged(awaits: list[Wait], age: float) -> list[Wait]:
    if age < FRESH_S:
        return awaits
    return [msgspec.structs.replace(wait, seconds=wait.seconds + age) for wait in awaits]


class FailureDetector:
    """Detects failures and acts on them; a part of the controller."""

    def __init__(self, controller: RunActor, hosts: KnownHosts, observation: Observation) -> None:
        self._controller, self._registry, self._run = controller, controller.registry, controller.machine
        self._hosts, self._observation = hosts, observation
        self._supervision = controller.config.supervision
        interval_s = self._supervision.heartbeat_s
        self._stalls = StallDetector(controller.config.watchdog, interval_s, deadlines_of(controller.config))
        self._unreachable = UnreachableActors(self._supervision.unreachable_s, self._supervision.restart_window_s)
        self._above = numbers_begin_above(controller.context.incarnation)
        """Number above all numbers that an earlier controller gave to requests of stacks."""
        self._silent: list[Stuck] = []
        """Actors that are condemned for their silence, each with a report in words for its agent."""
        self._silent_agents: set[str] = set()
        """Agents whose silence was reported and has not ended."""
        self._stall: StallReport | None = None
        """First report of the present stall; None while the run moves."""
        self._stall_count = 0
        """Number of stalls so far."""

    async def run(self) -> None:
        """In each heartbeat interval, check hosts, silent and unreachable actors, and stalls; until cancelled."""
        while True:
            await asyncio.sleep(self._supervision.heartbeat_s)
            now = self._controller.clock.now()
            # A resting replica is stopped for a time (state/reserve.py), so it has no present status.
            resting = {actor.name for actor in self._run.resting}
            statuses = view_of(self._registry, self._run.expected - resting, now)
            self._check_hosts(now)
            # Without actors of hosts in doubt, and without node agents: ``KnownHosts`` judges their silence.
            candidates = self._run.expected - self._hosts.in_doubt(self._registry, now)
            silent = [
                actor for actor in self._registry.silent(now, self._supervision.silence_s) if actor.name in candidates
            ]
            self._report_silent(silent, statuses)
            self._condemn(silent)
            if self._run.phase == "running":
                self._check_paths(candidates, now)
            listening_since = self._registry.listen(now, self._controller.config.watchdog.stall_s)
            if self._stalls.look(statuses, self._run.phase, now, listening_since):
                self._on_stall(self._stalls.report, now)

    def _check_hosts(self, now: float) -> None:
        """Count the actors of newly lost hosts as dead, and expect the actors of hosts that are back; report both."""
        log = self._controller.log
        silent = self._hosts.silent_agents(self._registry, now)
        self._report_silent_agents(silent)
        lost, back = self._hosts.look(self._registry, now)
        for host in back:
            log.warning("host is back", host=str(host), actors=host.actors)
            self._run.host_back(str(host), now)
        for host in lost:
            log.error("host is lost", host=str(host), actors=host.actors)
            reason = f"its host {host} was silent for {self._supervision.host_lost_s:g} s"
            if (silent_s := silent.get(host.agent, 0.0)) >= self._supervision.host_lost_s:
                reason = f"{host.agent} on its host {host.host} was silent for {silent_s:.0f} s"
            self._registry.lose(host.actors, reason, now)
            self._run.host_lost(str(host), host.actors, now)
        if lost or back:
            self._controller.registry_changed()

    def _report_silent_agents(self, silent: Mapping[str, float]) -> None:
        """Report once each agent that is silent while actors of its host send heartbeats, and the end of its silence.

        ``silent`` has the seconds of silence of each agent whose host is neither in doubt nor lost. For any other
        agent nothing is reported, and an earlier report stays open.
        """
        overdue = {agent: s for agent, s in silent.items() if s >= REPORT_SHARE * self._supervision.agent_silence_s}
        for agent in overdue.keys() - self._silent_agents:
            host = self._hosts.known[agent]
            what = f"{agent} on {host.host} was silent for {overdue[agent]:.0f} s while its actors beat"
            self._observation.happened("error", agent, f"{what}: none of them is restarted or ended there")
            self._controller.log.error("agent is silent", agent=agent, host=str(host), seconds=overdue[agent])
        for agent in self._silent_agents & silent.keys() - overdue.keys():
            self._observation.happened("info", agent, "is heard again")
        # Hosts in doubt or lost: it is unknown whether their agents are silent.
        unknown = self._silent_agents & self._hosts.known.keys() - silent.keys()
        self._silent_agents = overdue.keys() | unknown

    def _report_silent(self, silent: Sequence[Condemned], statuses: Mapping[str, ActorStatus]) -> None:
        """Publish the silent actors, so that their agents report them and take their stacks.

        Drops actors of earlier calls that are no longer condemned. ``statuses`` has the last status of each actor.
        """
        condemned = {(actor.name, actor.incarnation) for actor in (*self._registry.condemned, *silent)}
        self._silent = [actor for actor in self._silent if (actor.name, actor.incarnation) in condemned]
        for actor in silent:
            report = (
                describe_silence(statuses[actor.name]) if actor.name in statuses else f"{actor.name}: {actor.reason}"
            )
            self._silent.append(Stuck(actor.name, actor.incarnation, report, number=self._above))
        self._publish_stuck()

    def _check_paths(self, names: Collection[str], now: float) -> None:
        """Condemn those of ``names`` that cannot reach other actors or be reached (unreachable.py).

        A replica that the run can spare has to rest at its second condemnation. Any other actor fails the run at the
        first condemnation beyond supervision.max_restarts.
        """
        max_restarts = self._supervision.max_restarts
        ready = ready_actors(self._registry, names, now, self._supervision.heartbeat_s)
        listening_since = self._registry.listen(now, self._supervision.unreachable_s)
        condemned = self._unreachable.look(ready, now, listening_since)
        self._condemn(condemned)
        for actor in condemned:
            number = self._unreachable.condemnations(actor.name)
            match action_after(number, can_spare=self._run.can_spare(actor.name), max_restarts=max_restarts):
                case "let it rest":
                    self._run.let_rest([actor.name], actor.incarnation, actor.reason, "", now)
                case "fail the run":
                    reason = f"{actor.reason}, after {number - 1} restarts for this (supervision.max_restarts)"
                    self._run.fail(actor.name, reason, "", 1, now)
        if condemned:
            self._controller.state_changed()

    def _condemn(self, actors: Sequence[Condemned]) -> None:
        """Condemn these incarnations, each with its rank group: their agents kill and restart them."""
        if actors:
            self._registry.condemn(actors)
            self._controller.log.error("actors are condemned", actors={actor.name: actor.reason for actor in actors})
            self._controller.registry_changed()

    def _on_stall(self, report: StallReport | None, now: float) -> None:
        """Report a stall to the user, or its end if ``report`` is None. A report that ``ends_run`` ends the run."""
        self._controller.stalled = report.text if report is not None else ""
        self._publish_stuck()
        # ``_stall`` keeps the first report of the stall until the stall is over.
        earlier, self._stall = self._stall, report and (self._stall or report)
        if report is None:
            if earlier is not None and self._run.phase == "running":
                self._controller.log.info("run moves again")
                self._observation.happened("info", "", "the run moves again")
                text = f"the run moves again, after {now - earlier.since:.0f} s in which nothing moved"
                self._controller.notify("stall", text, count=self._stall_count)
            return
        self._stall_count += earlier is None
        self._controller.log.error("run has stalled", report=report.text, number=report.number)
        if report.ends_run:
            self._controller.tasks.create_task(self._end_run(report))
        else:
            self._controller.notify("stall", report.text, count=self._stall_count, meanwhile=self._stalls.consequence)

    async def _end_run(self, report: StallReport) -> None:
        """Give the agents time to take stacks, then fail the run unless it has moved meanwhile."""
        await asyncio.sleep(STACKS_BEATS * self._supervision.heartbeat_s)
        if self._stalls.report is report:
            self._run.fail(self._controller.name, report.text, "", 1, self._controller.clock.now())
            self._controller.state_changed()

    def _publish_stuck(self) -> None:
        """Publish the actors whose stacks the agents take: the silent ones, which they also report, and a stall's."""
        stuck = list(self._silent)
        if (report := self._stalls.report) is not None:
            # Each report has a new number, so that the agents see a new request.
            number = self._above + report.number
            stuck += [Stuck(actor.name, actor.incarnation, report="", number=number) for actor in report.stacks]
        if self._run.set_stuck(stuck):
            self._controller.state_changed()
